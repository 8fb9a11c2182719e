"""Prompts that hold images: the model's own processor, prefill and decoding, beside blended text."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from PIL import Image
from transformers import AutoProcessor

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.engine.scheduler import scheduler_of
from cacheblend_rag.errors import (
    ConfigError,
    ContextLengthError,
    GenerationError,
    ImageError,
    MissingExtraError,
    ModelLoadError,
    PromptError,
)
from cacheblend_rag.langchain import ChatCacheBlend
from cacheblend_rag.llama_index import CacheBlendLLM
from cacheblend_rag.prompt.images import ImageLimits
from tests import tiny
from tests.parity.test_families import THREE_CHUNKS, plain_tokens
from tests.pictures import MARKS, file_of, picture, taking_pictures
from tests.telemetry import STEPS, telling
from tests.waiting import until

WHY = "the prompt holds an image"
PNG = file_of(picture())
BASE64 = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{BASE64}"
CONFIG = BlendConfig(min_tokens=0, write_back="inline", recompute_ratio=1.0)
FORMS: dict[str, dict[str, Any]] = {
    "langchain": {"type": "image", "base64": BASE64, "mime_type": "image/png"},
    "langchain 0": {"type": "image", "source_type": "base64", "data": BASE64, "mime_type": "image/png"},
    "langchain url": {"type": "image", "url": URL},
    "openai": {"type": "image_url", "image_url": {"url": URL}},
    "openai, short": {"type": "image_url", "image_url": URL},
    "anthropic": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}},
}


def asked(block: dict[str, Any] = FORMS["openai"]) -> list[Any]:
    return [SystemMessage("Be brief."), HumanMessage([{"type": "text", "text": "What is this?"}, block])]


def plainly(container: str, model: Any, processor: Any, count: int = 8, **options: Any) -> tuple[list[int], list[int]]:
    """Transformers' results for `asked`: the ids of the prompt, and those of the answer."""
    text = f"system: Be brief.\nuser: What is this?{MARKS[container]}\nassistant:"
    inputs = processor(text=text, images=[[picture()]], return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=count, pad_token_id=2, **{"do_sample": False} | options)
    ids = inputs["input_ids"][0].tolist()
    return ids, out[0, len(ids) :].tolist()


def made(container: str = "llava", **fields: Any) -> ChatCacheBlend:
    model, tokenizer, processor = taking_pictures(container)
    return ChatCacheBlend.from_model(
        model, tokenizer, processor=processor, config=CONFIG, **{"max_new_tokens": 8} | fields
    )


@pytest.fixture(scope="module")
def llava() -> Iterator[ChatCacheBlend]:
    chat = made()
    yield chat
    chat.engine.close()


def own_attributes(model: Any) -> list[tuple[str, list[tuple[str, int]]]]:
    return [(name, sorted((key, id(it)) for key, it in vars(one).items())) for name, one in model.named_modules()]


@pytest.mark.parametrize("container", MARKS)
def test_image_is_answered_as_transformers_answers_it(container: str) -> None:
    chat = made(container, report_input_ids=True)
    engine, processor = chat.engine, taking_pictures(container)[2]
    prompt, expected = plainly(container, engine.model, processor)
    before = own_attributes(engine.model)  # transformers itself has left there what it does
    answer = chat.invoke(asked())
    info, text = answer.response_metadata, engine.tokenizer.decode(expected, skip_special_tokens=True)
    assert (info["input_ids"], answer.content) == (prompt, text)
    assert (info["plain"], info["plain_reason"], info["hits"], info["misses"]) == (True, WHY, 0, 0)
    assert answer.usage_metadata["input_tokens"] == len(prompt)
    assert answer.usage_metadata["output_tokens"] == len(expected)
    assert answer.usage_metadata["input_token_details"] == {"cache_read": 0, "cache_creation": 0}
    assert chat.get_num_tokens_from_messages(asked()) == len(prompt)
    assert "".join(piece.content for piece in chat.stream(asked())) == text
    assert own_attributes(engine.model) == before
    report = chat.last_report
    assert report is not None
    assert report.computed_tokens == (len(prompt),) * 4
    assert (report.work, report.recomputed_tokens, report.finish_reason) == (1.0, (0,) * 4, "length")
    assert 0 < report.seconds.split < report.ttft
    engine.flush()
    assert engine.store.volume() == 0
    engine.close()


