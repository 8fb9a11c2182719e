"""Replicas that differ are told apart before they answer anything."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from cacheblend_rag.app.fleet.agreement import Terms, check_agreed
from cacheblend_rag.errors import ConfigError

TERMS = Terms(
    dtype="float32",
    separator="\n\n",
    condition="context",
    contexts=2,
    learned="",
    selection="boundary",
    check_layers=(1,),
    codec="raw",
    compress=False,
    salt="5f",
    encryption="e3",
    tokenizer="a1",
    embedder=((0.25, 0.5), (1.0, 0.0)),
    model="0c4d",
)


def test_equal_replicas_agree() -> None:
    check_agreed(TERMS, TERMS)
    check_agreed(TERMS, replace(TERMS, embedder=((0.250001, 0.5), (1.0, 0.000001))))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "bfloat16"),
        ("separator", "\n---\n"),
        ("condition", "sink"),
        ("contexts", 1),
        ("learned", "77"),
        ("selection", "hkvd"),
        ("check_layers", (3,)),
        ("codec", "int8"),
        ("compress", True),
        ("salt", "60"),
        ("encryption", "e4"),
        ("tokenizer", "a2"),
        ("embedder", ((0.5, 0.25), (1.0, 0.0))),
        ("model", "ffff"),
    ],
)
def test_one_that_differs_is_refused_with_both_values(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        check_agreed(TERMS, replace(TERMS, **{field: value}))  # type: ignore[arg-type]
    message = str(caught.value)
    assert field in message
    assert repr(str(value)) in message or repr(value) in message
    assert repr(getattr(TERMS, field)) in message


def test_every_field_is_tried() -> None:
    (mark,) = test_one_that_differs_is_refused_with_both_values.pytestmark  # type: ignore[attr-defined]
    assert [name for name, _ in mark.args[1]] == [one.name for one in fields(Terms)]
