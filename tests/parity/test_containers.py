"""Models that take more than text: loaded whole, they answer text as their own forward pass does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.messages import HumanMessage, SystemMessage

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.errors import PromptError, UnsupportedModelError
from cacheblend_rag.langchain import ChatCacheBlend
from cacheblend_rag.langchain.messages import turns_of
from cacheblend_rag.models import families
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.identity import fingerprint
from cacheblend_rag.models.loading import KVGeometry, load_geometry, load_model
from cacheblend_rag.prompt.chat import render_turns
from tests import tiny
from tests.pairwise import others_slow
from tests.parity.test_families import THREE_CHUNKS, assert_equals_plain, check_exact, engine_of, plain_tokens
from tests.tolerance import assert_logits_close

# Whose positions depend on images: what the last ones did to them is kept on the model.
MOVED = ("glm46v", "glm4v", "glm4v_moe", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe")
# Reads lists of blocks and passes over a text, as those of SmolVLM and LLaVA do.
OF_BLOCKS = (
    "{% for m in messages %}{{ m.role }}:{% for block in m.content %}"
    "{% if block.type == 'text' %} {{ block.text }}{% endif %}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def save(container: str, folder: Path) -> Any:
    model = tiny.model(container)
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return model


@pytest.mark.parametrize("container", others_slow(list(tiny.CONTAINERS), ("gemma3", "qwen3_vl", "llava")))
def test_container_is_loaded_whole_by_its_folder(container: str, tmp_path: Path) -> None:
    model = save(container, tmp_path)
    assert load_geometry(tmp_path)[0] == KVGeometry(4, 2, 8, "float32")
    with BlendEngine.from_pretrained(
        tmp_path, config=BlendConfig(min_tokens=0, recompute_ratio=1.0), device="cpu"
    ) as engine:
        assert type(engine.model) is type(model)
        assert engine.fingerprint == fingerprint(model)
        engine.warm(THREE_CHUNKS.chunks)
        fused = engine.fuse(THREE_CHUNKS)
        assert fused.report.hits == 3
        assert_equals_plain(fused, model)
        assert engine.context_window == 2048


def test_the_element_type_of_a_container_is_that_of_all_of_it(tmp_path: Path) -> None:
    save("gemma3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for part in (config, config["text_config"], config["vision_config"]):
        part.pop("dtype", None)
    config["dtype"] = "float16"  # as checkpoints say it
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_geometry(tmp_path, "auto")[0].dtype in ("float16", "float32")
    assert load_model(tmp_path, device="cpu", dtype="bfloat16").model.get_decoder().dtype == torch.bfloat16


def test_identity_covers_the_text_weights() -> None:
    model = tiny.model("qwen3_vl")
    before = fingerprint(model)
    model.set_attn_implementation("eager")
    assert fingerprint(model) == before
    with torch.no_grad():
        model.get_decoder().layers[2].mlp.up_proj.weight[3, 5] += 1e-3
    assert fingerprint(model) != before


def of_image(model: Any) -> list[int]:
    """The model's own answer to a picture."""
    vision, image = model.config.vision_config, model.config.image_token_id
    ids = torch.tensor([[5, 6, 7, *[image] * 4, 8, 9, 10]])
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == image).int(),
        pixel_values=torch.linspace(-1, 1, 16 * width).view(16, width),
        image_grid_thw=torch.tensor([[1, 4, 4]]),
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
    )
    return list(out[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize("container", others_slow(MOVED, ("qwen2_5_vl",)))
def test_images_and_blended_text_do_not_disturb_each_other(container: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_rag.models.adapter._SLICE", 20)
    model, fresh = tiny.model(container), tiny.model(container)
    seen = of_image(model)
    moved = model.model.rope_deltas
    assert moved.item() == -2, "four tokens of an image stand in two positions"
    with engine_of(model, recompute_ratio=1.0) as engine:
        engine.warm(THREE_CHUNKS.chunks)
        fused = engine.fuse(THREE_CHUNKS)
        assert_equals_plain(fused, fresh)
        sliced = ModelAdapter(model).prefill(fused.input_ids, lambda seconds, done: None)
        assert_logits_close(sliced.logits, fused.logits, model, len(fused.input_ids))
        for several in (1, 3):
            found = engine.with_config(max_concurrent=several).generate(THREE_CHUNKS, max_new_tokens=8)
            assert found.token_ids == plain_tokens(tiny.model(container), fused.input_ids, 8)
    assert model.model.rope_deltas is moved
    assert of_image(model) == seen


def test_container_without_a_test_is_refused_and_can_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("llava")
    model.config.model_type = "llavalike"
    with pytest.raises(UnsupportedModelError, match=r"'llavalike' .* no test covers this container; .* like=\"llama\""):
        ModelAdapter(model)
    monkeypatch.setattr(families, "_registered", {})
    families.register_family("llavalike", like="llama")
    with engine_of(model) as engine:
        assert_equals_plain(engine.fuse(THREE_CHUNKS), model)


def test_tied_weights_of_a_container() -> None:
    model = tiny.model("mistral3", tie_word_embeddings=True)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    check_exact(model)


def test_container_answers_a_chat_by_the_template_of_its_processor(tmp_path: Path) -> None:
    save("smolvlm", tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": OF_BLOCKS}))
    chat = ChatCacheBlend.from_model_id(str(tmp_path), config=BlendConfig(min_tokens=0), device="cpu", max_new_tokens=3)
    said = [SystemMessage("Read this."), HumanMessage("What fell?")]
    assert render_turns(chat.engine.tokenizer, turns_of(said)) == "system: Read this.\nuser: What fell?\nassistant:"
    assert chat.invoke(said).usage_metadata["output_tokens"] >= 1
    sound = {"type": "audio", "url": "x"}
    with pytest.raises(PromptError, match=r"type 'audio', which is not read here: leave the block out"):
        chat.invoke([HumanMessage([{"type": "text", "text": "What is this?"}, sound])])
    chat.engine.close()