def test_its_answer_is_a_span_with_its_tokens(llava: ChatCacheBlend) -> None:
    with telling() as told:
        usage = llava.invoke(asked()).usage_metadata
    (span,) = told.answers()
    said = span.attributes or {}
    assert (said["gen_ai.operation.name"], said["cacheblend.plain"]) == ("chat", True)
    assert said["gen_ai.usage.input_tokens"] == usage["input_tokens"]
    assert said["gen_ai.usage.output_tokens"] == usage["output_tokens"] == 8
    assert [one.name for one in told.below(span)] == STEPS
    assert len(told.points("gen_ai.server.time_to_first_token")) == 1


def tiny_twin(container: str) -> Any:
    return taking_pictures(container)[0]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_image_is_read(form: str, llava: ChatCacheBlend) -> None:
    assert llava.invoke(asked(FORMS[form])).content == llava.invoke(asked()).content
    other = file_of(picture(1))
    block = {"type": "image", "base64": base64.b64encode(other).decode(), "mime_type": "image/png"}
    assert llava.invoke(asked(block)).content != llava.invoke(asked()).content


async def test_conversation_goes_on_behind_an_image(llava: ChatCacheBlend) -> None:
    messages = [*asked(), AIMessage("Noise."), HumanMessage("Which colour?")]
    ids = taking_pictures("llava")[2](
        text="system: Be brief.\nuser: What is this?<image>\nassistant: Noise.\nuser: Which colour?\nassistant:",
        images=[[picture()]],
    )["input_ids"][0]
    answer = await llava.ainvoke(messages)
    assert answer.response_metadata["plain_reason"] == WHY
    assert answer.usage_metadata["input_tokens"] == len(ids)
    assert "".join([piece.content async for piece in llava.astream(messages)]) == answer.content
    text = llava.invoke([SystemMessage("Be brief."), HumanMessage("Which colour?")])
    assert text.response_metadata["plain_reason"] == ""


def test_options_act_as_for_text(llava: ChatCacheBlend) -> None:
    model, _, processor = taking_pictures("llava")
    torch.manual_seed(3)
    _, drawn = plainly("llava", model, processor, do_sample=True, temperature=1.5, top_k=0, top_p=1.0)
    decode = llava.engine.tokenizer.decode
    before = torch.get_rng_state()
    assert llava.invoke(asked(), temperature=1.5, top_k=0, top_p=1.0, seed=3).content == decode(
        drawn, skip_special_tokens=True
    )
    assert torch.equal(torch.get_rng_state(), before)
    whole = str(llava.invoke(asked(), max_tokens=20).content)
    stop = whole[4:6]
    cut = llava.invoke(asked(), max_tokens=20, stop=[stop])
    assert cut.content == whole[: whole.index(stop)]
    assert cut.response_metadata["finish_reason"] == "stop"
    assert llava.invoke(asked(), max_tokens=2).usage_metadata["output_tokens"] == 2
    with pytest.raises(ContextLengthError, match="context window is 2,048"):
        llava.invoke(asked(), max_tokens=2048)


