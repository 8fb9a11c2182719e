"""Kernels for GPUs against what they stand for. Without a GPU, Triton's interpreter runs them on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.models import adapter, gpu, rope, row_layers
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.store import MemoryStore, RecordInfo
from cacheblend_rag.store.codecs import CODECS
from docs.benchmarks.scripts.common import read_plainly
from tests import tiny
from tests.probes import PLAIN

pytest.importorskip("triton")
# KV between chunks is whatever was in memory until it is computed, and is rotated with theirs. NumPy, by which the
# interpreter computes, warns of that.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{what} encountered in:RuntimeWarning") for what in ("overflow", "invalid value")
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes products in bfloat16 wrongly.
DTYPES = ["float32", "bfloat16", "float16"] if DEVICE == "cuda" else ["float32", "float16"]
PROMPT = Prompt("Read this:", [tiny.text(8, 1), tiny.text(5, 2), tiny.text(10, 3)], "What fell?")
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True}),
    **PLAIN,
    "gemma2, not plain": ("gemma2", {"attn_logit_softcapping": None, "num_hidden_layers": 4}),
    "glm, rotates a part of each head": ("glm", {"attention_bias": True}),
}

SHAPES = [(4, 2, 32), (3, 3, 80), (14, 2, 64), (4, 4, 128), (2, 1, 256)]
SIZES = [(1, 70), (5, 5), (20, 131), (70, 200), (130, 300), (600, 700)]


def _attended() -> Iterator[Any]:
    """Shapes, sizes, windows and types; few of them for the interpreter."""
    if DEVICE == "cpu":
        yield from ((4, 2, 32, 1, 70, None, "float16"), (3, 3, 80, 5, 5, None, "float32"))
        yield (4, 2, 32, 20, 131, 50, "float32")
    else:
        for shape, size, window, dtype in product(SHAPES, SIZES, (None, 50), DTYPES):
            yield (*shape, *size, window, dtype)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are in use, on whatever device there is."""
    if DEVICE == "cpu":
        for user in (adapter, row_layers, rope):
            monkeypatch.setattr(user, "has_kernels", lambda device: True)


def _long(family: str) -> Any:
    """A family that takes the interpreter long."""
    return family if DEVICE == "cuda" else pytest.param(family, marks=pytest.mark.slow)


def randn(*shape: int, dtype: str) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(getattr(torch, dtype))


def weights_of(query: torch.Tensor, keys: torch.Tensor, places: torch.Tensor, window: int | None) -> torch.Tensor:
    """Attention weights of rows at some places, ``[heads, rows, tokens]``, from their definition."""
    columns = torch.arange(keys.shape[1], device=DEVICE)
    seen = columns[None] <= places[:, None]
    if window:
        seen &= columns[None] > places[:, None] - window
    spread = keys.double().repeat_interleave(len(query) // len(keys), 0)
    scores = query.double() @ spread.transpose(1, 2) * query.shape[-1] ** -0.5
    return scores.masked_fill(~seen, float("-inf")).softmax(-1)


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal but for rounding, that of the result's type included."""
    share = 1e-5 if found.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), wanted.double(), rtol=share, atol=share)


@pytest.mark.parametrize(("heads", "kv_heads", "width", "rows", "tokens", "window", "dtype"), list(_attended()))
def test_row_sees_all_up_to_its_position(
    heads: int, kv_heads: int, width: int, rows: int, tokens: int, window: int | None, dtype: str
) -> None:
    from cacheblend_rag.models.gpu.attention import attend_from
    from cacheblend_rag.models.gpu.pointer_table import KVPointers

    torch.manual_seed(rows)
    query = randn(rows, heads, width, dtype=dtype).transpose(0, 1)
    keys, values = (randn(kv_heads, tokens, width, dtype=dtype) for _ in range(2))
    places = torch.randperm(tokens, device=DEVICE)[:rows].sort().values
    spread = values.double().repeat_interleave(heads // kv_heads, 0)
    wanted = (weights_of(query, keys, places, window) @ spread).transpose(0, 1)
    keys[:, int(places[-1]) + 1 :] = float("nan")  # positions behind the last row are not read
    values[:, int(places[-1]) + 1 :] = float("nan")
    kv = LayerKV(keys[None], values[None])
    near(attend_from(query, kv, places, window, width**-0.5), wanted)
    pointers = KVPointers(torch.tensor(KVPointers.written(kv), device=DEVICE), kv_heads)
    near(attend_from(query, pointers, places, window, width**-0.5), wanted)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), SHAPES if DEVICE == "cuda" else SHAPES[:1])
