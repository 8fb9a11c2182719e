"""Whole prompts kept with their answers, so that the next turn of a conversation goes on from them.

Their KV is that of a blended pass and so approximate. It has keys of its own, in which the rule and
its ratio have a part, and is never taken for a chunk's or an exact prefix's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cacheblend_rag.config import BlendConfig, options_of
from cacheblend_rag.engine.write_back import Job
from cacheblend_rag.models.kv import LayerKV, SegmentKV
from cacheblend_rag.prompt import Span, TokenizedPrompt
from cacheblend_rag.prompt.tokenizer import common_length
from cacheblend_rag.store.base import KVRecord, KVStore, RecordInfo, StoredKV, record_key

_log = logging.getLogger(__name__)
KEY_PREFIX = "session-"
# Settings on which the KV of a blended prompt depends, apart from its ids and the model.
_BLENDED_BY = tuple(option.name for option in options_of(BlendConfig) if option.identity == "kv")


def blended_by(config: BlendConfig, condition: str) -> str:
    """All that the KV of a blended prompt depends on, apart from its ids and the model.

    Parameters
    ----------
    config : BlendConfig
    condition : str
        The condition that chunks are computed behind, and the digest of a learned context.
    """
    options = {name: getattr(config, name) for name in sorted(_BLENDED_BY)}
    options |= {"condition": condition, "selection_options": sorted(config.selection_options.items())}
    return repr(options)


@dataclass(frozen=True)
class ResumedPrompt:
    """A prompt whose first tokens are those of a kept one.

    Parameters
    ----------
    split : TokenizedPrompt
        The prompt, with all of that as its prefix.
    key : str
        Key of the record.
    record : StoredKV
        KV of exactly these tokens, keys rotated.
    """

    split: TokenizedPrompt
    key: str
    record: StoredKV

    @property
    def tokens(self) -> int:
        """Tokens that are continued from."""
        return len(self.split.prefix)


class SessionCache:
    """Kept prompts of one model, rule and store.

    Parameters
    ----------
    store : KVStore
    config : BlendConfig
    like : RecordInfo
        Info of a record of this model, apart from its ids.
    learned : str
        Digest of the learned context that chunks are computed behind; empty for none.
    """

    def __init__(self, store: KVStore, config: BlendConfig, like: RecordInfo, learned: str = "") -> None:
        self._store, self._salt, self._like = store, config.salt, like
        self._rule = blended_by(config, config.condition + learned)

    def key(self, anchor: Sequence[int]) -> str:
        """Key of the prompt that begins with these ids, up to the end of its last chunk."""
        rule = hashlib.sha256(self._rule.encode()).hexdigest()
        fingerprint, kind = self._like.fingerprint, f"session {rule}"
        key = record_key(fingerprint=fingerprint, salt=self._salt, kind=kind, context_ids=(), token_ids=anchor)
        return keys_begin(self._salt) + key

    def find(self, split: TokenizedPrompt) -> ResumedPrompt | None:
        """The kept prompt that has most in common with the beginning of this one."""
        for span in reversed(split.chunks):
            key = self.key(split.input_ids[: span.stop])
            record = self._store.open(key)
            if record is None:
                continue
            tokens = self._in_common(record.info, split)
            if tokens < span.stop:
                record.close()
                continue
            return ResumedPrompt(resume(split, tokens), key, _Beginning(record, tokens))
        return None

    def _in_common(self, info: RecordInfo, split: TokenizedPrompt) -> int:
        """Tokens at the beginning that both have, no chunk cut in two; the last one is always computed."""
        if dataclasses.replace(info, token_ids=()) != dataclasses.replace(self._like, token_ids=()):
            return 0
        common = common_length(split.input_ids[:-1], info.token_ids)
        return min([common, *(span.start for span in split.chunks if span.start < common < span.stop)])

    def job(
        self, split: TokenizedPrompt, answer_ids: Sequence[int], layers: Sequence[LayerKV]
    ) -> tuple[str, Job] | None:
        """Job that keeps a finished prompt and its answer; None if the model's cache does not hold it whole.

        Parameters
        ----------
        split : TokenizedPrompt
            The whole prompt, as it was given.
        answer_ids : sequence of int
            None of an answer whose ids no later turn has: then the prompt alone is kept.
        layers : sequence of LayerKV
            KV of prompt and answer; of sliding layers that is the window alone.
        """
        held = layers[0].keys.shape[2]
        ids = (*split.input_ids, *answer_ids)[:held]
        if len(ids) < len(split.input_ids) or any(layer.keys.shape[2] != held for layer in layers):
            _log.debug("a prompt of %d tokens is not kept: the cache does not hold it whole", len(split.input_ids))
            return None
        keys = tuple(layer.keys[0, :, : len(ids)].detach().cpu().clone() for layer in layers)
        values = tuple(layer.values[0, :, : len(ids)].detach().cpu().clone() for layer in layers)
        record = KVRecord(dataclasses.replace(self._like, token_ids=ids), SegmentKV(keys, values, rotated=True))
        key = self.key(split.input_ids[: split.chunks[-1].stop])
        held = sum(tensor.nbytes for tensor in keys + values)
        return key, Job(lambda: self._store.put(key, record), held, lambda: record.info)


class _Beginning(StoredKV):
    """The first tokens of a record."""

    def __init__(self, inner: StoredKV, tokens: int) -> None:
        self._inner, self._tokens = inner, tokens
        self.info = dataclasses.replace(inner.info, token_ids=inner.info.token_ids[:tokens])
        self.tier = inner.tier

    def read_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._inner.read_layer(layer)
        return keys[:, : self._tokens], values[:, : self._tokens]

    def close(self) -> None:
        self._inner.close()


def keys_begin(salt: str) -> str:
    """Beginning of the keys of a tenant's kept prompts."""
    return f"{KEY_PREFIX}{hashlib.sha256(salt.encode()).hexdigest()[:16]}-"


def holds(info: RecordInfo, chunk_ids: Sequence[int]) -> bool:
    """Whether a kept prompt has a chunk in it."""
    return holds_ids(info.token_ids, chunk_ids)


def holds_ids(ids: tuple[int, ...], chunk_ids: Sequence[int]) -> bool:
    """Whether ids stand among others, side by side."""
    wanted = tuple(chunk_ids)
    return any(ids[at : at + len(wanted)] == wanted for at in range(len(ids) - len(wanted) + 1))


def resume(split: TokenizedPrompt, tokens: int) -> TokenizedPrompt:
    """The same ids, the first of them one long prefix. A chunk that this cuts in two is no part of it."""
    return dataclasses.replace(
        split,
        prefix=Span(0, tokens),
        located=tuple(one for one in split.located if one.span.start >= tokens or one.span.stop > tokens),
        suffix=Span(max(tokens, split.suffix.start), max(tokens, split.suffix.stop)),
    )
