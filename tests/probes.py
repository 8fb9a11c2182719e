"""Tools of the engine's tests: a naive twin of the blended pass, and stores that report or fail."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.generation import LogitsProcessor

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.prompt import PromptTokenizer
from cacheblend_rag.report import FusedKV, Generation
from cacheblend_rag.store import KVRecord, KVStore, MemoryStore, StoredKV
from cacheblend_rag.store.base import WrappedStore
from docs.benchmarks.scripts.common import read_plainly
from tests import tiny

CHUNKS = [tiny.text(23, 1), tiny.text(31, 2), tiny.text(17, 3)]
PROMPT = Prompt("Read this:", CHUNKS, "What fell in the end?")
# Tiny models whose layers have the plain form, with settings of their config.
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, one key for all heads": ("llama", {"num_key_value_heads": 1}),
    "mistral, window": ("mistral", {"sliding_window": 16}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3, window on some layers": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    ),
}


def engine_of(model: Any = None, tokenizer: Any = None, store: Any = None, **options: Any) -> BlendEngine:
    """An engine that blends every prompt by the paper's rule, anew, and stores at once, unless told otherwise.

    Chunks are computed behind the start of a text alone: a twin of that is a plain pass over the chunk.
    """
    paper = {"condition": "sink", "selection": "hkvd"}
    options = {"min_tokens": 0, "write_back": "inline", "prompt_cache": 0} | paper | options
    model = tiny.model() if model is None else model
    tokenizer = tiny.tokenizer() if tokenizer is None else tokenizer
    return BlendEngine(model, tokenizer, config=BlendConfig(**options), store=store)


async def answers_of(engine: BlendEngine, prompts: Sequence[Prompt | str], **options: Any) -> list[Generation]:
    """The answers to several prompts, awaited, in the order of the prompts."""
    with closing(engine.stream_batch(prompts, **options)) as streams:
        answers = {number: await stream.acomplete() for number, stream in streams}
    return [answers[number] for number in range(len(answers))]


def reading(ahead: bool) -> AbstractContextManager[None]:
    """Within this, layers are read ahead of their use or one after another."""
    return nullcontext() if ahead else read_plainly()


def key_of(engine: BlendEngine, text: str) -> str:
    """Key of a chunk's record."""
    segment = engine.chunks.pipeline.segments.chunk(text)
    assert segment is not None
    return segment.key


def segments_of(engine: BlendEngine) -> PromptTokenizer:
    """The tokenizer of an engine's prompts."""
    return PromptTokenizer(engine.tokenizer, engine.config.separator)


def assert_same(ours: FusedKV, theirs: FusedKV) -> None:
    """Both are of the same prompt, bit by bit, with the same rows recomputed."""
    assert ours.input_ids == theirs.input_ids
    assert torch.equal(ours.logits, theirs.logits)
    for mine, other in zip(ours.cache.layers, theirs.cache.layers, strict=True):
        assert torch.equal(mine.keys, other.keys)
        assert torch.equal(mine.values, other.values)
    for mine, other in zip(ours.recomputed, theirs.recomputed, strict=True):
        assert torch.equal(mine, other)


def untouched(model: nn.Module) -> bool:
    """Whether nothing stands for the ``forward`` of any module."""
    return not any("forward" in vars(module) for module in model.modules())


