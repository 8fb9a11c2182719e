"""Images sent to a server by OpenAI's client: answered by a model that takes them, refused where they cannot be."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI

from cacheblend_rag.app.server.settings import Limits
from tests.app.server.common import Running, passage, running, settings_for
from tests.pictures import file_of, picture, taking_pictures

KEY = "sk-none-needed-here"


@pytest.fixture(scope="module")
def seeing(docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server over a model that takes images."""
    folder = tmp_path_factory.mktemp("seeing")
    for part in taking_pictures("llava"):
        part.save_pretrained(folder)
    limits = Limits(images=2, image_pixels=10_000)
    with running(settings_for(folder, docs, tmp_path_factory.mktemp("data"), limits=limits)) as made:
        yield made


@pytest.fixture(scope="module")
def client(seeing: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=seeing.url + "/v1", api_key=KEY, max_retries=0) as made:
        yield made


def part(data: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def shown(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    first = {"role": "user", "content": "Look."}
    return [first, {"role": "user", "content": [{"type": "text", "text": "What is this?"}, *parts]}]


def ask(client: openai.OpenAI, messages: list[dict[str, Any]], **more: Any) -> Any:
    name = client.models.list().data[0].id
    return client.chat.completions.create(model=name, messages=messages, max_tokens=6, **more)  # type: ignore[call-overload]


def expected_answer() -> str:
    model, tokenizer, processor = taking_pictures("llava")
    text = "user: Look.\nuser: What is this?<image>\nassistant:"
    inputs = processor(text=text, images=[[picture()]], return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=2)
    return str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_image_is_answered(client: openai.OpenAI, seeing: Running) -> None:
    messages, expected = shown(part(file_of(picture()))), expected_answer()
    answer = ask(client, messages)
    assert answer.choices[0].message.content == expected
    (told,) = answer.model_extra["cacheblend"]
    assert (told["plain"], told["plain_reason"]) == (True, "the prompt holds an image")
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    stream = ask(client, messages, stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in stream) == expected
    model = ChatOpenAI(base_url=seeing.url + "/v1", api_key=KEY, model=client.models.list().data[0].id, max_tokens=6)
    assert model.invoke(messages).content == expected
    beside = ask(client, messages, extra_body={"documents": [passage(200)]})
    assert beside.usage.prompt_tokens > answer.usage.prompt_tokens + 60
    assert len(ask(client, messages, n=2, seed=1).choices) == 2
    (text,) = ask(client, shown()).model_extra["cacheblend"]
    assert text["plain_reason"] == ""


def bomb(width: int, height: int) -> bytes:
    """A small file of very many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * ((width // 8 + 1) * 100))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("documents", [[], ["Passage 1 of a fern."]], ids=["alone", "with documents"])
@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}], "no image is fetched"),
        ([{"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}], "send its bytes"),
        ([part(file_of(picture(0, 90, 90))[:400])], "cannot be read"),
        ([part(b"")], "cannot be read"),
        ([part(file_of(picture(0, 101, 100)))], "may have 10,000 pixels together"),
        ([part(file_of(picture(0, 80, 80)))] * 2, "may have 10,000 pixels together"),
        ([part(bomb(50_000, 50_000))], "pixels"),
        ([part(file_of(picture(0, 9, 9)))] * 3, "may have 2 images"),
    ],
    ids=["http", "https", "cut", "empty", "large", "large together", "bomb", "many"],
)
def test_unusable_image_is_named(parts: list[Any], why: str, documents: list[str], client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=why) as caught:
        ask(client, shown(*parts), extra_body={"documents": documents})
    assert (caught.value.param, caught.value.code) == ("messages.1", "bad_image")
    assert "messages.1" in str(caught.value)


def test_text_model_refuses_images(chatty: Running) -> None:
    with (
        openai.OpenAI(base_url=chatty.url + "/v1", api_key=KEY, max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="block of type 'image_url', which is not read here"),
    ):
        ask(client, shown(part(file_of(picture()))))
