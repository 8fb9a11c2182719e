"""Progress of a search that takes minutes or hours: how much there is, how long it may take, and how far it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

from tqdm import tqdm

# Seconds between two lines where no bar can be drawn.
_BETWEEN = 30.0


class Progress:
    """Says at the start what will be done, after the first pass how long that may take, and then how far it is.

    On a terminal a bar shows the last of these. Elsewhere a line does, about every half a minute.

    Parameters
    ----------
    name : str
        The work, such as ``"adapting"``.
    prompts : str
        The prompts that it is done on.
    passes : int
        Passes over a prompt, or about how many.
    exact : bool
        Whether their number is known.
    shown : bool, optional
        False says nothing. True draws a bar, wherever standard error goes.
    clock, say : callable
        They give seconds, and take a line.
    """

    def __init__(
        self,
        name: str,
        prompts: str,
        passes: int,
        *,
        exact: bool,
        shown: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], object] | None = None,
    ) -> None:
        self._name, self._prompts, self._passes, self._exact = name, prompts, passes, exact
        self._clock, self._silent = clock, shown is False
        self._say = say or (lambda line: tqdm.write(line, file=sys.stderr))
        self._bar = tqdm(
            desc=name, total=passes if exact else None, unit=" passes", disable=None if shown is None else not shown
        )
        self._done, self._began = 0, clock()
        self._said = self._began

    def __enter__(self) -> Progress:
        if not self._silent:
            self._say(f"{self._name} on {self._prompts}")
        return self

    def update(self) -> None:
        """Take note of a pass that is done."""
        self._done += 1
        self._bar.update()
        now = self._clock()
        took = now - self._began
        if self._silent:
            return
        if self._done == 1:
            whole = _duration(took * self._passes)
            self._line(f"the first pass took {_duration(took)}: roughly {whole} in all, for {self._whole}", now)
        elif self._bar.disable and now - self._said >= _BETWEEN:
            self._line(f"{self._done:,} of {self._whole} after {_duration(took)}", now)

    @property
    def _whole(self) -> str:
        return f"{'' if self._exact else 'about '}{self._passes:,} passes"

    def _line(self, text: str, now: float) -> None:
        self._said = now
        self._say(f"{self._name}: {text}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


def _duration(seconds: float) -> str:
    """Seconds in words, as exact as an estimate can be."""
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