@pytest.mark.parametrize("container", ["llava", "qwen2_vl"])
def test_images_and_blended_text_in_other_threads_do_not_disturb_each_other(container: str) -> None:
    chat = made(container, max_concurrent=3)
    engine = chat.engine
    engine.warm(THREE_CHUNKS.chunks)
    fused = engine.fuse(THREE_CHUNKS)
    text = plain_tokens(tiny_twin(container), list(fused.input_ids), 12)
    image = engine.image_prompt(
        [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, {"type": "image", "url": URL}]}]
    )
    given = dict(image.inputs)
    expected = engine.generate(image, max_new_tokens=12).token_ids
    assert all(image.inputs[name] is value for name, value in given.items())
    assert expected == plain_image_tokens(tiny_twin(container), image, 12)
    wrong: list[Any] = []

    def ask(prompt: Any, right: list[int]) -> None:
        for _ in range(4):
            found = engine.generate(prompt, max_new_tokens=12)
            if found.token_ids != right:
                wrong.append((prompt, found.token_ids))

    def ask_model() -> None:  # somebody who knows no engine
        for _ in range(4):
            if (found := plain_tokens(engine.model, list(fused.input_ids), 12)) != text:
                wrong.append(("model", found))

    jobs = [(THREE_CHUNKS, text), (image, expected), (THREE_CHUNKS, text), (image, expected)]
    threads = [threading.Thread(target=ask, args=job) for job in jobs] + [threading.Thread(target=ask_model)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not any("forward" in vars(module) for module in engine.model.modules())
    engine.close()


def plain_image_tokens(model: Any, prompt: Any, count: int) -> list[int]:
    out = model.generate(**prompt.inputs, max_new_tokens=count, do_sample=False, pad_token_id=2)
    return list(out[0, len(prompt.input_ids) :].tolist())


def test_answer_can_be_given_up_and_the_next_comes(llava: ChatCacheBlend) -> None:
    turns = [{"role": "user", "content": [{"type": "image", "url": URL}]}]
    prompt = llava.engine.image_prompt(turns)
    assert llava.engine.tokenize(prompt).input_ids == prompt.input_ids
    stream = llava.engine.stream(prompt, max_new_tokens=1500)
    next(stream)
    stream.close()
    scheduler, waiting = scheduler_of(llava.engine.model), llava.engine.stream(prompt, max_new_tokens=3)
    passes: list[Any] = []
    hook = llava.engine.model.register_forward_pre_hook(lambda *given: passes.append(given))
    with scheduler:
        waiting.begin()
        until(lambda: scheduler.waiting == 1)
        waiting.cancel()
    waiting.close()
    hook.remove()
    assert passes == []
    with pytest.raises(GenerationError, match="stopped before"):
        waiting.complete()
    pair = llava.engine.generate_batch([prompt, "What fell?"], max_new_tokens=3)
    assert [one.report.plain_reason for one in pair] == [WHY, ""]
    with pytest.raises(PromptError, match="is not fused: use generate or stream"):
        llava.engine.fuse(prompt)
    with pytest.raises(ContextLengthError):
        llava.engine.generate_batch([prompt], max_new_tokens=2048)


def test_the_processor_is_loaded_with_the_first_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, processor = taking_pictures("llava")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loads, load = [], AutoProcessor.from_pretrained
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda name, **more: loads.append(name) or load(name, **more))
    chat = ChatCacheBlend.from_model_id(str(tmp_path), config=CONFIG, device="cpu", dtype="float32", max_new_tokens=8)
    chat.invoke("What fell?")
    assert loads == []
    with pytest.raises(
        ModelLoadError,
        match=r"the processor of model '.*', which reads its images, could not be loaded: .*preprocessor_config",
    ):
        chat.invoke(asked())
    processor.save_pretrained(tmp_path)
    loads.clear()
    for _ in range(2):
        answer = chat.invoke(asked())
    assert answer.content == tokenizer.decode(plainly("llava", model, processor)[1], skip_special_tokens=True)
    assert chat.engine.with_config(recompute_ratio=0.5).takes_images
    assert loads == [str(tmp_path)]
    chat.engine.close()


def damaged() -> list[tuple[str, dict[str, Any], str]]:
    whole = file_of(picture(0, 90, 90))
    return [
        (
            "address",
            {"type": "image", "url": "https://x/y.png"},
            r"no image is fetched from an address: send its bytes",
        ),
        ("path", {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "no image is fetched"),
        ("id", {"type": "image", "file_id": "7"}, "no image is fetched"),
        ("not base64", {"type": "image", "mime_type": "image/png", "base64": "§§"}, "is not base64"),
        (
            "cut",
            {"type": "image", "mime_type": "image/png", "base64": base64.b64encode(whole[:300]).decode()},
            "cannot be read",
        ),
        (
            "no image",
            {"type": "image", "mime_type": "image/png", "base64": base64.b64encode(b"GIF, perhaps").decode()},
            "one of PNG, JPEG",
        ),
        ("empty", {"type": "image", "url": "data:image/png;base64,"}, "cannot be read"),
        (
            "program",
            {
                "type": "image",
                "mime_type": "image/png",
                "base64": base64.b64encode(b"%!PS-Adobe-3.0 EPSF-3.0").decode(),
            },
            "one of PNG",
        ),
    ]


@pytest.mark.parametrize(("block", "why"), [one[1:] for one in damaged()], ids=[one[0] for one in damaged()])
def test_images_that_cannot_be_used_are_refused(block: dict[str, Any], why: str, llava: ChatCacheBlend) -> None:
    with pytest.raises(ImageError, match=rf"^messages\[1\]: .*{why}") as caught:
        llava.invoke(asked(block))
    assert caught.value.message == 1


def test_images_have_limits(llava: ChatCacheBlend, monkeypatch: pytest.MonkeyPatch) -> None:
    block = {"type": "image", "url": URL}
    turns = [{"role": "user", "content": "Look."}, {"role": "user", "content": [block, block]}]
    llava.engine.image_prompt(turns, limits=ImageLimits(images=2, pixels=4000))
    with pytest.raises(ImageError, match=r"^messages\[1\]: a conversation may have 1 images: send fewer"):
        llava.engine.image_prompt(turns, limits=ImageLimits(images=1, pixels=4000))
    with pytest.raises(ImageError, match="may have 3,999 pixels together: send smaller ones"):
        llava.engine.image_prompt(turns, limits=ImageLimits(images=2, pixels=3999))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 900)
    with pytest.raises(ImageError, match="too many pixels: send a smaller one"):
        llava.engine.image_prompt(turns)


