"""The long form of the fault tests of stores on other machines.

``python -m docs.benchmarks.scripts.remote_reliability``

Starts a Valkey server and an S3 server on loopback. Prints a table of counts; the last line is JSON. The status is 1 if
anything went wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from docs.benchmarks.scripts.faults import only_from
from docs.benchmarks.scripts.remote_faults import Place, RemoteTrials, clients_at_once, s3_place, valkey_place
from docs.benchmarks.scripts.servers import s3_server, valkey_server

__all__ = ["Line", "main"]

# Seconds that a call may take here, until a store that was away is tried again, and that a request may take.
_TIMEOUT, _PAUSE, _LONGEST = 1.0, 0.1, 6.0


@dataclass(frozen=True)
class Line:
    """One fault of one store.

    Parameters
    ----------
    store, fault : str
    tried, wrong : int
        How often, and how often the result was not that of a run without the records that were lost.
    late : int
        How often a request took longer than it may.
    hits : int
        Chunks that were read, of three a request.
    longest : float
        Seconds that the longest request took.
    """

    store: str
    fault: str
    tried: int
    wrong: int
    late: int
    hits: int
    longest: float


def requests(
    name: str, fault: str, place: Place, trials: RemoteTrials, times: int, begin: Callable[[], object]
) -> Line:
    """Ask again and again, each time with all records stored and a fault on its way."""
    answers = []
    with (
        closing(place.opened(60.0)) as patient,
        closing(place.opened(_TIMEOUT)) as store,
        trials.engine(patient) as warming,
        trials.engine(store) as engine,
    ):
        store.reads.pause = _PAUSE
        for _ in range(times):
            trials.warm(warming)
            begin()
            answers.append(trials.ask(engine))
            place.proxy.silent, place.proxy.delay = False, 0.0
            time.sleep(2 * _PAUSE)
    return Line(
        name,
        fault,
        times,
        sum(not one.right for one in answers),
        sum(one.seconds > _LONGEST for one in answers),
        sum(one.hits for one in answers),
        max((one.seconds for one in answers), default=0.0),
    )


def lines(name: str, place: Place, trials: RemoteTrials, times: int, seconds: float) -> Iterator[Line]:
    """Every fault of one store."""
    chooser = random.Random(0)

    def later(change: Callable[[], object]) -> Callable[[], object]:
        return lambda: threading.Timer(chooser.uniform(0.0, 0.05), change).start()

    def flip(data: bytes) -> bytes:
        at = chooser.randrange(len(data) or 1)
        return data[:at] + bytes([byte ^ 1 << chooser.randrange(8) for byte in data[at : at + 1]]) + data[at + 1 :]

    def be_silent() -> None:
        place.proxy.silent = True

    def be_slow() -> None:
        place.proxy.delay = 3.0

    def cut_short(data: bytes) -> bytes:
        return data[: chooser.randrange(len(data) or 1)]

    yield requests(name, "connections cut", place, trials, times, later(place.proxy.cut))
    yield requests(name, "silent", place, trials, times // 5, later(be_silent))
    yield requests(name, "3 s of latency", place, trials, times // 5, later(be_slow))
    yield requests(name, "a bit of each record flipped", place, trials, times, lambda: place.alter(flip))
    yield requests(name, "each record cut short", place, trials, times, lambda: place.alter(cut_short))

    def cut(left: float) -> None:
        time.sleep(min(0.5, left))
        place.proxy.cut()

    seen = clients_at_once(lambda: place.opened(5.0), 20, seconds, cut)
    calls = seen["reads"] + seen["writes"] + seen["deletions"] + seen["refused"]
    late = int(seen["longest"] > 15_000)
    yield Line(name, "20 clients, cut twice a second", calls, seen["wrong"], late, seen["hits"], seen["longest"] / 1000)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; 0 if nothing went wrong."""
    parser = argparse.ArgumentParser(
        description="Cut, silence and alter stores on other machines; count what goes wrong."
    )
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=30.0)
    parsed = parser.parse_args(arguments)
    trials, found = RemoteTrials(), list[Line]()
    with only_from(logging.CRITICAL), only_from(logging.ERROR, "werkzeug"):
        with valkey_server() as server, valkey_place(server.port) as place:
            found += lines("valkey", place, trials, parsed.times, parsed.seconds)
        with s3_server() as port, s3_place(port, "reliability") as place:
            found += lines("s3", place, trials, parsed.times, parsed.seconds)
    for one in found:
        print(
            f"{one.store:<8}{one.fault:<32}{one.tried:>7} tried{one.wrong:>4} wrong{one.late:>4} late"
            f"{one.hits:>7} hits  longest {one.longest:.2f} s"
        )
    print(json.dumps([dataclasses.asdict(one) for one in found]))
    return int(any(one.wrong or one.late for one in found))


if __name__ == "__main__":
    sys.exit(main())