def test_weights_of_watched_rows_are_summed(heads: int, kv_heads: int, width: int) -> None:
    from cacheblend_rag.models.gpu.attention import WeightSums, attend_from

    (rows, tokens), window, dtype = ((70, 200) if DEVICE == "cuda" else (20, 70)), 50, DTYPES[-1]
    torch.manual_seed(rows)
    query = randn(rows, heads, width, dtype=dtype).transpose(0, 1)
    keys, values = (randn(kv_heads, tokens, width, dtype=dtype) for _ in range(2))
    places = torch.cat(
        (torch.randperm(tokens - 1, device=DEVICE)[: rows - 1].sort().values, torch.tensor([tokens - 1]).to(DEVICE))
    )
    watched = range(rows // 3, rows)
    wanted = weights_of(query, keys, places, window)[:, watched.start :].unflatten(0, (kv_heads, -1)).sum(dim=(1, 2))
    sums = WeightSums.empty(kv_heads, tokens, query.device)
    sums.begin(watched)
    kv = LayerKV(keys[None], values[None])
    plain = attend_from(query, kv, places, window, width**-0.5)
    for _ in range(2):  # of two layers
        assert torch.equal(attend_from(query, kv, places, window, width**-0.5, sums), plain)
    near(sums.totals[:, :tokens].to(query.dtype), 2 * wanted)
    assert not sums.totals[:, tokens:].any()
    sums.begin(range(0, 1))
    assert not sums.totals.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), SHAPES if DEVICE == "cuda" else SHAPES[:1])
