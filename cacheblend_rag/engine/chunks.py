"""The stored KV of chunks: compute it ahead of time, estimate its size, fetch it, erase it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from cacheblend_rag.engine.pipeline import Pipeline
from cacheblend_rag.engine.segments import FOUND, OTHER_FORM, Segment, Segments
from cacheblend_rag.engine.turns import Turns
from cacheblend_rag.engine.variants import chunks_keys
from cacheblend_rag.engine.verifications import Verifications
from cacheblend_rag.engine.warm_up import WarmUp
from cacheblend_rag.errors import ContextLengthError, PromptError, StoreError
from cacheblend_rag.loading import Prefetcher
from cacheblend_rag.prompt.contexts import finder, sharer
from cacheblend_rag.prompt.forms import form_sharer
from cacheblend_rag.report import WarmReport
from cacheblend_rag.store.base import RecordInfo, Warnings

_warnings = Warnings()


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

        Chunks are looked at before the first pass: with one that is too long, none is computed. One that no tokenizer
        takes is left out, and a warning names it. Of a model that is answered plainly nothing is stored; a warning and
        the report say why.

        Parameters
        ----------
        chunks : iterable of str
            Chunk texts, those of a document one after another: chunks are computed behind stretches of those next
            to them (``condition="context"``).
        prefix : str
            The prefix they will stand behind; needed with ``condition="prefix"`` only.
        progress : bool, optional
            Show a progress bar; by default if standard error is a terminal.
        only : collection of str, optional
            Those of the chunks that are computed, each as it would be among all; by default all.

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

    def forget(self, chunks: Iterable[str], *, prefix: str = "") -> int:
        """Erase the stored KV of chunks with its variants, and that of other chunks that was computed behind them.

        Text that was found by its repetition is erased, too, where it holds one of them or a part of one.

        Returns
        -------
        int
            Records that were erased. Records that waited to be stored never were, and are not counted.

        Raises
        ------
        StoreError
            If some could not be erased, or not be looked for; all that could be erased are.
        """
        texts = list_of_texts(chunks)
        self.drop_waiting(texts, prefix=prefix)
        failed: list[StoreError] = []
        keys = self._records_of(texts, prefix, failed, dependent=True)
        self.pipeline.variants.drop(keys)
        erased = 0
        for key in keys:
            with _note_errors(failed):
                erased += self.pipeline.store.delete(key)
        if failed:
            raise StoreError(f"not all could be forgotten, {erased} records were: {failed[0]}") from failed[0]
        return erased

    def forget_for_all(self, chunks: Iterable[str]) -> None:
        """Erase every record that holds KV of these chunks or of a part of one, or that stood behind one.

        That is for texts that all tenants could read, and none can any more. A tenant may have the same text in a
        document of its own. Its KV is computed again.

        Raises
        ------
        StoreError
            If some could not be erased, or not be looked for.
        """
        segments, store = self.pipeline.segments, self.pipeline.store
        segments.model.look()
        texts = list_of_texts(chunks)
        ids = self._ids(texts, self._forms(texts, ""))
        if ids:
            shares, written = sharer(ids), _written_in(segments, texts)

            def goes(key: str, info: RecordInfo) -> bool:
                held = info.token_ids + info.behind
                return shares(held) or (key.startswith(FOUND) and written(held))

            self._drop_from_memory(None, texts, ids, written, goes)
            for key in [key for key, info in store.infos("") if goes(key, info)]:
                store.delete(key)
        segments.tokenizer.forget()

    def drop_waiting(self, chunks: Iterable[str], *, prefix: str = "") -> None:
        """Let no record be stored that waits to be and that `forget` would erase, and no answer over them be checked.

        A record of them that is being stored at this moment is waited for. Other records are stored as they
        would have been.

        Parameters
        ----------
        chunks, prefix
            As for `warm`.
        """
        self.turns.check_open()
        segments = self.pipeline.segments
        segments.model.look()
        texts = list_of_texts(chunks)
        forms = self._forms(texts, prefix)
        keys = {form.key for forms_of_one in forms for form in forms_of_one}
        ids, written = self._ids(texts, forms), _written_in(segments, texts)
        goes = _goes_with(segments, ids, written)

        def goes_too(key: str, info: RecordInfo) -> bool:
            return key.split(OTHER_FORM)[0] in keys or goes(key, info)

        self._drop_from_memory(segments.config.salt, texts, ids, written, goes_too)

    def _drop_from_memory(
        self,
        salt: str | None,
        texts: Sequence[str],
        ids: Sequence[tuple[int, ...]],
        written: Callable[[Sequence[int]], bool],
        goes: Callable[[str, RecordInfo], bool],
    ) -> None:
        """Drop what memory holds of chunks: what was seen of them, prompts, waiting records and checks of answers.

        Parameters
        ----------
        salt : str or None
            Tenant; None for all.
        texts : sequence of str
        ids : sequence of tuple of int
            Theirs, as they stand in prompts.
        written : callable
            See `_written_in`.
        goes : callable
            Whether a record with this key and info is not to be stored.
        """
        pipeline, shares, known = self.pipeline, sharer(ids), frozenset(texts)

        def holds(held: Collection[str], prompt: Sequence[int]) -> bool:
            return not known.isdisjoint(held) or shares(prompt) or written(prompt)

        if (finder := pipeline.segments.finder) is not None:
            finder.forget(salt)
        pipeline.prompts.drop(salt, holds)
        self.turns.write_back.drop(lambda key, job: job.info is not None and goes(key, job.info()))
        # Behind the jobs: a check that has begun to store something then is waited for, and a later one leaves it out.
        self.verifications.give_up("a chunk of its prompt was forgotten", salt, texts)

    def records_of(self, chunks: Iterable[str], *, prefix: str = "", dependent: bool = True) -> set[str]:
        """Keys of all records that hold KV of chunks, and of those that would: what `forget` erases.

        Parameters
        ----------
        chunks, prefix
            As for `warm`.
        dependent : bool
            Those of other chunks that were computed behind them, too, and all variants of theirs. All records of the
            store are looked at for it.

        Raises
        ------
        StoreError
            If some could not be looked for.
        """
        self.turns.check_open()
        failed: list[StoreError] = []
        keys = self._records_of(list_of_texts(chunks), prefix, failed, dependent)
        if failed:
            raise StoreError(f"not all records could be looked for: {failed[0]}") from failed[0]
        return keys

    def _records_of(self, texts: list[str], prefix: str, failed: list[StoreError], dependent: bool) -> set[str]:
        """See `records_of`; what went wrong on the way is added to ``failed``."""
        segments, store = self.pipeline.segments, self.pipeline.store
        segments.model.look()
        forms = self._forms(texts, prefix)
        keys = {form.key for forms_of_one in forms for form in forms_of_one}
        for key in [*keys]:
            with _note_errors(failed):
                keys.update(other for other, _ in store.infos(key + OTHER_FORM))
        ids = self._ids(texts, forms)
        goes = _goes_with(segments, ids, _written_in(segments, texts))
        # Text that was found holds them itself.
        if ids:
            with _note_errors(failed):
                keys.update(key for key, info in store.infos("" if dependent else FOUND) if goes(key, info))
        # No text of theirs stays in memory either.
        segments.tokenizer.forget()
        return keys

    def _ids(self, texts: list[str], forms: list[list[Segment]]) -> list[tuple[int, ...]]:
        """Ids of chunks that may be in records: those of their own, or of prompts in memory that hold them."""
        if self.pipeline.segments.model.adapter.regimes:
            return [forms_of_one[0].token_ids for forms_of_one in forms]
        ids = []
        for text in texts:
            with contextlib.suppress(PromptError):  # what no tokenizer takes can be in no prompt
                ids.append(self.pipeline.segments.tokenizer.chunk(text).ids)
        return [one for one in ids if one]

    def _forms(self, texts: Iterable[str], prefix: str) -> list[list[Segment]]:
        """Of each chunk all segments under which it may be stored; of one that is too short none."""
        return [forms for text in texts if (forms := self.pipeline.segments.forms(text, prefix))]

    def _fitting(self, text: str, prefix: str) -> Segment | None:
        """The stored segment of a chunk, if it is not too long for the model."""
        segments = self.pipeline.segments
        segment, window = segments.chunk(text, prefix), segments.model.adapter.context_window
        tokens = len(segment.context_ids) + len(segment.token_ids) if segment else 0
        if window is not None and tokens > window:
            first = " ".join(text.split()[:8])
            remedy = "split its document into smaller chunks, or take a model with a longer window"
            raise ContextLengthError(tokens, 0, window, remedy, f"the chunk that begins {first[:60]!r}")
        return segment


def _written_in(segments: Segments, texts: Sequence[str]) -> Callable[[Sequence[int]], bool]:
    """Says of ids whether one of some texts, or a long part of one, stands in their text, in whatever form."""
    shares = form_sharer(texts)
    return lambda ids: shares(segments.tokenizer.text_of(ids))


def _goes_with(
    segments: Segments, ids: Sequence[tuple[int, ...]], written: Callable[[Sequence[int]], bool]
) -> Callable[[str, RecordInfo], bool]:
    """Says of a record, apart from those of the chunks with these ids, whether it holds one or stood behind one."""
    salt, begins, shares = segments.config.salt, finder(ids), sharer(ids)
    variants = tuple(chunks_keys(salt, chunk) for chunk in ids)

    def goes(key: str, info: RecordInfo) -> bool:
        if key.startswith(FOUND):  # text of which it holds a part is enough, as a client may have written it
            held = info.token_ids + info.behind
            if shares(held) or written(held):
                return segments.owns(key, info)
        inside = info.kind == "prefix" and any(_holds(info.token_ids, chunk) for chunk in ids)
        return (inside or key.startswith(variants) or begins(info.behind)) and segments.owns(key, info)

    return goes


def _holds(ids: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether ids stand among others, side by side."""
    return any(ids[at : at + len(wanted)] == wanted for at in range(len(ids) - len(wanted) + 1))


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
