"""Erasing: what goes with a text. The store, waiting records, kept prompts and checks of answers ask one object."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

from cacheblend_rag.engine.segments import Kind, Segments, texts_keys
from cacheblend_rag.errors import PromptError
from cacheblend_rag.prompt.contexts import finder, sharer
from cacheblend_rag.prompt.forms import form_sharer
from cacheblend_rag.store.base import RecordInfo


class Erasing:
    """Texts that are erased, and all KV that goes with them.

    Parameters
    ----------
    segments : Segments
    texts : sequence of str
    of_all : bool
        Whether they are erased for every tenant, and with them whatever has a part of one; else for the tenant of the
        segments' options.
    """

    def __init__(self, segments: Segments, texts: Sequence[str], *, of_all: bool = False) -> None:
        segments.model.look()
        self.texts = frozenset(texts)
        self.salt = None if of_all else segments.config.salt
        """Of the tenant; None for all."""
        self.keys = {form.key for text in texts for form in segments.forms(text)}
        """Keys under which the texts are stored by themselves, which hold even if records cannot be listed."""
        self._segments = segments
        self._ids = list[tuple[int, ...]]()
        for text in texts:
            with contextlib.suppress(PromptError):  # what no tokenizer takes can be in no prompt
                if ids := segments.tokenizer.chunk(text).ids:
                    self._ids.append(ids)
        own = segments.config.salt
        self._theirs = tuple(texts_keys(kind, own, ids) for kind in Kind for ids in self._ids)
        self._begins, self._shares, self._writes = finder(self._ids), sharer(self._ids), form_sharer(texts)

    def takes(self, key: str, info: RecordInfo) -> bool:
        """Whether a record goes: KV of one of the texts, or computed behind one."""
        held, found = info.token_ids + info.behind, info.kind == Kind.FOUND
        if self.salt is None:
            return self._shares(held) or (found and self._is_written(held))
        # Nobody named what was found, so a part of a text is enough: a client may have written it.
        goes = found and (self._shares(held) or self._is_written(held))
        inside = info.kind == Kind.PREFIX and any(_holds(info.token_ids, ids) for ids in self._ids)
        goes = goes or inside or key.startswith(self._theirs) or self._begins(info.behind)
        return goes and self._segments.owns(key, info)

    def takes_prompt(self, texts: Collection[str], ids: Sequence[int]) -> bool:
        """Whether a prompt with these chunks and ids goes: it holds one of the texts or a part of one."""
        return not self.texts.isdisjoint(texts) or self._shares(ids) or self._is_written(ids)

    def _is_written(self, ids: Sequence[int]) -> bool:
        """Whether one of the texts, or a long part of one, stands in the text of some ids, in whatever form."""
        return self._writes(self._segments.tokenizer.text_of(ids))


def _holds(ids: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether ids stand among others, side by side."""
    return any(ids[at : at + len(wanted)] == wanted for at in range(len(ids) - len(wanted) + 1))