def test_each_row_sees_its_own_answer(heads: int, kv_heads: int, width: int, dtype: str) -> None:
    from cacheblend_rag.models.gpu.attention import attend_by_row
    from cacheblend_rag.models.gpu.pointer_table import KVPointers

    lengths = (5, 131, 64)
    torch.manual_seed(len(lengths))
    query = randn(len(lengths), heads, width, dtype=dtype).transpose(0, 1)
    held = [randn(2, kv_heads, length + 9, width, dtype=dtype) for length in lengths]
    for kv, length in zip(held, lengths, strict=True):
        kv[:, :, length:] = float("nan")  # room is not read
    entries = [KVPointers.written(LayerKV(kv[None, 0], kv[None, 1])) for kv in held]
    pointers = KVPointers(torch.tensor(entries, device=DEVICE), kv_heads)
    newest = torch.tensor(lengths, device=DEVICE) - 1
    found = attend_by_row(query, pointers, newest, width**-0.5)
    for row, (kv, length) in enumerate(zip(held, lengths, strict=True)):
        keys, values = kv[:, :, :length].double().repeat_interleave(heads // kv_heads, 1)
        weights = (query[:, row, None].double() @ keys.transpose(1, 2) * width**-0.5).softmax(-1)
        near(found[row], (weights @ values)[:, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_gates(dtype: str) -> None:
    from cacheblend_rag.models.gpu.rowwise import add_and_normalise, gate, normalise

    torch.manual_seed(0)
    rows, more = randn(7, 96, dtype=dtype), randn(7, 96, dtype=dtype)
    weight = randn(96, dtype=dtype)
    near(normalise(rows, weight, 1e-5), _normalised(rows, weight))
    total, normed = add_and_normalise(rows, more, weight, 1e-5)
    assert torch.equal(total, rows + more)
    near(normed, _normalised(rows + more, weight))
    near(gate(rows, more), silu(rows) * more)


def _normalised(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = rows.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("interleaved", "pairs"), [(False, 16), (True, 6)])
def test_keys_turn_as_they_do_on_a_cpu(interleaved: bool, pairs: int, dtype: str) -> None:
    torch.manual_seed(0)
    whole = randn(1, 3, 50, 32, dtype=dtype)
    angles = torch.rand(40, pairs, device=DEVICE) * 6
    tables = [torch.stack((of, of), -1).flatten(1) for of in (angles.cos(), angles.sin())]  # each listed twice
    cos, sin = (table[:, ::2] for table in tables)
    wanted = whole.clone()
    for start in range(0, 40, 10):  # in steps, which the plain form takes on a CPU
        first, second = rope.pairs_of(wanted[:, :, 5:45], pairs, interleaved)
        at = slice(start, start + 10)
        rope.turn_pairs(first[..., at, :], second[..., at, :], cos[at], sin[at])
    rope.rotate_keys(whole[:, :, 5:45], cos, sin, interleaved)
    near(whole, wanted)


@pytest.mark.parametrize(("dtype", "rotates"), [("float32", True), ("bfloat16", False)])
def test_records_come_to_their_places_decoded_and_rotated(rotates: bool, dtype: str) -> None:
    from cacheblend_rag.models.gpu.scatter import Source, place

    torch.manual_seed(0)
    layers, heads, tokens, width = 3, 2, 260, 24
    kind = getattr(torch, dtype)
    angles = torch.rand(tokens, width // 2, device=DEVICE) * 6
    rotation = (angles.cos(), angles.sin()) if rotates else None
    found = torch.full((layers, 2, heads, tokens, width), 7.0, device=DEVICE).to(kind)
    wanted = found.clone()
    sources, kept = [], []
    records = [(5, 3, "raw", False), (70, 20, "int8", True), (64, 100, "raw", True), (67, 180, "int8", True)]
    for count, start, name, turned in (*records, (3, 250, "int8", True)):
        info = RecordInfo("f", (), tuple(range(count)), layers, heads, width, dtype, not turned)
        codec, stride = CODECS[name], 16 * (CODECS[name].layer_bytes(info) // 16 + 3)
        block = torch.randint(0, 255, (layers, stride), dtype=torch.uint8)  # what pads a layer is not read
        for layer in range(layers):
            parts = [
                torch.randn(heads, count, width).mul_(10.0 ** torch.randint(-2, 3, (1, 1, width))).to(kind)
                for _ in range(2)
            ]
            parts[0][0, 0, 0] = parts[1][0, 0] = 0
            data = bytearray().join(codec.encode(*parts))
            block[layer, : len(data)] = torch.frombuffer(data, dtype=torch.uint8)
            keys, values = (part.to(DEVICE) for part in codec.decode(data, info))
            if rotates and turned:
                rope.turn_pairs(
                    *rope.pairs_of(keys, width // 2, False), *(of[start : start + count] for of in rotation or ())
                )
            wanted[layer, 0, :, start : start + count], wanted[layer, 1, :, start : start + count] = keys, values
        kept.append(block.to(DEVICE))
        sources.append(Source(kept[-1].data_ptr(), stride, count, start, turned, name == "int8"))
    place(sources, found, rotation)
    if rotates:
        near(found[:, 0], wanted[:, 0])
        assert torch.equal(found[:, 1], wanted[:, 1])
    else:
        assert torch.equal(found, wanted)


# Groups of heads, norms of queries and windows are in the one that the interpreter runs, too.
@pytest.mark.parametrize("family", [name if name.startswith("qwen3, window") else _long(name) for name in FAMILIES])
def test_pass_equals_one_by_transformers_layers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fused_by(family, recompute_ratio=0.3, selection_options={"check_layers": (1,)})
    monkeypatch.setattr(adapter.ModelAdapter, "plain_layers", None)
    for user in (row_layers, rope):
        monkeypatch.setattr(user, "has_kernels", lambda device: False)
    wanted = fused_by(family, recompute_ratio=0.3, selection_options={"check_layers": (1,)})
    assert found.report.computed_tokens == wanted.report.computed_tokens
    assert max(found.report.recomputed_tokens) > min(found.report.recomputed_tokens) > 0
    for ours, theirs in zip(found.recomputed, wanted.recomputed, strict=True):
        assert torch.equal(ours, theirs)
    _same(found, wanted.logits, wanted.cache.layers)


@pytest.mark.parametrize("family", [_long("qwen3"), _long("llama, one key for all heads")])
def test_answers_by_kernels_equal_those_by_transformers(family: str) -> None:
    """One alone and several of different lengths together, beyond the room that is kept behind rows."""
    model, tokenizer = _model(family), tiny.tokenizer()
    config = BlendConfig(min_tokens=0, write_back="inline", recompute_ratio=1.0, max_concurrent=3)
    prompts = [Prompt("Read this:", [tiny.text(words, words)], "What fell?") for words in (9, 30, 14)]
    count = 12 if DEVICE == "cuda" else 3
    with BlendEngine(model, tokenizer, config=config, store=MemoryStore(device=DEVICE)) as engine:
        alone = [engine.generate(prompt, max_new_tokens=count) for prompt in prompts]
        together = engine.generate_batch(prompts, max_new_tokens=count)
        for ours, also in zip(alone, together, strict=True):
            ids = torch.tensor([ours.report.input_ids], device=DEVICE)
            with torch.no_grad():
                theirs = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
            assert ours.token_ids == also.token_ids == theirs[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", [_long("mistral, window"), _long("qwen3")])
def test_recomputing_all_equals_full_prefill(family: str) -> None:
    found = fused_by(family, recompute_ratio=1.0)
    with torch.no_grad():
        plain = _model(family)(torch.tensor([found.input_ids], device=DEVICE), use_cache=True)
    if "window" in family:
        torch.testing.assert_close(found.logits, plain.logits[0, -1], atol=1e-4, rtol=1e-4)
    else:
        _same(found, plain.logits[0, -1], tiny.cache_of(plain).layers)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kept", ["host", "gpu"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral, window"])
def test_recordings_serve_other_prompts(family: str, kept: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, changes = FAMILIES[family]
    model = tiny.model(name, num_hidden_layers=11, **changes).to(DEVICE, getattr(torch, dtype))
    config = BlendConfig(min_tokens=0, write_back="inline", selection="hkvd", recompute_ratio=0.2)
    chunks = [tiny.text(words, seed) for seed, words in enumerate((60, 41, 70, 60))]
    orders = [(0, 1, 2), (2, 0, 1), (3, 1, 2), (1, 3), (2, 1, 0), (0, 1, 2)]
    prompts = [Prompt("Read this:", [chunks[at] for at in order], "What fell?") for order in orders]
    store = MemoryStore(device="cuda" if kept == "gpu" else "cpu")
    with BlendEngine(model, tiny.tokenizer(), config=config, store=store) as engine:
        engine.warm(chunks)
        engine.fuse(prompts[0])  # stores the prefix
        found = [engine.fuse(prompt) for prompt in prompts]
        graphs = engine.adapter.plain_layers.graphs
        recordings = [made for size in graphs.sizes.values() for made in size.recordings.values()]
        assert any(made is not None for made in recordings)
        monkeypatch.setitem(vars(engine.adapter), "plain_layers", None)
        for ours, prompt in zip(found, prompts, strict=True):
            with read_plainly():
                theirs = engine.fuse(prompt)
            assert ours.report.computed_tokens == theirs.report.computed_tokens
            if dtype == "float32":
                _same(ours, theirs.logits, theirs.cache.layers, 1e-3)
            else:  # random weights spread rounding far; the same would be said of two of PyTorch's kernels
                torch.testing.assert_close(ours.logits, theirs.logits, atol=0.5, rtol=0.1)


def _model(family: str) -> Any:
    name, changes = FAMILIES[family]
    return tiny.model(name, **{"num_hidden_layers": 3} | changes).to(DEVICE)


def fused_by(family: str, **options: Any) -> Any:
    config = BlendConfig(**{"min_tokens": 0, "write_back": "inline", "selection": "hkvd", **options})
    with BlendEngine(_model(family), tiny.tokenizer(), config=config, store=MemoryStore(device=DEVICE)) as engine:
        engine.warm(PROMPT.chunks)
        fused = engine.fuse(PROMPT)
        assert fused.report.hits == 3
        return fused


def _same(found: Any, logits: torch.Tensor, layers: Any, near: float = 1e-4) -> None:
    torch.testing.assert_close(found.logits, logits, atol=near, rtol=near)
    for ours, theirs in zip(found.cache.layers, layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=near, rtol=near)
        torch.testing.assert_close(ours.values, theirs.values, atol=near, rtol=near)


def test_layer_that_is_watched_or_replaced_is_left_to_transformers() -> None:
    model = tiny.model("llama").to(DEVICE)
    blended = adapter.ModelAdapter(model)

    def fused() -> bool:
        with blended.blending() as layers:
            return layers.kernels is not None

    assert fused()
    network = model.model.layers[2].mlp
    hook = network.register_forward_hook(lambda module, given, out: out)
    assert not fused()
    hook.remove()
    assert fused()
    network.up_proj = torch.nn.Sequential(network.up_proj)
    assert not fused()
    network.up_proj = network.up_proj[0]
    assert fused()


def test_kernels_that_do_not_run_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from cacheblend_rag.models.gpu import rowwise

    def failing(*given: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(rowwise, "normalise", failing)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "ones", lambda *shape, device: torch.zeros(shape))
    for capability, told in (((7, 5), False), ((9, 0), True)):
        gpu.kernels_run_on.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, of=capability: of)
        assert gpu.has_kernels(torch.device("cuda")) is False
        assert ("Failed to find C compiler" in caplog.text) is told
    gpu.kernels_run_on.cache_clear()


def test_other_forms_of_layers_are_left_to_transformers() -> None:
    for family in ("gemma2, not plain", "glm, rotates a part of each head"):
        blended = adapter.ModelAdapter(_model(family))
        with blended.blending() as layers:
            assert layers.kernels is None
    assert gpu.has_kernels(torch.device("cpu")) is False
