"""The OpenAI client and LangChain's ChatOpenAI, unmodified, against a server on a socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from langchain_openai import ChatOpenAI

from tests import tiny
from tests.app.server.common import (
    Running,
    client_of,
    new_collection,
    passage,
    process_logits,
    running,
    settings_for,
    upload,
)
from tests.integrations.langchain.models import TEMPLATE, Script

TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Look a leaf up.", "parameters": {"type": "object"}},
}
KEY = "sk-none-needed-here"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model whose chat template takes tools."""
    folder = tmp_path_factory.mktemp("chat")
    tiny.model(num_hidden_layers=2, max_position_embeddings=2048).save_pretrained(folder)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chatty(chat_model: Path, docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server over it."""
    with running(settings_for(chat_model, docs, tmp_path_factory.mktemp("data"))) as made:
        yield made


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture
def chat(chatty: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=chatty.url + "/v1", api_key=KEY, max_retries=0) as made:
        yield made


def name_of(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    names = [one.id for one in client.models.list()]
    assert len(names) == 2
    assert client.models.retrieve(names[0]).id == names[0]
    with pytest.raises(openai.NotFoundError, match="no such model"):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError, match="use "):
        client.completions.create(model="gpt-9", prompt="the")


def test_a_prompt_is_not_split_at_separators(client: openai.OpenAI) -> None:
    prompt = " # # ".join(["Read this.", passage(102), "Which # # leaf fell?"])
    for _ in range(2):
        answer = client.completions.create(model=name_of(client), prompt=prompt, max_tokens=2)
        told = answer.model_extra["cacheblend"][0]
        assert (told["hits"], told["misses"]) == (0, 0)


def test_completions_reuse_their_documents(client: openai.OpenAI, server: Running) -> None:
    documents, prompt = {"documents": [passage(100), passage(101)]}, "Which leaf fell?"
    first = client.completions.create(model=name_of(client), prompt=prompt, max_tokens=5, extra_body=documents)
    server.service.engine.flush()
    second = client.completions.create(model=name_of(client), prompt=prompt, max_tokens=5, extra_body=documents)
    assert second.usage.prompt_tokens == first.usage.prompt_tokens
    assert second.usage.completion_tokens <= 5
    assert second.choices[0].finish_reason in ("stop", "length")
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert 0 < second.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens
    assert second.model_extra["cacheblend"][0]["hits"] == 2


def test_documents_of_the_body_are_chunks_too(client: openai.OpenAI, server: Running) -> None:
    documents = [passage(110), {"title": "Passage", "text": passage(111)}]
    for misses in (2, 0):
        answer = client.completions.create(
            model=name_of(client), prompt="\nWhich leaf?", max_tokens=4, extra_body={"documents": documents}
        )
        assert answer.model_extra["cacheblend"][0]["misses"] == misses
        server.service.engine.flush()


def test_what_does_not_fit_the_window_is_refused_as_openai_does(chat: openai.OpenAI) -> None:
    name = name_of(chat)  # its window is 2,048
    for asked in (
        lambda: chat.completions.create(model=name, prompt="oak " * 3000),
        lambda: chat.completions.create(model=name, prompt="oak", max_tokens=2048),
        lambda: chat.chat.completions.create(model=name, messages=[{"role": "user", "content": "oak " * 3000}]),
    ):
        with pytest.raises(openai.BadRequestError, match="context window is 2,048") as caught:
            asked()
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.type == "invalid_request_error"


def test_a_server_leaves_chunks_out_if_it_is_told_to(model: Path, docs: Path, tmp_path: Path) -> None:
    settings = settings_for(model, docs, tmp_path, overflow="drop_chunks")
    documents = {"documents": [passage(900 + number, words=300) for number in range(60)]}
    with running(settings) as server, openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client:
        answer = client.completions.create(
            model=name_of(client), prompt="\nWhich leaf?", max_tokens=4, extra_body=documents
        )
        (told,) = answer.model_extra["cacheblend"]
        assert told["left_out"] == list(range(told["misses"], 60)) != []
        assert answer.usage.prompt_tokens + 4 <= server.service.engine.context_window == 8192


def test_a_stream_is_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    name = name_of(client)
    whole = client.completions.create(model=name, prompt=passage(120), max_tokens=8)
    chunks = list(
        client.completions.create(
            model=name, prompt=passage(120), max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(one.choices[0].text for one in chunks if one.choices) == whole.choices[0].text
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert [one.choices[0].finish_reason for one in chunks if one.choices][-1] == whole.choices[0].finish_reason


def test_sampling_stop_and_several_prompts(client: openai.OpenAI) -> None:
    name = name_of(client)
    hot = {"temperature": 1.5, "top_p": 0.95, "max_tokens": 8}
    first, again, other = (
        client.completions.create(model=name, prompt="the quick", seed=seed, **hot).choices[0].text
        for seed in (1, 1, 2)
    )
    assert first == again != other
    wide = [
        client.completions.create(model=name, prompt="the quick", seed=seed, top_p=0.99, max_tokens=8).choices[0].text
        for seed in (1, 1, 2, 3)
    ]
    assert wide[0] == wide[1]
    assert len(set(wide)) > 1, "who gives top_p alone wants sampling"
    plain = client.completions.create(model=name, prompt=["the old oak", "a lazy dog"], max_tokens=8)
    assert [one.index for one in plain.choices] == [0, 1]
    text = plain.choices[0].text
    stopped = client.completions.create(model=name, prompt="the old oak", max_tokens=8, stop=[text[2:4]])
    assert stopped.choices[0].text == text[: text.index(text[2:4])]
    assert stopped.choices[0].finish_reason == "stop"


def test_a_conversation_with_documents(chat: openai.OpenAI, chatty: Running) -> None:
    name = name_of(chat)
    messages = [{"role": "user", "content": "Which leaf fell?"}]
    body = {"documents": [passage(130), passage(131)]}
    for hits in (0, 2):
        answer = chat.chat.completions.create(model=name, messages=messages, max_tokens=6, extra_body=body)
        assert answer.model_extra["cacheblend"][0]["hits"] == hits
        chatty.service.engine.flush()
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
    chunks = list(
        chat.chat.completions.create(
            model=name, messages=messages, max_completion_tokens=6, extra_body=body, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


def test_documents_of_a_collection_are_noticed_in_conversations(server: Running, client: openai.OpenAI) -> None:
    with client_of(server) as http:
        upload(http, new_collection(http), {"known.txt": passage(140)})
    messages = [{"role": "user", "content": f"Read:\n\n{passage(140).strip()}\n\nWhich leaf fell?"}]
    answer = client.chat.completions.create(model=name_of(client), messages=messages, max_tokens=4)
    assert answer.model_extra["cacheblend"][0]["hits"] == 1


def test_a_model_without_template_gets_plain_roles(client: openai.OpenAI) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Which leaf"}, {"type": "text", "text": " fell?"}]},
    ]
    name = name_of(client)
    answer = client.chat.completions.create(model=name, messages=messages, max_tokens=6)
    plain = "System: Be brief.\nHuman: Which leaf fell?\nAI:"
    same = client.completions.create(model=name, prompt=plain, max_tokens=6)
    assert answer.choices[0].message.content == same.choices[0].text
    assert answer.usage.prompt_tokens == same.usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(chat: openai.OpenAI, chatty: Running, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said = 'Let me see. <tool_call>{"name": "look_up", "arguments": {"leaf": "red"}}</tool_call>'
    script = Script(chatty.service.engine.tokenizer, lambda prompt: None if "[tool]" in prompt else said)
    process_logits(monkeypatch, script)
    messages: list[Any] = [{"role": "user", "content": "Which leaf fell?"}]
    name = name_of(chat)
    made = chat.chat.completions.create(model=name, messages=messages, tools=[TOOL], max_tokens=90, stream=stream)
    if stream:
        deltas = [one.choices[0] for one in made]
        assert "".join(one.delta.content or "" for one in deltas) == "Let me see."
        (call,) = [call for one in deltas for call in one.delta.tool_calls or []]
        reason = deltas[-1].finish_reason
    else:
        message = made.choices[0].message
        assert message.content == "Let me see."
        (call,) = message.tool_calls
        reason = made.choices[0].finish_reason
    assert (call.function.name, call.function.arguments) == ("look_up", '{"leaf": "red"}')
    assert reason == "tool_calls"
    asked = {"id": call.id, "type": "function", "function": {"name": "look_up", "arguments": '{"leaf": "red"}'}}
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": call.id, "content": "It is red."},
    ]
    after = chat.chat.completions.create(model=name, messages=messages, tools=[TOOL], max_tokens=4)
    assert after.choices[0].message.tool_calls is None


def test_what_cannot_be_done_is_refused(client: openai.OpenAI, chat: openai.OpenAI) -> None:
    name, messages = name_of(client), [{"role": "user", "content": "Which?"}]
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(model=name, messages=messages, tools=[TOOL])
    with pytest.raises(openai.BadRequestError, match="4,000 more are for the answer"):
        chat.chat.completions.create(model=name_of(chat), messages=messages, max_tokens=4_000)
    for more in ({"n": 2}, {"presence_penalty": 1.0}, {"logprobs": True}, {"temperature": -1}):
        with pytest.raises(openai.UnprocessableEntityError, match=next(iter(more))):
            client.chat.completions.create(model=name, messages=messages, **more)
    picture = [{"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}]
    with pytest.raises(openai.UnprocessableEntityError):
        client.chat.completions.create(model=name, messages=[{"role": "user", "content": picture}])


def test_embeddings_in_both_forms(client: openai.OpenAI, server: Running) -> None:
    name = [one.id for one in client.models.list()][1]
    texts = ["the quick brown fox", "an old oak"]
    packed = client.embeddings.create(model=name, input=texts)
    plain = client.embeddings.create(model=name, input=texts, encoding_format="float")
    assert packed.usage.prompt_tokens > 0
    own = server.service.embeddings.embed_documents(texts)
    for one, two, three in zip(packed.data, plain.data, own, strict=True):
        np.testing.assert_allclose(one.embedding, two.embedding, rtol=1e-6)
        np.testing.assert_allclose(one.embedding, three, rtol=1e-5, atol=1e-7)


async def test_langchains_chat_openai(chatty: Running, chat: openai.OpenAI) -> None:
    llm = ChatOpenAI(base_url=chatty.url + "/v1", api_key=KEY, model=name_of(chat), max_tokens=6, max_retries=0)
    whole = llm.invoke("Which leaf fell?")
    assert whole.usage_metadata["output_tokens"] <= 6
    chunks = list(llm.stream("Which leaf fell?", stream_usage=True))
    assert "".join(str(one.content) for one in chunks) == whole.content
    assert (
        sum((one.usage_metadata or {}).get("total_tokens", 0) for one in chunks) == whole.usage_metadata["total_tokens"]
    )
    stop = str(whole.content)[1:3]
    stopped = await llm.ainvoke("Which leaf fell?", stop=[stop])
    assert stopped.content == str(whole.content)[: str(whole.content).index(stop)]
    assert stopped.response_metadata["finish_reason"] == "stop"
