"""The table of codecs over the bundled model."""

from __future__ import annotations

import json

import pytest

from docs.benchmarks.scripts.codec_table import main


def test_every_codec_answers_the_same_questions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--per-kind", "1", "--selection", "none", "--dtype", "float32"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert len(table) == 4
    raw, fp8, int8, int4 = json.loads(last)
    assert raw["codec"] == "raw"
    assert raw["same"] == 1.0
    assert raw["divergence"] == pytest.approx(0.0, abs=1e-9)
    assert all(0 <= row["divergence"] < 0.5 for row in (fp8, int8, int4))
    # Neither fp8 (3 bits of mantissa) nor int4 (4 bits a group) is ahead of the other on every machine.
    assert int8["divergence"] < min(fp8["divergence"], int4["divergence"])
    assert raw["token_bytes"] > fp8["token_bytes"] == int8["token_bytes"] > int4["token_bytes"]
    assert all(set(row["value"]) == set(raw["value"]) for row in (fp8, int8, int4))
