"""Replicas that differ are told apart before they answer anything."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from dataclasses import fields, replace
from pathlib import Path

import pytest

from cacheblend_rag.app.fleet.agreement import Terms, check_agreed
from cacheblend_rag.errors import ConfigError

TERMS = Terms(
    dtype="float32",
    separator="\n\n",
    split_at_separator=False,
    condition="context",
    contexts=2,
    learned="",
    selection="query",
    check_layers=(1,),
    metric="v",
    recompute_ratio="auto",
    recompute_ratios=(),
    selection_options="{}",
    min_tokens=256,
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
        ("split_at_separator", True),
        ("condition", "sink"),
        ("contexts", 1),
        ("learned", "77"),
        ("selection", "hkvd"),
        ("check_layers", (3,)),
        ("metric", "k"),
        ("recompute_ratio", 0.3),
        ("recompute_ratios", (0.2, 0.1)),
        ("selection_options", '{"seed": 1}'),
        ("min_tokens", 0),
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


SCRIPT = """
import sys
import tempfile
from dataclasses import replace
import ray
from cacheblend_rag.app.fleet.agreement import agree
from cacheblend_rag.errors import ConfigError
from tests.app.fleet.test_agreement import TERMS
ray.init(address="local", include_dashboard=False, object_store_memory=100_000_000, _temp_dir=sys.argv[1])
agree("first", TERMS)
agree("first", TERMS)
agree("second", replace(TERMS, dtype="bfloat16"))
try:
    agree("first", replace(TERMS, dtype="bfloat16"))
except ConfigError as error:
    print(error)
"""


@pytest.mark.slow
def test_replicas_of_a_configuration_agree_through_ray() -> None:
    secret = {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    root = Path(__file__).parents[3]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # its sockets need a short path
        command = [sys.executable, "-c", SCRIPT, folder]
        environment = {**os.environ, **secret, "PYTHONPATH": str(root)}
        done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "dtype of this replica='bfloat16'" in done.stdout
    assert "the other replicas have 'float32'" in done.stdout