def record_files(folder: Path) -> list[Path]:
    """Files of a disk store's records."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and "cache.db" not in path.name)


class Hooked(WrappedStore):
    """A store that calls back when a record was opened and before a layer of it is read."""

    def __init__(
        self,
        inner: KVStore | None = None,
        opened: Callable[[str], None] = lambda key: None,
        reading: Callable[[str, int], None] = lambda key, layer: None,
    ) -> None:
        super().__init__(inner or MemoryStore())
        self.opened, self.reading = opened, reading
        self.kept: dict[str, KVRecord] = {}
        self.still_open: list[str] = []

    def handed_out(self, key: str, record: StoredKV) -> StoredKV:
        self.opened(key)
        self.still_open.append(key)
        return _HookedRecord(self, key, record)

    def put(self, key: str, record: KVRecord) -> None:
        self.inner.put(key, record)
        self.kept[key] = record

    def delete(self, key: str) -> bool:
        self.kept.pop(key, None)
        return self.inner.delete(key)

    def stored_ids(self) -> list[tuple[int, ...]]:
        """Token ids of everything that was put and not deleted."""
        return [record.info.token_ids for record in self.kept.values()]


class _HookedRecord(StoredKV):
    def __init__(self, store: Hooked, key: str, inner: StoredKV) -> None:
        self._store, self._key, self._inner = store, key, inner
        self.info, self.tier = inner.info, inner.tier

    def read_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._store.reading(self._key, layer)
        return self._inner.read_layer(layer)

    @property
    def codec(self) -> str | None:
        return self._inner.codec

    def read_written(self, layers: slice, pinned: bool = False) -> torch.Tensor:
        for layer in range(layers.start, layers.stop):
            self._store.reading(self._key, layer)
        return self._inner.read_written(layers, pinned)

    def close(self) -> None:
        if self._key in self._store.still_open:
            self._store.still_open.remove(self._key)
        self._inner.close()


class CountingStore(WrappedStore):
    """A store that notes every call that answering makes, the bytes read, and the most bytes and records held at once.

    Bytes are held as long as a tensor lives that a record has given out. What is read into place is not held.
    """

    def __init__(self, inner: KVStore) -> None:
        super().__init__(inner)
        self.forget()

    def forget(self) -> None:
        """Begin to count."""
        self.calls: list[tuple[Any, ...]] = []
        self.read_bytes = self.most_held = self.most_open = self._held = self._open = 0

    @property
    def counts(self) -> tuple[Any, ...]:
        """All that was noted."""
        return self.calls, self.read_bytes, self.most_held, self.most_open

    def open_all(self, keys: Sequence[str]) -> Mapping[str, StoredKV]:
        self.calls.append(("open_all", *keys))
        return super().open_all(keys)

    def put(self, key: str, record: KVRecord) -> None:
        self.calls.append(("put", key))
        super().put(key, record)

    def handed_out(self, key: str, record: StoredKV) -> StoredKV:
        self.opened(1)
        return _CountedRecord(self, key, record)

    def opened(self, count: int) -> None:
        self._open += count
        self.most_open = max(self.most_open, self._open)

    def note_held(self, size: int) -> None:
        self._held += size
        self.most_held = max(self.most_held, self._held)


class _CountedRecord(StoredKV):
    def __init__(self, store: CountingStore, key: str, inner: StoredKV) -> None:
        self._store, self._key, self._inner = store, key, inner
        self.info, self.tier = inner.info, inner.tier

    def read_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._inner.read_layer(layer)
        self._note("read_layer", layer, keys, values)
        for tensor in (keys, values):
            self._store.note_held(tensor.nbytes)
            weakref.finalize(tensor, self._store.note_held, -tensor.nbytes)
        return keys, values

    def read_into(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._inner.read_into(layer, keys, values)
        self._note("read_into", layer, keys, values)

    def _note(self, name: str, layer: int, *read: torch.Tensor) -> None:
        self._store.calls.append((name, self._key, layer))
        self._store.read_bytes += sum(tensor.nbytes for tensor in read)

    def close(self) -> None:
        self._store.calls.append(("close", self._key))
        self._store.opened(-1)
        self._inner.close()


def window_of(config: Any, layer: int) -> int | None:
    """Sliding window of a layer, read from the config as the model's authors describe it."""
    types = getattr(config, "layer_types", None)
    if types is not None and types[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def sees(row: int, column: int, window: int | None) -> bool:
    """Whether the plain model shows a row a column."""
    return column <= row and (window is None or column > row - window)


def rotate(vector: torch.Tensor, position: int, config: Any) -> torch.Tensor:
    """Rotate one vector ``[head_dim]`` to a position, pair by pair (default RoPE)."""
    dim = len(vector)
    out = torch.empty(dim, dtype=torch.float64)
    for pair in range(dim // 2):
        angle = position * config.rope_parameters["rope_theta"] ** (-2 * pair / dim)
        first, second = float(vector[pair]), float(vector[pair + dim // 2])
        out[pair] = first * math.cos(angle) - second * math.sin(angle)
        out[pair + dim // 2] = second * math.cos(angle) + first * math.sin(angle)
    return out


@torch.no_grad()
def naive_rows(
    model: Any, ids: Sequence[int], stored: Sequence[LayerKV], rows_by_layer: Sequence[Sequence[int]]
) -> tuple[list[LayerKV], torch.Tensor]:
    """The blended pass written out row by row, in float64, from its description.

    Stored keys are unrotated; on each layer the given rows are computed, each attending to what
    the plain model would show it. Returns rotated keys and values of all positions a layer, and
    the logits of the last position.
    """
    model = tiny_double(model)
    config = model.config
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    hidden = {row: model.model.embed_tokens.weight[ids[row]] for row in rows_by_layer[0]}
    fused = []
    for layer, block in enumerate(model.model.layers):
        rows, attention, window = rows_by_layer[layer], block.self_attn, window_of(config, layer)
        keys = stored[layer].keys[0].double().clone()
        values = stored[layer].values[0].double().clone()
        for position in range(len(ids)):
            for head in range(kv_heads):
                keys[head, position] = rotate(keys[head, position], position, config)
        queries = {}
        for row in rows:
            normed = block.input_layernorm(hidden[row])
            query = attention.q_proj(normed).view(heads, dim)
            key = attention.k_proj(normed).view(kv_heads, dim)
            if hasattr(attention, "q_norm"):
                query, key = attention.q_norm(query), attention.k_norm(key)
            values[:, row] = attention.v_proj(normed).view(kv_heads, dim)
            keys[:, row] = torch.stack([rotate(one, row, config) for one in key])
            queries[row] = torch.stack([rotate(one, row, config) for one in query])
        for row in rows:
            columns = [column for column in range(len(ids)) if sees(row, column, window)]
            mixed = []
            for head in range(heads):
                shared = head // (heads // kv_heads)
                scores = keys[shared, columns] @ queries[row][head] / math.sqrt(dim)
                mixed.append(scores.softmax(0) @ values[shared, columns])
            after = hidden[row] + attention.o_proj(torch.cat(mixed))
            hidden[row] = after + block.mlp(block.post_attention_layernorm(after))
        fused.append(LayerKV(keys[None], values[None]))
    return fused, model.lm_head(model.model.norm(hidden[len(ids) - 1]))


def tiny_double(model: Any) -> Any:
    """A copy of a model in float64."""
    twin = type(model)(model.config).double().eval()
    twin.load_state_dict(model.state_dict())
    return twin


def random_kv(model: Any, tokens: int, seed: int = 0) -> list[LayerKV]:
    """Random stored KV for every layer and position."""
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    shape = (1, config.num_key_value_heads, tokens, config.head_dim)
    return [
        LayerKV(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
        for _ in range(config.num_hidden_layers)
    ]


def copies(layers: Sequence[LayerKV]) -> list[LayerKV]:
    """Copies, since the blended pass takes its buffers over."""
    return [LayerKV(layer.keys.clone(), layer.values.clone()) for layer in layers]


class Slow(LogitsProcessor):
    """Takes its time for each token, and counts them; an answer may have no end."""

    def __init__(self, seconds: float = 0.01, ends: bool = True) -> None:
        self.seconds, self.ends, self.made = seconds, ends, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)  # the pace of a slow model
        self.made += 1
        if not self.ends:
            scores[:, 2] = float("-inf")
        return scores


class Broken(LogitsProcessor):
    """A user's processor that fails at a token."""

    def __init__(self, at: int = 0, says: str = "a processor of the user's failed") -> None:
        self.left, self.says = at, says

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise ZeroDivisionError(self.says)
        return scores
