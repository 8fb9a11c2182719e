"""Products of few rows by codes of 4 bits that are found again in weights, held against plain products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.models.cpu import int4_linear, kept_codes
from cacheblend_rag.models.cpu import weight_prepacking as prepacking
from cacheblend_rag.models.cpu.int4_linear import find_codes, fits_weight, int4_product
from tests import gguf_files, tiny
from tests.parity.test_weight_prepacking import needs_bfloat16
from tests.probes import rows_of

needs_codes = pytest.mark.skipif(not int4_linear._agrees(), reason="PyTorch has no products by 4 bits here")
pytestmark = needs_codes
EPS = torch.finfo(torch.bfloat16).eps
PROMPT = "the cat sat on the mat and the dog ran to the mill"


def on_steps(rows: int, width: int, most: int = 15, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """A weight as a file of 4 bits holds it, in the type that it is kept in."""
    codes = torch.randint(0, most + 1, (rows, width // 32, 32)).float()
    step, below = torch.rand(rows, width // 32, 1) * 0.01 + 0.001, torch.rand(rows, width // 32, 1) * most
    return ((codes - below) * step).view(rows, width).to(dtype)


@pytest.mark.parametrize(
    ("rows", "width", "most"),
    [(16, 32, 15), (48, 64, 9), (16, 64, 0), (192, 576, 15), pytest.param(896, 4864, 15, marks=pytest.mark.slow)],
)
def test_product_by_found_codes_is_that_of_the_weight_to_rounding(rows: int, width: int, most: int) -> None:
    weight = on_steps(rows, width, most)
    codes = find_codes(weight.to(torch.bfloat16))
    assert codes is not None
    assert fits_weight(codes, weight.to(torch.bfloat16))
    assert codes.packed.nbytes + codes.steps.nbytes <= 0.7 * rows * width
    for count in (1, 3, 4, 7):
        given, bias = torch.randn(1, count, width).to(torch.bfloat16), torch.randn(rows).to(torch.bfloat16)
        exact = given.double() @ weight.double().T
        found = int4_product(given, codes, None)
        assert found.shape == (1, count, rows)
        assert found.dtype is torch.bfloat16
        plain = nn.functional.linear(given, weight.to(torch.bfloat16))
        assert (found.double() - exact).norm() <= 1.5 * (plain.double() - exact).norm() + EPS / 2 * exact.norm()
        assert torch.equal(int4_product(given, codes, bias), found + bias)


@pytest.mark.parametrize(
    "weight",
    [
        torch.randn(64, 128),
        torch.randn(64, 128) * 0.03 + 1,
        on_steps(64, 128, 31),
        on_steps(64, 128, 255),
        torch.cat((on_steps(48, 128), torch.randn(16, 128).half())),
        torch.cat((on_steps(64, 96), 0.01 * torch.randn(64, 32).half()), dim=1),
        on_steps(8, 128),
        on_steps(64, 128)[:, :72],
    ],
    ids=["any", "far from 0", "5 bits", "8 bits", "some rows", "some columns", "few rows", "width"],
)
def test_other_weights_have_no_codes(weight: torch.Tensor) -> None:
    assert find_codes(weight.to(torch.bfloat16).contiguous()) is None


def test_codes_of_another_weight_do_not_fit() -> None:
    weight = on_steps(64, 128).to(torch.bfloat16)
    codes = find_codes(weight)
    assert codes is not None
    assert not fits_weight(codes, on_steps(64, 128).to(torch.bfloat16))
    assert not fits_weight(codes, weight + 0.01)
    assert not fits_weight(codes, weight[:48])
    assert not fits_weight(codes, weight[:, :64].contiguous())


def test_rows_may_lie_in_memory_in_any_way() -> None:
    weight = on_steps(32, 64).to(torch.bfloat16)
    codes = find_codes(weight)
    assert codes is not None
    ways = {
        "last of several": torch.randn(3, 5, 64).to(torch.bfloat16)[:, -1:],
        "turned": torch.randn(64, 3).to(torch.bfloat16).T,
        "every second": torch.randn(3, 128).to(torch.bfloat16)[:, ::2],
        "one for all": torch.randn(1, 64).to(torch.bfloat16).expand(3, 64),
    }
    for name, given in ways.items():
        assert torch.equal(int4_product(given, codes, None), int4_product(given.contiguous(), codes, None)), name


@pytest.mark.parametrize("kind", ["not a number", "sums too large", "empty"])
def test_weights_beyond_all_numbers_have_no_codes(kind: str) -> None:
    weight = on_steps(16, 64)
    if kind == "not a number":
        weight[:, 3] = torch.nan
    elif kind == "empty":
        weight = weight[:0]
    else:
        weight = (torch.randint(0, 16, (16, 64)).float() - 8) * 2e37
    assert find_codes(weight.to(torch.bfloat16)) is None


# In an engine -------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache. Small weights are packed, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(prepacking, "_LEAST", 0)
    return tmp_path / "cache"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product by codes of 4 bits."""
    return rows_of(monkeypatch, prepacking, "int4_product")


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Weights in which codes were looked for."""
    weights: list[torch.Tensor] = []
    inner = kept_codes.find_codes

    def counted(weight: torch.Tensor) -> Any:
        weights.append(weight)
        return inner(weight)

    monkeypatch.setattr(kept_codes, "find_codes", counted)
    return weights


def written(folder: Path, kind: str = "Q4_1") -> Path:
    model = tiny.model("llama", hidden_size=64, intermediate_size=128, head_dim=16, initializer_range=0.1)
    return gguf_files.write(folder / "model.gguf", model, kind)


def opened(file: Path, **options: Any) -> BlendEngine:
    config = BlendConfig(prepack_weights=True, prompt_cache=0, **options)
    return BlendEngine.from_pretrained(file, device="cpu", config=config)


def kept(cache: Path) -> list[Path]:
    return sorted(cache.glob("cacheblend_rag/models/gguf/*/codes/*"))


@needs_bfloat16
def test_tokens_of_a_file_of_4_bits_are_multiplied_by_its_codes(tmp_path: Path, cache: Path, asked: list[int]) -> None:
    with opened(written(tmp_path)) as engine:
        answer = engine.generate(PROMPT, max_new_tokens=6)
        assert asked
        assert set(asked) <= {1, 2, 3, 4}
        layers = len(engine.model.model.layers)
        assert len(asked) >= 7 * layers * (len(answer.token_ids) - 1)
        with engine.with_config(prepack_weights=False) as plain:
            asked.clear()
            plain.generate(PROMPT, max_new_tokens=6)
            assert not asked


@needs_bfloat16
def test_codes_are_found_once_and_read_from_then_on(
    tmp_path: Path, cache: Path, asked: list[int], searches: list[torch.Tensor]
) -> None:
    file = written(tmp_path)
    with opened(file) as engine:
        first = engine.generate(PROMPT, max_new_tokens=6).token_ids
    assert searches
    assert len(kept(cache)) == 1
    searches.clear()
    with opened(file) as engine:
        asked.clear()
        assert engine.generate(PROMPT, max_new_tokens=6).token_ids == first
        assert asked
    assert not searches


@needs_bfloat16
@pytest.mark.parametrize("damage", ["cut", "other weights", "folder"])
def test_damaged_codes_are_found_anew(
    damage: str, tmp_path: Path, cache: Path, asked: list[int], searches: list[torch.Tensor]
) -> None:
    file = written(tmp_path)
    with opened(file) as engine:
        first = engine.generate(PROMPT, max_new_tokens=6).token_ids
    (path,) = kept(cache)
    content = path.read_bytes()
    if damage == "other weights":
        from safetensors.torch import load_file, save_file

        tensors = load_file(path)
        save_file({name: tensor.flip(0).contiguous() for name, tensor in tensors.items()}, path)
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(content[:-100])
    searches.clear()
    with opened(file) as engine:
        asked.clear()
        assert engine.generate(PROMPT, max_new_tokens=6).token_ids == first
    assert searches
    assert asked


@needs_bfloat16
def test_weight_that_was_changed_is_multiplied_as_it_is(tmp_path: Path, cache: Path, asked: list[int]) -> None:
    file = written(tmp_path)
    with opened(file) as engine:
        engine.generate(PROMPT, max_new_tokens=2)
        with torch.no_grad():
            for layer in engine.model.model.layers:
                layer.mlp.up_proj.weight.mul_(0.5)
        asked.clear()
        engine.generate(PROMPT, max_new_tokens=3)
        engine.generate(PROMPT, max_new_tokens=3)
        assert not asked  # weights changed once: what was found in the file's is no longer trusted


def alter(engine: BlendEngine) -> None:
    """Change little of each layer, so that all still lies on steps."""
    with torch.no_grad():
        for layer in engine.model.model.layers:
            layer.mlp.up_proj.weight[0].mul_(1.05)


def farthest(engine: BlendEngine) -> float:
    """Largest relative distance of a row by codes from the weight as it is."""
    copies = prepacking._by_model[engine.model]()
    assert copies is not None
    codes = {one.module: one.copy.product.args[1] for one in copies._forwards if one.copy is not None}  # type: ignore[attr-defined]
    found = {module: one for module, one in codes.items() if one is not None}
    assert len(found) >= 7 * len(engine.model.model.layers)
    away = [0.0]
    for module, one in found.items():
        weight = module.weight.detach()
        ones = torch.eye(weight.shape[1], dtype=torch.bfloat16)
        rows = int4_product(ones, one, None).float().T
        away.append(float(((rows - weight.float()).norm(dim=1) / weight.float().norm(dim=1)).max()))
    return max(away)


@needs_bfloat16
def test_weights_changed_before_the_first_pass_have_codes_of_their_own(tmp_path: Path, cache: Path) -> None:
    file = written(tmp_path)
    with opened(file) as engine:
        engine.generate(PROMPT, max_new_tokens=2)
        assert farthest(engine) < 0.02
    with opened(file) as engine:
        alter(engine)
        engine.generate(PROMPT, max_new_tokens=2)
        assert farthest(engine) < 0.02
    with opened(file) as engine:
        engine.generate(PROMPT, max_new_tokens=2)
        assert farthest(engine) < 0.02, "what was kept is of this file's weights"


@needs_bfloat16
def test_nothing_else_is_deleted_where_codes_are_kept(tmp_path: Path, cache: Path) -> None:
    file = written(tmp_path)
    with opened(file) as engine:
        folder = Path(engine.model.config._name_or_path)
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "letters.txt").write_text("dear", encoding="utf-8")
        (tmp_path / "elsewhere" / f"{'0' * 16}.safetensors").write_bytes(b"of another processor")
        (folder / "codes").symlink_to(tmp_path / "elsewhere")
        engine.generate(PROMPT, max_new_tokens=2)
    left = sorted(path.name for path in (tmp_path / "elsewhere").iterdir())
    assert len(left) == 2
    assert left[1] == "letters.txt"
    assert left[0] != f"{'0' * 16}.safetensors"


@needs_bfloat16
def test_blended_answer_is_the_same_in_each_process_and_batch(tmp_path: Path, cache: Path, asked: list[int]) -> None:
    with opened(written(tmp_path), max_concurrent=2, min_tokens=0) as engine:
        alone = [engine.generate(PROMPT, max_new_tokens=5).token_ids for _ in range(2)]
        assert alone[0] == alone[1]
        assert asked
