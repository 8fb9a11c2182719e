"""Products of few rows by codes of 4 bits that are found again in weights, held against plain products."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.models.cpu import int4, products
from cacheblend_rag.models.cpu.int4 import find_codes, fits_weight, int4_product
from tests import gguf_files, tiny
from tests.products import NotedKernels

needs_codes = pytest.mark.skipif(not int4._agrees(), reason="PyTorch has no products by 4 bits here")
pytestmark = needs_codes
EPS = torch.finfo(torch.bfloat16).eps
PROMPT = "the cat sat on the mat and the dog ran to the mill"


def on_steps(rows: int, width: int, most: int = 15, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """A weight as a file of 4 bits holds it, in the type that it is kept in."""
    codes = torch.randint(0, most + 1, (rows, width // 32, 32)).float()
    step, below = torch.rand(rows, width // 32, 1) * 0.01 + 0.001, torch.rand(rows, width // 32, 1) * most
    return ((codes - below) * step).view(rows, width).to(dtype)


def test_product_by_found_codes_is_that_of_the_weight_to_rounding() -> None:
    for rows, width, most in ((16, 32, 15), (48, 64, 9), (16, 64, 0), (192, 576, 15)):
        weight = on_steps(rows, width, most)
        codes = find_codes(weight.to(torch.bfloat16))
        assert codes is not None
        assert fits_weight(codes, weight.to(torch.bfloat16))
        assert codes.packed.nbytes + codes.steps.nbytes <= 0.7 * rows * width
        for count in (1, 3, 4, 7):
            given, bias = torch.randn(1, count, width).to(torch.bfloat16), torch.randn(rows).to(torch.bfloat16)
            exact = given.double() @ weight.double().T
            found = int4_product(given, codes, None)
            assert (found.shape, found.dtype) == ((1, count, rows), torch.bfloat16)
            plain = nn.functional.linear(given, weight.to(torch.bfloat16))
            assert (found.double() - exact).norm() <= 1.5 * (plain.double() - exact).norm() + EPS / 2 * exact.norm()
            assert torch.equal(int4_product(given, codes, bias), found + bias)
        spread = given.repeat_interleave(2, -1)[..., ::2]  # rows may lie in memory in any way
        assert torch.equal(int4_product(spread, codes, None), found)


def test_other_weights_have_no_codes() -> None:
    weights = {
        "any": torch.randn(64, 128),
        "far from 0": torch.randn(64, 128) * 0.03 + 1,
        "5 bits": on_steps(64, 128, 31),
        "8 bits": on_steps(64, 128, 255),
        "some rows": torch.cat((on_steps(48, 128), torch.randn(16, 128).half())),
        "some columns": torch.cat((on_steps(64, 96), 0.01 * torch.randn(64, 32).half()), dim=1),
        "few rows": on_steps(8, 128),
        "width": on_steps(64, 128)[:, :72],
        "empty": on_steps(16, 64)[:0],
        "not a number": on_steps(16, 64).index_fill(1, torch.tensor(3), torch.nan),
        "sums too large": (torch.randint(0, 16, (16, 64)).float() - 8) * 2e37,
    }
    for name, weight in weights.items():
        assert find_codes(weight.to(torch.bfloat16).contiguous()) is None, name


def test_codes_of_another_weight_do_not_fit() -> None:
    weight = on_steps(64, 128).to(torch.bfloat16)
    codes = find_codes(weight)
    assert codes is not None
    others = (on_steps(64, 128).to(torch.bfloat16), weight + 0.01, weight[:48], weight[:, :64].contiguous())
    assert not any(fits_weight(codes, other) for other in others)


# In an engine -------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache. Small weights are packed, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    NotedKernels(monkeypatch)
    return tmp_path / "cache"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product by codes of 4 bits."""
    rows: list[int] = []

    def counted(kernel: products.Kernel) -> products.Kernel:
        def multiply(given: torch.Tensor, codes: Any, bias: torch.Tensor | None) -> torch.Tensor:
            rows.append(given.shape[:-1].numel())
            return int4_product(given, codes, bias)

        return replace(kernel, multiply=multiply) if kernel.name == "int4" else kernel

    monkeypatch.setattr(products, "KERNELS", tuple(map(counted, products.KERNELS)))
    return rows


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Weights in which codes were looked for."""
    weights: list[torch.Tensor] = []
    inner = int4.find_codes

    def counted(weight: torch.Tensor) -> Any:
        weights.append(weight)
        return inner(weight)

    monkeypatch.setattr(int4, "find_codes", counted)
    return weights


def written(folder: Path, kind: str = "Q4_1") -> Path:
    model = tiny.model("llama", hidden_size=64, intermediate_size=128, head_dim=16, initializer_range=0.1)
    return gguf_files.write(folder / "model.gguf", model, kind)


def opened(file: Path, **options: Any) -> BlendEngine:
    config = BlendConfig(prepack_weights=True, prompt_cache=0, **options)
    return BlendEngine.from_pretrained(file, device="cpu", dtype="bfloat16", config=config)


def kept(cache: Path) -> list[Path]:
    return sorted(cache.glob("cacheblend_rag/models/gguf/*/codes/*"))


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


def test_codes_are_found_once_and_anew_where_what_was_kept_is_damaged(
    tmp_path: Path, cache: Path, asked: list[int], searches: list[torch.Tensor]
) -> None:
    file = written(tmp_path)
    with opened(file) as engine:
        first = engine.generate(PROMPT, max_new_tokens=4).token_ids
    assert searches
    (path,) = kept(cache)
    for damage in ("none", "cut", "other weights", "a folder in its place"):
        if damage == "cut":
            path.write_bytes(path.read_bytes()[:-100])
        elif damage == "other weights":
            save_file({name: codes.flip(0).contiguous() for name, codes in load_file(path).items()}, path)
        elif damage != "none":
            path.unlink()
            path.mkdir()
        searches.clear()
        asked.clear()
        with opened(file) as engine:
            assert engine.generate(PROMPT, max_new_tokens=4).token_ids == first, damage
        assert asked, damage
        assert bool(searches) == (damage != "none"), damage


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
    known = products._by_model[engine.model]()
    assert known is not None
    copies = {forward.module: forward.copies for forward in known._forwards}
    codes = {module: one.forms["int4"] for module, one in copies.items() if one is not None}
    found = {module: one for module, one in codes.items() if one is not None}
    assert len(found) >= 7 * len(engine.model.model.layers)
    away = [0.0]
    for module, one in found.items():
        weight = module.weight.detach()
        ones = torch.eye(weight.shape[1], dtype=torch.bfloat16)
        rows = int4_product(ones, one, None).float().T
        away.append(float(((rows - weight.float()).norm(dim=1) / weight.float().norm(dim=1)).max()))
    return max(away)


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
