"""Replicas that differ are told apart before they answer anything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cacheblend_rag.app.fleet.replica import check_agreed, terms_of
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.store import MemoryStore
from cacheblend_rag.store.encryption import KEY_VARIABLE
from tests.probes import engine_of

TERMS: dict[str, object] = {"dtype": "float32", "recompute_ratio": "auto", "embedder": [[0.25, 0.5], [1.0, 0.0]]}


def service(**options: Any) -> Any:
    """As much of a server as its terms are of."""
    embeddings = SimpleNamespace(fingerprint=np.array([[0.25, 0.5]]))
    return SimpleNamespace(engine=engine_of(**options), embeddings=embeddings)


def test_equal_replicas_agree() -> None:
    check_agreed(TERMS, TERMS)
    check_agreed(TERMS, TERMS | {"embedder": [[0.250001, 0.5], [1.0, 0.000001]]})
    check_agreed(terms_of(service()), terms_of(service()))


def test_differing_replica_is_refused_with_both_values() -> None:
    differ = {"dtype": "bfloat16", "recompute_ratio": 0.3, "embedder": [[0.5, 0.25], [1.0, 0.0]]}
    for field, value in differ.items():
        with pytest.raises(ConfigError) as caught:
            check_agreed(TERMS, TERMS | {field: value})
        message = str(caught.value)
        assert field in message
        assert repr(str(value)) in message or repr(value) in message
        assert repr(TERMS[field]) in message


def test_replicas_agree_on_options_that_decide_what_is_stored_or_answered() -> None:
    options = {"separator": "\n---\n", "condition": "context", "selection": "boundary", "min_tokens": 7, "salt": "60"}
    here = terms_of(service())
    for option, value in options.items():
        there = terms_of(service(**{option: value}))
        assert here.keys() == there.keys()
        assert [name for name in here if here[name] != there[name]] == [option]


def test_another_key_for_encryption_is_told_and_no_secret_is(monkeypatch: pytest.MonkeyPatch) -> None:
    here = terms_of(service(salt="a secret"))
    monkeypatch.setenv(KEY_VARIABLE, "an hour ago")
    there = terms_of(service(salt="a secret", store=MemoryStore()))
    assert [name for name in here if here[name] != there[name]] == ["encryption"]
    assert "secret" not in str(there)
    assert "hour" not in str(there)