def test_image_is_turned_upright(llava: ChatCacheBlend) -> None:
    lying, exif = picture(0, 60, 30), Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    file = io.BytesIO()
    lying.save(file, "PNG", exif=exif)
    found, expected = (
        llava.engine.image_prompt([{"role": "user", "content": [{"type": "image", "bytes": data}]}])
        for data in (file.getvalue(), file_of(lying.transpose(Image.Transpose.ROTATE_270)))
    )
    assert torch.equal(found.inputs["pixel_values"], expected.inputs["pixel_values"])


def test_conversation_that_the_processor_cannot_use_is_refused(llava: ChatCacheBlend) -> None:
    with pytest.raises(PromptError, match=r"messages\[1\]: its text holds '<image>', which stands for an image"):
        llava.invoke([*asked()[:1], HumanMessage([FORMS["openai"], {"type": "text", "text": "a <image> b"}])])
    with pytest.raises(PromptError, match="block of type 'audio', which is not read here"):
        llava.invoke([HumanMessage([FORMS["openai"], {"type": "audio", "base64": "QUJD"}])])
    thin = {"type": "image", "bytes": file_of(picture(0, 300, 1))}
    engine, images = made("qwen2_vl").engine, [{"role": "user", "content": [thin]}]
    with pytest.raises(PromptError, match="the model's processor cannot use this conversation: absolute aspect ratio"):
        engine.image_prompt(images)
    with pytest.raises(PromptError, match="chat template leaves images out"):
        engine.image_prompt([{"role": "user", "content": [FORMS["langchain"]]}], options={"chat_template": "Look."})
    engine.close()


def test_objects_need_a_processor_and_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, processor = taking_pictures("llava")
    turns = [{"role": "user", "content": [{"type": "image", "url": URL}]}]
    with BlendEngine(model, tokenizer) as engine, pytest.raises(ConfigError, match="give processor=AutoProcessor"):
        engine.image_prompt(turns)
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with (
        BlendEngine(model, tokenizer, processor=processor) as engine,
        pytest.raises(MissingExtraError, match=r"cacheblend-rag\[images\]"),
    ):
        engine.image_prompt(turns)


def test_text_model_refuses_images() -> None:
    tokenizer = taking_pictures("llava")[1]
    chat = ChatCacheBlend.from_model(tiny.model("llama"), tokenizer, config=CONFIG)
    with pytest.raises(PromptError, match="block of type 'image_url', which is not read here: leave the block out"):
        chat.invoke(asked())
    chat.engine.close()


async def test_llama_index_takes_image_blocks(llava: ChatCacheBlend, tmp_path: Path) -> None:
    llm = CacheBlendLLM.from_engine(llava.engine, max_new_tokens=8)
    expected = llava.invoke(asked()).content
    (tmp_path / "x.png").write_bytes(PNG)

    def said(block: ImageBlock) -> list[ChatMessage]:
        words = TextBlock(text="What is this?")
        return [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", blocks=[words, block])]

    blocks = [ImageBlock(image=PNG), ImageBlock(image=io.BytesIO(PNG)), ImageBlock(path=tmp_path / "x.png")]
    for block in [*blocks, ImageBlock(url=URL)]:
        response = llm.chat(said(block))
        assert response.message.content == expected
        assert response.raw["plain_reason"] == WHY
    assert "".join(piece.delta for piece in llm.stream_chat(said(blocks[0]))) == expected
    assert (await llm.achat(said(blocks[0]))).message.content == expected
    with pytest.raises(ImageError, match="no image is fetched from an address"):
        llm.chat(said(ImageBlock(url="https://x/y.png")))
    assert (
        CacheBlendLLM.from_model(*taking_pictures("llava")[:2], processor=taking_pictures("llava")[2], max_new_tokens=8)
        .chat(said(blocks[0]))
        .message.content
        == expected
    )
