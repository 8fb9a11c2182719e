"""The stored KV of chunks: compute it ahead of time, estimate its size, fetch it, erase it."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tqdm import tqdm

from cacheblend_rag.engine.pipeline import Pipeline
from cacheblend_rag.engine.segments import Kind, Segment, Segments, texts_keys
from cacheblend_rag.engine.turns import Turns
from cacheblend_rag.engine.verification import Verifications
from cacheblend_rag.errors import ContextLengthError, PromptError, StoreError
from cacheblend_rag.llama_cpp.runtime import is_in_llama_cpp
from cacheblend_rag.loading import Prefetcher
from cacheblend_rag.prompt.contexts import finder, ids_digest, sharer
from cacheblend_rag.prompt.forms import form_sharer, squeeze
from cacheblend_rag.report import WarmReport
from cacheblend_rag.store.base import UNLIMITED, RecordInfo, Warnings

_warnings = Warnings()
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


@dataclass(frozen=True)
class Chunks:
    """The stored KV of chunks under the options of an engine: ``engine.chunks``.

    Parameters
    ----------
    pipeline : Pipeline
    turns : Turns
        Lets requests have the model in turn.
    prefetcher : Prefetcher
        Brings records closer on a thread of its own.
    verifications : Verifications
        Checks of earlier answers, which may store their prompts.
    """

    pipeline: Pipeline
    turns: Turns
    prefetcher: Prefetcher
    verifications: Verifications

    def warm(
        self,
        chunks: Iterable[str],
        *,
        prefix: str = "",
        progress: bool | None = None,
        only: Collection[str] | None = None,
    ) -> WarmReport:
        """Compute and store the KV of chunks ahead of time, several in one pass.

        Requests that come meanwhile go before the next pass; while there are always some, warming gets a fifth of
        the model's time. It stops before the store would pass its size limit, so that it never evicts its own work.

        Chunks are checked before the first pass: if a chunk is too long, no chunk is computed. A chunk that the
        tokenizer refuses is left out with a warning. For a model that is not blended, nothing is stored; a warning and
        the report say why.

        Parameters
        ----------
        chunks : iterable of str
            Chunk texts in the order of their documents: chunks are computed after stretches of their neighbours
            (``condition="context"``).
        prefix : str
            The prefix that will precede the chunks; needed only with ``condition="prefix"``.
        progress : bool, optional
            Show a progress bar; by default if standard error is a terminal.
        only : collection of str, optional
            The chunks to compute, each with the contexts that it has among all; by default all chunks.

        Raises
        ------
        ContextLengthError
            If a chunk alone is longer than the model's context window; the message gives its first words.
        """
        self.turns.check_open()
        texts = list_of_texts(chunks)
        self.pipeline.segments.model.look()
        if reason := self.pipeline.segments.model.adapter.plain_reason:
            _warnings.warn("no KV of %d chunks is stored: the model is answered plainly, as %s", len(texts), reason)
            return WarmReport(0, 0, 0, 0, 0, 0.0, reason)
        pairs = [(text, found) for text in texts if (found := self._fitting(text, prefix)) is not None]
        texts, fitting = [text for text, _ in pairs], [segment for _, segment in pairs]
        segments = self.pipeline.segments.behind_each_other(texts, fitting)
        if only is not None:
            segments = [segment for text, segment in zip(texts, segments, strict=True) if text in only]
        return WarmUp(self.pipeline, self.turns.in_background).run(segments, progress)

    def estimate_bytes(self, chunks: Iterable[str]) -> int:
        """Bytes the KV of chunks will take in the store; nothing is computed."""
        own, store = self.pipeline.segments, self.pipeline.store
        own.model.look()
        pairs = [(text, found) for text in list_of_texts(chunks) if (found := own.chunk(text)) is not None]
        segments = own.behind_each_other([text for text, _ in pairs], [segment for _, segment in pairs])
        return sum(store.record_bytes(own.info(one)) for one in {one.key: one for one in segments}.values())

    def prefetch(self, chunks: Iterable[str], *, prefix: str = "") -> None:
        """Bring stored KV of chunks closer on a thread of its own, as soon as they are retrieved.

        With tiers, records rise to the nearest; of a single folder, the system is asked to read
        their files. Chunks that are not stored are left alone. Never waits and never fails.

        Parameters
        ----------
        chunks, prefix
            As for `warm`.
        """
        segments = self.pipeline.segments
        segments.model.look()
        found = (segments.chunk(text, prefix) for text in list_of_texts(chunks))
        self.prefetcher.submit(segment.key for segment in found if segment is not None)

    def forget(self, chunks: Iterable[str]) -> int:
        """Erase the stored KV of chunks in every form, and the KV of chunks that were computed after them.

        Text that was found by repetition is erased, too, if it contains a chunk or part of a chunk.

        Returns
        -------
        int
            Records that were erased. Records that waited to be stored never were, and are not counted.

        Raises
        ------
        StoreError
            If some could not be erased, or not be looked for; all that could be erased are.
        """
        return self._erase(Erasing(self.pipeline.segments, list_of_texts(chunks)))

    def forget_for_all(self, chunks: Iterable[str]) -> int:
        """Erase every tenant's records that hold KV of these chunks or were computed after them.

        This is for texts that all tenants could read and that are gone now. If a tenant has the same text in its own
        document, the KV is computed again at the next use. Otherwise see `forget`.
        """
        return self._erase(Erasing(self.pipeline.segments, list_of_texts(chunks), of_all=True))

    def _erase(self, erasing: Erasing) -> int:
        self._drop(erasing)
        store, keys, failed, erased = self.pipeline.store, set(erasing.keys), list[StoreError](), 0
        with _note_errors(failed):
            keys.update(key for key, info in store.infos("") if erasing.takes(key, info))
        self.pipeline.variants.drop(keys)
        for key in keys:
            with _note_errors(failed):
                erased += store.delete(key)
        self.pipeline.segments.tokenizer.forget()  # no text of theirs stays in memory either
        if failed:
            raise StoreError(f"not all could be forgotten, {erased} records were: {failed[0]}") from failed[0]
        return erased

    def drop_waiting(self, chunks: Iterable[str]) -> None:
        """Let no record be stored that waits to be and that `forget` would erase, and no answer over them be checked.

        A record of them that is being stored at this moment is waited for. Other records are stored as they
        would have been.
        """
        self._drop(Erasing(self.pipeline.segments, list_of_texts(chunks)))

    def _drop(self, erasing: Erasing) -> None:
        """Drop what memory holds of texts: what was seen of them, prompts, waiting records and checks of answers."""
        self.turns.check_open()
        if (found := self.pipeline.segments.finder) is not None:
            found.forget(erasing.salt)
        self.pipeline.prompts.drop(erasing.salt, erasing.takes_prompt)
        self.turns.write_back.drop(lambda key, job: job.info is not None and erasing.takes(key, job.info()))
        # Behind the jobs: a check that has begun to store something then is waited for, and a later one leaves it out.
        self.verifications.give_up("a chunk of its prompt was forgotten", erasing.salt, erasing.texts)

    def _fitting(self, text: str, prefix: str) -> Segment | None:
        """The stored segment of a chunk, if it is not too long for the model."""
        segments = self.pipeline.segments
        segment, window = segments.chunk(text, prefix), segments.model.adapter.context_window
        tokens = segment.tokens if segment else 0
        if window is not None and tokens > window:
            first = " ".join(text.split()[:8])
            remedy = "split its document into smaller chunks, or take a model with a longer window"
            raise ContextLengthError(tokens, 0, window, remedy, f"the chunk that begins {first[:60]!r}")
        return segment


class Erasing:
    """Texts that are erased, and all KV that goes with them.

    Parameters
    ----------
    segments : Segments
    texts : sequence of str
    of_all : bool
        Whether the texts are erased for every tenant, with every record that contains part of one; else only for the
        tenant of the segments' options.
    """

    def __init__(self, segments: Segments, texts: Sequence[str], *, of_all: bool = False) -> None:
        segments.model.look()
        self.texts = frozenset(texts)
        self.salt = None if of_all else segments.config.salt
        """Of the tenant; None for all."""
        self.keys = {form.key for text in texts for form in segments.forms(text)}
        """Keys under which the texts are stored by themselves, which hold even if records cannot be listed."""
        self._segments, self._squeezed = segments, [squeeze(text) for text in texts]
        self._ids = list[tuple[int, ...]]()
        for text in texts:
            with contextlib.suppress(PromptError):  # what no tokenizer takes can be in no prompt
                if ids := segments.tokenizer.chunk(text).ids:
                    self._ids.append(ids)
        own = segments.config.salt
        self._theirs = tuple(texts_keys(kind, own, ids) for kind in Kind for ids in self._ids)
        self._whole, self._digests = {*self._ids}, {*map(ids_digest, self._ids)}
        self._begins, self._shares, self._writes = finder(self._ids), sharer(self._ids), form_sharer(texts)

    def takes(self, key: str, info: RecordInfo) -> bool:
        """Whether a record holds KV of one of the texts, or was computed after one."""
        if info.before:
            goes = not self._digests.isdisjoint(info.before[1:])
        else:  # a record of an earlier version does not say which chunks it stood behind
            goes = self._begins(info.behind)
        if info.kind == Kind.FOUND:
            # Nobody named what was found, so a part of a text is enough: a client may have written it.
            held = info.token_ids + info.behind
            goes = goes or self._shares(held) or self._is_written(held)
        elif info.kind == Kind.PREFIX and self.salt is not None:
            # A text's ids stand side by side there.
            ids = info.token_ids
            goes = any(ids[at : at + len(one)] == one for one in self._ids for at in range(len(ids)))
        elif self.salt is None and not goes and self._shares(info.token_ids):
            # Its text is one of the texts, and not another that begins alike; its edges may be cut.
            text = squeeze(self._segments.tokenizer.text_of(info.token_ids).strip("\ufffd"))
            among = info.token_ids in self._whole or any(text in one for one in self._squeezed)
            goes = info.kind == Kind.PREFIX or among
        return (goes or key.startswith(self._theirs)) and (self.salt is None or self._segments.owns(key, info))

    def takes_prompt(self, texts: Collection[str], ids: Sequence[int]) -> bool:
        """Whether a prompt with these chunks and ids goes: it holds one of the texts or a part of one."""
        return not self.texts.isdisjoint(texts) or self._shares(ids) or self._is_written(ids)

    def _is_written(self, ids: Sequence[int]) -> bool:
        """Whether one of the texts, or a long part of one, stands in the text of some ids, in whatever form."""
        return self._writes(self._segments.tokenizer.text_of(ids))


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
        adapter = pipeline.segments.model.adapter
        self._batch_tokens = _TOKENS_ON_CPU if adapter.device.type == "cpu" else _TOKENS
        if is_in_llama_cpp(adapter.model):  # it computes chunks one by one, and requests get through between them
            self._batch_tokens = 1
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
            tokens -= segment.tokens
            fitting.append(segment)
        return fitting

    def _store_batch(self, batch: Sequence[Segment]) -> list[Segment]:
        """Those of a batch that another is just computing."""
        with self._held():
            made = self._pipeline.compute_and_store(batch)
        self._store.flush()  # requests get through while other machines are sent what was made
        self._computed += [segment for segment in batch if made[segment.key]]
        return [segment for segment in batch if made[segment.key] is None]


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
        for segment in sorted(group, key=lambda one: one.tokens, reverse=True):
            padded, full = (len(batch) + 1) * longest, len(batch) == _MOST
            if batch and (full or padded > tokens or padded > (1 + _PADDING) * (wanted + segment.tokens)):
                yield batch
                batch, wanted = [], 0
            if not batch:
                longest = segment.tokens
            batch.append(segment)
            wanted += segment.tokens
        yield batch


@contextlib.contextmanager
def _note_errors(failed: list[StoreError]) -> Iterator[None]:
    """Go on after an error of the store, and remember it."""
    try:
        yield
    except StoreError as error:
        failed.append(error)


def list_of_texts(chunks: Iterable[str]) -> list[str]:
    """The texts of chunks.

    Raises
    ------
    PromptError
        If they are one text.
    """
    if isinstance(chunks, str):
        raise PromptError(f"chunks={chunks[:40]!r} is one text: give a list of texts, even for a single chunk")
    return list(chunks)
