"""Computing and storing the KV of chunks ahead of time, with several chunks of similar length in one pass."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

from tqdm import tqdm

from cacheblend_rag.engine.pipeline import Pipeline
from cacheblend_rag.engine.segments import Segment
from cacheblend_rag.report import WarmReport
from cacheblend_rag.store.base import UNLIMITED

# Tokens of one pass, which a request may have to wait for. A CPU is fastest with about a thousand: with fewer the
# cost of every single operation shows, with more what passes between them no longer stays in its cache. The rest
# is room for what stands before each chunk, so that two of 512 tokens go together.
_TOKENS_ON_CPU = 1024 + 128
_TOKENS = 4096 + 512
# Segments of one pass; each is claimed, which may hold a file open.
_MOST = 64
# Padding, as a share of the tokens that are wanted.
_PADDING = 0.1
# Passes' worth of chunks among which those of like length are looked for.
_AHEAD = 16
# A store's own index grows with every record.
_INDEX_ROOM = 2**16
# Seconds to wait for another process that computes the same chunk.
_PATIENCE = 300.0


def in_batches(segments: Iterable[Segment], tokens: int) -> Iterator[list[Segment]]:
    """Segments that may be computed in one pass, with little padding between them.

    Parameters
    ----------
    segments : iterable of Segment
    tokens : int
        Most tokens of a pass, contexts and padding included; a segment that is longer is alone.

    Yields
    ------
    list of Segment
        The longest first; all behind the same shared context, or the same contexts, and of the same regime.
    """
    groups: dict[tuple[object, ...], list[Segment]] = {}
    for segment in segments:
        groups.setdefault(segment.passes, []).append(segment)
    for group in groups.values():
        batch: list[Segment] = []
        wanted = longest = 0
        for segment in sorted(group, key=_length, reverse=True):
            padded, full = (len(batch) + 1) * longest, len(batch) == _MOST
            if batch and (full or padded > tokens or padded > (1 + _PADDING) * (wanted + _length(segment))):
                yield batch
                batch, wanted = [], 0
            if not batch:
                longest = _length(segment)
            batch.append(segment)
            wanted += _length(segment)
        yield batch


def _length(segment: Segment) -> int:
    return len(segment.context_ids) + len(segment.token_ids)


class WarmUp:
    """Computes and stores what is not stored of some segments.

    Parameters
    ----------
    pipeline : Pipeline
    held : callable
        Gives the context in which model and store may be used. It is left after every batch, so that
        requests get through.
    """

    def __init__(self, pipeline: Pipeline, held: Callable[[], AbstractContextManager[None]]) -> None:
        self._pipeline, self._store, self._held = pipeline, pipeline.store, held
        self._batch_tokens = _TOKENS_ON_CPU if pipeline.segments.model.adapter.device.type == "cpu" else _TOKENS
        self._sizes: dict[str, int] = {}
        self._computed: list[Segment] = []

    def run(self, segments: Iterable[Segment], progress: bool | None) -> WarmReport:
        """Do it; stops before the store would pass its size limit.

        Parameters
        ----------
        segments : iterable of Segment
            In the order in which they are stored as far as there is room.
        progress : bool or None
            Show a progress bar; None if standard error is a terminal.
        """
        started = time.perf_counter()
        given = list(segments)
        writable = not self._store.traits.read_only
        new = {segment.key: segment for segment in given if not self._store.contains(segment.key)}
        self._sizes = {key: self._store.record_bytes(self._pipeline.segments.info(new[key])) for key in new}
        hidden = None if progress is None else not progress
        with tqdm(total=len(new), desc="warming", unit="chunk", disable=hidden) as bar:
            done, elsewhere = self._store_what_fits(deque(new.values() if writable else ()), bar.update)
        for segment in elsewhere:  # another computes these; if it gives up, they are ours after all
            with self._store.claim(segment.key, wait=_PATIENCE):
                pass
            self._store_batch([segment])
        return WarmReport(
            computed=len(self._computed),
            present=len(given) - len(new) + done - len(self._computed),
            skipped=len(new) - done,
            tokens=sum(len(segment.token_ids) for segment in self._computed),
            bytes=sum(self._sizes[segment.key] for segment in self._computed),
            seconds=time.perf_counter() - started,
        )

    def _store_what_fits(self, waiting: deque[Segment], tell: Callable[[int], object]) -> tuple[int, list[Segment]]:
        """Batch after batch until there is no more room: how many were seen to, and which another computes."""
        done, elsewhere = 0, list[Segment]()
        while ahead := self._fitting(waiting):
            for _ in ahead:
                waiting.popleft()
            for batch in in_batches(ahead, self._batch_tokens):
                if len(self._fitting(batch)) < len(batch):  # another has filled the store meanwhile
                    return done, elsewhere
                elsewhere += self._store_batch(batch)
                done += len(batch)
                tell(len(batch))
        return done, elsewhere

    def _fitting(self, segments: Iterable[Segment]) -> list[Segment]:
        """The first of some segments, as far as the store has room and batches can be chosen among them."""
        room = self._store.traits.size_limit
        if room < UNLIMITED:
            room -= self._store.volume()
        tokens = _AHEAD * self._batch_tokens
        fitting: list[Segment] = []
        for segment in segments:
            room -= self._sizes[segment.key] + _INDEX_ROOM
            if room < 0 or tokens <= 0:
                break
            tokens -= _length(segment)
            fitting.append(segment)
        return fitting

    def _store_batch(self, batch: Sequence[Segment]) -> list[Segment]:
        """Those of a batch that another is just computing."""
        with self._held():
            made = self._pipeline.keeping.compute_and_store(batch)
        self._store.flush()  # requests get through while other machines are sent what was made
        self._computed += [segment for segment in batch if made[segment.key]]
        return [segment for segment in batch if made[segment.key] is None]
