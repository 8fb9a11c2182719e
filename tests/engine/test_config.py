"""Options: defaults, environment variables, and messages that name option, value and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import BlendConfig
from cacheblend_rag.config import ENV_PREFIX, parse_bytes
from cacheblend_rag.errors import CacheBlendError, ConfigError

FROM_ENVIRONMENT: dict[str, tuple[str, Any]] = {
    "separator": ("\n##\n", "\n##\n"),
    "split_at_separator": ("yes", True),
    "recompute_ratio": ("0.25", 0.25),
    "selection": ("none", "none"),
    "selection_options": ('{"check_layers": [1, 3]}', {"check_layers": (1, 3)}),
    "min_tokens": ("7", 7),
    "overflow": ("drop_chunks", "drop_chunks"),
    "condition": ("prefix", "prefix"),
    "write_back": ("off", "off"),
    "size_limit": ("2 GiB", 2 * 2**30),
    "memory_limit": ("1GB", 10**9),
    "prompt_cache": ("2GB", 2 * 10**9),
    "codec": ("raw", "raw"),
    "salt": ("tenant", "tenant"),
    "max_concurrent": ("4", 4),
    "verify": ("always", "always"),
    "verify_share": ("0.25", 0.25),
    "prepack_weights": ("off", False),
}


def test_every_option_has_a_case_here() -> None:
    assert set(FROM_ENVIRONMENT) == set(BlendConfig.names())


def test_environment_variable_is_read_and_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (text, value) in FROM_ENVIRONMENT.items():
        default = getattr(BlendConfig(), name)
        assert default != value, name
        monkeypatch.setenv(ENV_PREFIX + name.upper(), text)
        assert getattr(BlendConfig(), name) == value, name
        assert getattr(BlendConfig(**{name: default}), name) == default, name


@pytest.mark.parametrize(
    ("name", "text"),
    [("recompute_ratio", "much"), ("min_tokens", "2.5"), ("selection_options", "one"), ("size_limit", "huge")],
)
def test_unreadable_environment_names_variable_and_value(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_PREFIX + name.upper(), text)
    with pytest.raises(ConfigError) as caught:
        BlendConfig()
    message = str(caught.value)
    assert ENV_PREFIX + name.upper() in message
    assert repr(text) in message
    assert "use " in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("separator", ""),
        ("recompute_ratio", float("nan")),
        ("selection", None),
        ("selection_options", {1: 2}),
        ("min_tokens", True),
        ("condition", "question"),
        ("max_concurrent", 0),
        ("size_limit", "20 parsecs"),
        ("salt", None),
        ("memory_limit", False),
        ("prepack_weights", 1),
    ],
)
def test_bad_value_names_option_value_and_remedy(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        BlendConfig(**{name: value})
    error = caught.value
    assert isinstance(error, ValueError)
    assert isinstance(error, CacheBlendError)
    assert error.field == name
    assert f"{name}=" in str(error)
    assert repr(error.value) in str(error)
    assert error.remedy.startswith(("use ", "list "))


def test_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"recompute_share=0\.1 .*no such option; did you mean 'recompute_ratio'"):
        BlendConfig(recompute_share=0.1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("text", "size"), [(1, 1), ("1k", 1000), ("1KiB", 1024), ("1.5 MB", 1_500_000), ("2ti", 2**41)]
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size
    assert BlendConfig(size_limit=text).store_bytes == size


def test_size_limit_reaches_the_store_the_engine_opens(tmp_path: Path) -> None:
    from cacheblend_rag import BlendEngine
    from tests import tiny

    for store in (tmp_path, None):
        with BlendEngine(tiny.model(), tiny.tokenizer(), config=BlendConfig(size_limit="3MB"), store=store) as engine:
            assert engine.store.traits.size_limit == 3_000_000
