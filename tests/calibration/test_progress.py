"""What a long search says of itself, with and without a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest

from cacheblend_rag.calibration.progress import Progress


def said(times: list[float], **options: Any) -> list[str]:
    """Lines of a search whose passes end at these seconds after its beginning."""
    lines, clock = list[str](), iter([0.0, *times])
    with Progress("adapting", "9 prompts", 100, clock=lambda: next(clock), say=lines.append, **options) as progress:
        for _ in times:
            progress.update()
    return lines


def test_first_pass_tells_how_long_all_may_take_and_lines_follow() -> None:
    assert said([6.0, 20.0, 36.5, 60.0, 66.0, 200.0], exact=True) == [
        "adapting on 9 prompts",
        "adapting: the first pass took 6.0 s: roughly 10 min in all, for 100 passes",
        "adapting: 3 of 100 passes after 36 s",
        "adapting: 6 of 100 passes after 3 min",
    ]
    assert said([150.0, 200.0], exact=False) == [
        "adapting on 9 prompts",
        "adapting: the first pass took 2 min: roughly 4 h 10 min in all, for about 100 passes",
        "adapting: 2 of about 100 passes after 3 min",
    ]


def test_search_that_shall_be_silent_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert said([6.0, 60.0], exact=True, shown=False) == []
    assert capsys.readouterr().err == ""


def test_terminal_has_a_bar_in_place_of_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    lines = said([6.0, 60.0, 120.0], exact=True)
    assert [line.split(":")[0] for line in lines] == ["adapting on 9 prompts", "adapting"]
    assert "3/100" in terminal.getvalue()
