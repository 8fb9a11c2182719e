"""The OpenAI client and LangChain's ChatOpenAI, unmodified, against a server on a socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from tests.app.server.common import (
    NO_CALLS,
    Running,
    client_of,
    drop_last_prompts,
    passage,
    process_logits,
    put_together,
    settle,
    upload,
)
from tests.integrations.langchain.models import Script

TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Look a leaf up.", "parameters": {"type": "object"}},
}
KEY = "sk-none-needed-here"


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


def test_models_are_listed_and_found(client: openai.OpenAI, server: Running) -> None:
    names = [one.id for one in client.models.list()]
    assert len(names) == 1, "clients offer each of them for a chat"
    assert client.models.retrieve(names[0]).id == names[0]
    assert client.models.retrieve(server.service.embedder_name).id == server.service.embedder_name
    with pytest.raises(openai.NotFoundError, match="no such model"):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError, match="use "):
        client.completions.create(model="gpt-9", prompt="the")


def test_completions_reuse_their_documents(client: openai.OpenAI, server: Running) -> None:
    documents, prompt = {"documents": [passage(100), {"title": "Passage", "text": passage(101)}]}, "\nWhich?"
    first = client.completions.create(model=name_of(client), prompt=prompt, max_tokens=5, extra_body=documents)
    server.service.engine.flush()
    second = client.completions.create(model=name_of(client), prompt=prompt, max_tokens=5, extra_body=documents)
    assert second.usage.prompt_tokens == first.usage.prompt_tokens
    assert second.usage.completion_tokens <= 5
    assert second.choices[0].finish_reason in ("stop", "length")
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert 0 < second.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.blended_tokens == 0, "the prompt goes on from the kept one, exactly"
    assert second.model_extra["cacheblend"][0]["hits"] == 2
    documents["documents"].reverse()
    third = client.completions.create(model=name_of(client), prompt=prompt, max_tokens=5, extra_body=documents)
    assert third.usage.prompt_tokens_details.cached_tokens == 0 < third.usage.prompt_tokens_details.blended_tokens


def test_too_long_prompt_is_refused_as_openai_does(chat: openai.OpenAI) -> None:
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


def test_stream_is_the_same_text_in_pieces(client: openai.OpenAI) -> None:
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
    for alone in ({"top_p": 0.99}, {"extra_body": {"top_k": 20}}):  # who gives one of them alone wants sampling
        drawn = [client.completions.create(model=name, prompt="the quick", seed=seed, **alone) for seed in range(4)]
        assert len({one.choices[0].text for one in drawn}) > 1, alone
    plain = client.completions.create(model=name, prompt=["the old oak", "a lazy dog"], max_tokens=8)
    assert [one.index for one in plain.choices] == [0, 1]
    text = plain.choices[0].text
    stopped = client.completions.create(model=name, prompt="the old oak", max_tokens=8, stop=[text[2:4]])
    assert stopped.choices[0].text == text[: text.index(text[2:4])]
    assert stopped.choices[0].finish_reason == "stop"


def test_conversation_reuses_the_kv_of_its_documents(chat: openai.OpenAI, chatty: Running) -> None:
    name = name_of(chat)
    messages = [{"role": "user", "content": "Which leaf fell?"}]
    body = {"documents": [passage(130), passage(131)]}
    for hits in (0, 2):
        answer = chat.chat.completions.create(model=name, messages=messages, max_tokens=6, extra_body=body)
        assert answer.model_extra["cacheblend"][0]["hits"] == hits
        chatty.service.engine.flush()
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
    more = {"max_completion_tokens": 6, "stream": True, "stream_options": {"include_usage": True}, "extra_body": body}
    chunks = list(chat.chat.completions.create(model=name, messages=messages, **more))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    drop_last_prompts(chatty.service)
    documents = [passage(400 + number) for number in range(15)]
    more["extra_body"] = {"documents": documents, "return_progress": True, "verify": "held"}
    chunks = list(chat.chat.completions.create(model=name, messages=messages, **more))
    told = [one.model_extra["prompt_progress"] for one in chunks if "prompt_progress" in (one.model_extra or {})]
    assert [one["processed"] for one in told] == sorted({one["processed"] for one in told})
    assert {one["total"] for one in told} == {chunks[-1].usage.prompt_tokens} == {told[-1]["processed"]}
    assert (told[0]["processed"], len(told) > 2) == (told[0]["cache"], True), "of what is read in slices, each is told"


def test_correction_reaches_the_client(chat: openai.OpenAI, chatty: Running) -> None:
    """By reuse alone a tiny random model says other words than by full prefill."""
    name = name_of(chat)
    asked: dict[str, Any] = {"model": name, "messages": [{"role": "user", "content": "Which leaf fell?"}]}
    body = {"documents": [passage(132), passage(133)], "selection": "none"}
    chat.chat.completions.create(**asked, max_tokens=1, extra_body=body)
    chatty.service.engine.flush()

    def said(**more: Any) -> Any:
        drop_last_prompts(chatty.service)
        return chat.chat.completions.create(**asked, max_tokens=12, extra_body=body | more)

    draft, full = said(), said(selection="all")
    found, ended = said(verify="always"), said(verify="off")
    assert found.choices[0].message.content == full.choices[0].message.content != draft.choices[0].message.content
    assert found.model_extra["cacheblend"][0]["verification"]["status"] == "corrected"
    assert ended.model_extra["cacheblend"][0]["verification"]["status"] == "off"
    drop_last_prompts(chatty.service)
    chunks = list(
        chat.chat.completions.create(**asked, max_tokens=12, extra_body={**body, "verify": "always"}, stream=True)
    )
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert text == draft.choices[0].message.content
    assert [one.model_extra["cacheblend"][0]["fidelity"] for one in (found, ended)] == ["corrected", "approximate"]
    assert [one.choices[0].fidelity for one in chunks if one.choices and one.choices[0].finish_reason] == ["corrected"]
    (told,) = [one.model_extra["correction"] for one in chunks if "correction" in (one.model_extra or {})]
    assert told["index"] == 0
    assert text[: told["position"]] + told["after"] == full.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="verify"):
        said(verify="sometimes")
    with client_of(chatty) as http:
        assert 'verifications_total{status="corrected"}' in http.get("/metrics").text


def test_documents_of_a_collection_are_noticed_in_conversations(server: Running, client: openai.OpenAI) -> None:
    with client_of(server) as http:
        upload(http, {"known.txt": passage(140)})
    settle(server.service)
    messages = [{"role": "user", "content": f"Read:\n\n{passage(140).strip()}\n\nWhich leaf fell?"}]
    answer = client.chat.completions.create(model=name_of(client), messages=messages, max_tokens=4)
    assert answer.model_extra["cacheblend"][0]["hits"] == 1


def test_model_without_template_gets_plain_roles(client: openai.OpenAI) -> None:
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


def test_call_that_cannot_be_read_is_told_as_it_was_written(
    chat: openai.OpenAI, chatty: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As OpenAI does: its clients look at the arguments before they call."""
    tokenizer, reason = chatty.service.engine.tokenizer, "length"
    said = '<tool_call>\n{"name": "look_up", "arguments": {"leaf": "re'
    process_logits(monkeypatch, Script(tokenizer, lambda prompt: said))
    cut = len(tokenizer.encode(said, add_special_tokens=False))
    asked: dict[str, Any] = {"model": name_of(chat), "messages": [{"role": "user", "content": "Which?"}]}
    asked |= {"tools": [TOOL], "max_tokens": cut}
    choice = chat.chat.completions.create(**asked).choices[0]
    deltas = [one.choices[0] for one in chat.chat.completions.create(**asked, stream=True)]
    calls = [*choice.message.tool_calls, put_together([call for one in deltas for call in one.delta.tool_calls or []])]
    for call in calls:
        assert call.function.name == "look_up"
        with pytest.raises(ValueError, match=r"Expecting|Unterminated|Extra data"):
            json.loads(call.function.arguments)
    assert (choice.message.content, choice.finish_reason) == (None, reason)
    assert deltas[-1].finish_reason == reason
    assert not any(one.delta.content for one in deltas)
    ended = {"role": "tool", "tool_call_id": calls[0].id, "content": "That is no JSON."}
    asked["messages"] += [choice.message.model_dump(), ended]
    assert chat.chat.completions.create(**asked).usage.prompt_tokens > 20, "the conversation goes on"


def test_earlier_answer_may_hold_what_says_nothing_and_what_cannot_be_read_names_its_place(
    chat: openai.OpenAI, chatty: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = {"name": "look_up", "arguments": "{}"}
    nothing = {"parsed": {"leaf": "red"}, "refusal": None, "annotations": [{"type": "url_citation"}], "audio": None}
    nothing |= {"provider_specific_fields": {"refusal": None}, "thinking_blocks": [], "images": []}  # LiteLLM's
    parts = [{"type": "text", "text": "Which?", "cache_control": {"type": "ephemeral"}}]
    for id, arguments in (("1", "{}"), ("1", ""), ("1", " "), ("1", "null"), (None, "{}")):
        call = {"id": id, "type": "function", "function": {**function, "arguments": arguments, "parsed_arguments": {}}}
        call |= {"index": 0, "provider_specific_fields": {}, "extra_content": {"google": {"thought_signature": "x"}}}
        said = [{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": [call], **nothing}]
        said.append({"role": "tool", "content": "Red.", "tool_call_id": "1"})
        asked: dict[str, Any] = {"model": name_of(chat), "messages": said, "max_tokens": 2}
        assert chat.chat.completions.create(**asked).usage.prompt_tokens == 102
    refusal = {"role": "assistant", "content": None, "refusal": "I will not."}
    answer = chat.chat.completions.create(**{**asked, "messages": [said[0], refusal, said[0]]})
    assert answer.usage.prompt_tokens > 30
    with pytest.raises(openai.BadRequestError, match=r"messages\[2\].tool_call_id"):
        chat.chat.completions.create(**{**asked, "messages": [*said[:2], {"role": "tool", "content": "Red."}]})
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | items | list }}{% endfor %}"
    )
    monkeypatch.setattr(chatty.service.engine.tokenizer, "chat_template", template + "{{ m.content }}{% endfor %}")
    call["function"]["arguments"] = '{"leaf": "re'
    with pytest.raises(openai.BadRequestError, match="send a JSON object") as caught:
        chat.chat.completions.create(**asked)
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"


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
        call = put_together([call for one in deltas for call in one.delta.tool_calls or []])
        reason = deltas[-1].finish_reason
    else:
        message = made.choices[0].message
        assert message.content == "Let me see."
        (call,) = message.tool_calls
        reason = made.choices[0].finish_reason
    assert (call.function.name, call.function.arguments) == ("look_up", '{"leaf": "red"}')
    assert reason == "tool_calls"
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},  # from a stream, with its index
        {"role": "tool", "tool_call_id": call.id, "content": "It is red."},
    ]
    after = chat.chat.completions.create(model=name, messages=messages, tools=[TOOL], max_tokens=4)
    assert after.choices[0].message.tool_calls is None
    messages[1]["tool_calls"][0].pop("index", None)
    same = chat.chat.completions.create(model=name, messages=messages, tools=[TOOL], max_tokens=4)
    assert same.usage.prompt_tokens == after.usage.prompt_tokens


def test_text_that_only_looks_like_a_call_stays_text(
    chat: openai.OpenAI, chatty: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"model": name_of(chat), "messages": [{"role": "user", "content": "Which?"}]}
    for kind, said in NO_CALLS.items():
        monkeypatch.undo()
        process_logits(monkeypatch, Script(chatty.service.engine.tokenizer, lambda prompt, said=said: said))
        # One call alone is no reason to end at a mark that a sentence names.
        made = chat.chat.completions.create(
            **asked, tools=[TOOL], max_tokens=190, parallel_tool_calls=False, stream=True
        )
        choices = [one.choices[0] for one in made]
        assert not [call for one in choices for call in one.delta.tool_calls or []], kind
        content = "".join(one.delta.content or "" for one in choices)
        assert (content, choices[-1].finish_reason) == (said.rpartition("</think>")[2], "stop"), kind


def test_unsupported_fields_are_refused(client: openai.OpenAI, chat: openai.OpenAI) -> None:
    name, messages = name_of(client), [{"role": "user", "content": "Which?"}]
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(model=name, messages=messages, tools=[TOOL])
    with pytest.raises(openai.BadRequestError, match="4,000 more are for the answer"):
        chat.chat.completions.create(model=name_of(chat), messages=messages, max_tokens=4_000)
    picture = [{"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}]
    for field, more in {
        "n": {"n": 99},
        "logit_bias": {"logit_bias": {"7": 101}},
        "top_logprobs": {"top_logprobs": 3},
        "stream_options": {"stream_options": {"include_usage": True}},
        "max_completion_tokens": {"max_tokens": 4, "max_completion_tokens": 5},
        "response_format.json_schema.json_schema.name": {
            "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}
        },
        "tool_choice": {"tool_choice": "required"},
        "reasoning_effort": {"reasoning_effort": "high"},
        "no-such-field": {"extra_body": {"no-such-field": 1}},
        "messages.0.content.0.type": {"messages": [{"role": "user", "content": picture}]},
    }.items():
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**{"model": name, "messages": messages} | more)
        body = caught.value.body
        assert caught.value.status_code == 400
        assert (caught.value.param, caught.value.type) == (field, "invalid_request_error")
        assert field in body["message"]
        assert len(body["message"]) > len(field) + 10
    for choice in ({"type": "function"}, {"type": "auto"}, {"type": "function", "function": ["look_up"]}):
        with pytest.raises(openai.BadRequestError, match="use 'auto', 'any', or one of"):
            chat.chat.completions.create(model=name_of(chat), messages=messages, tools=[TOOL], tool_choice=choice)
    with pytest.raises(openai.BadRequestError, match="logit_bias is not usable: the model's tokens are 0 to"):
        client.completions.create(model=name, prompt="the", logit_bias={"1000000": 1})
    for field, more in {
        "best_of": {"best_of": 3},
        "prompt": {"prompt": ["a"] * 60, "n": 2},
        "prompt.0": {"prompt": [1, 2]},
    }.items():
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**{"model": name, "prompt": "the"} | more)
        assert caught.value.param == field
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=name, input="the", dimensions=8)
    assert caught.value.param == "dimensions"
    with httpx.Client(base_url=str(client.base_url)) as plain:
        answer = plain.post("completions", content=b"{no json", headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "body: it is not JSON")


def test_fields_of_other_servers_are_refused_by_name(client: openai.OpenAI) -> None:
    for field in ("num_predict", "device_map", "keep_alive"):
        for ask in (partial(client.completions.create, prompt="the"), partial(client.embeddings.create, input="the")):
            with pytest.raises(openai.BadRequestError, match=f"{field}: this is not supported here") as caught:
                ask(model=name_of(client), extra_body={field: 64})
            assert caught.value.param == field


def test_fields_that_ask_for_nothing_are_accepted(chat: openai.OpenAI) -> None:
    """Clients send fields that they do not use, and messages as they came."""
    messages: list[Any] = [{"role": "user", "content": "Which leaf fell?"}]
    nothing = {
        **{"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "logprobs": False, "tools": None},
        **{"response_format": {"type": "text"}, "parallel_tool_calls": True, "store": False, "service_tier": "auto"},
        **{"user": "ada", "metadata": {"run": "7"}, "max_tokens": 4, "max_completion_tokens": 4},
        "extra_body": {"reasoning_effort": None},
    }
    first = chat.chat.completions.create(model=name_of(chat), messages=messages, **nothing)
    messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "And then?"}]
    assert chat.chat.completions.create(model=name_of(chat), messages=messages, max_tokens=2).choices


def test_several_answers_to_one_prompt(client: openai.OpenAI, chat: openai.OpenAI) -> None:
    name, options = name_of(client), {"temperature": 1.5, "seed": 7, "max_tokens": 8}
    one = client.completions.create(model=name, prompt="the quick", **options)
    three = client.completions.create(model=name, prompt="the quick", n=3, **options)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert three.choices[0].text == one.choices[0].text, "the first is the answer of the seed"
    assert len({choice.text for choice in three.choices}) > 1
    again = client.completions.create(model=name, prompt="the quick", n=3, **options)
    assert [choice.text for choice in again.choices] == [choice.text for choice in three.choices]
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    assert three.usage.completion_tokens > one.usage.completion_tokens
    two_prompts = client.completions.create(model=name, prompt=["the quick", "an old oak"], n=2, **options)
    assert [choice.index for choice in two_prompts.choices] == [0, 1, 2, 3]
    assert two_prompts.choices[0].text == one.choices[0].text

    asked = {"model": name_of(chat), "messages": [{"role": "user", "content": "Which?"}], "n": 2, **options}
    whole = chat.chat.completions.create(**asked)
    pieces = {0: "", 1: ""}
    reasons = {}
    for chunk in chat.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        pieces[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason
    assert pieces == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert pieces[0] != pieces[1]


def test_logit_bias_and_penalties_change_the_answer(client: openai.OpenAI, server: Running) -> None:
    name, tokenizer = name_of(client), server.service.engine.tokenizer
    ask: dict[str, Any] = {"model": name, "prompt": "the quick brown", "max_tokens": 12}
    # The tiny model must not end before the twelfth token.
    go_on = {str(tokenizer.eos_token_id): -100}
    oak = tokenizer.encode(" oak", add_special_tokens=False)[0]
    only = client.completions.create(**ask, logit_bias={**go_on, str(oak): 100})
    ids = tokenizer.encode(only.choices[0].text, add_special_tokens=False)
    assert set(ids) == {oak}
    assert len(ids) == 12
    banned = client.completions.create(**ask, logit_bias={**go_on, str(oak): -100})
    assert oak not in tokenizer.encode(banned.choices[0].text, add_special_tokens=False)
    # A bias of 3 wins by less than 3 here, so a penalty drives it off again; alone it takes every place.
    ask |= {"logit_bias": {**go_on, str(oak): 3}, "logprobs": 0}
    favoured, spread = (client.completions.create(**ask, presence_penalty=one).choices[0] for one in (0.0, 2.0))
    assert len(set(spread.logprobs.tokens)) > len(set(favoured.logprobs.tokens))


def test_log_probabilities_are_the_models_own(client: openai.OpenAI, chat: openai.OpenAI, server: Running) -> None:
    engine, prompt = server.service.engine, "the quick brown"
    ask: dict[str, Any] = {"model": name_of(client), "prompt": prompt, "max_tokens": 6}
    plain = client.completions.create(**ask, logprobs=3)
    told = plain.choices[0].logprobs
    made = engine.generate(prompt, max_new_tokens=6)
    assert made.text == plain.choices[0].text
    ids = [*engine.tokenize(prompt).input_ids, *made.token_ids]
    with torch.inference_mode():
        logits = engine.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    begins = len(engine.tokenize(prompt).input_ids)
    assert len(told.tokens) >= 2
    for at, (token, value, top, offset) in enumerate(
        zip(told.tokens, told.token_logprobs, told.top_logprobs, told.text_offset, strict=True)
    ):
        row = logits[begins + at - 1]
        assert value == pytest.approx(float(row[ids[begins + at]]), abs=1e-4)
        assert 1 <= len(top) <= 3, "tokens of one text are one"
        assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
        assert top[token] == value, "greedy decoding takes the likeliest"
        assert plain.choices[0].text[offset:].startswith(token)
    assert "".join(told.tokens) == plain.choices[0].text
    # A bias changes what is taken, not what the model thinks of it.
    unlikely = int(logits[begins - 1].argmin())
    forced = client.completions.create(**ask, logprobs=1, logit_bias={str(unlikely): 100})
    assert forced.choices[0].logprobs.token_logprobs[0] == pytest.approx(float(logits[begins - 1].min()), abs=1e-4)


def test_log_probabilities_of_a_stream_are_those_of_a_whole_answer(client: openai.OpenAI, chat: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Which?"}], "logprobs": True, "top_logprobs": 2}
    asked |= {"model": name_of(chat), "temperature": 1.2, "seed": 3, "n": 2, "max_tokens": 8}
    whole = chat.chat.completions.create(**asked)
    pieces: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in chat.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        if choice.logprobs:
            pieces[choice.index] += choice.logprobs.content
    for choice in whole.choices:
        assert pieces[choice.index] == choice.logprobs.content
        said = b"".join(bytes(one.bytes) for one in choice.logprobs.content).decode()
        assert said == choice.message.content
        assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)
    without = chat.chat.completions.create(**{**asked, "logprobs": None, "top_logprobs": None})
    assert without.choices[0].logprobs is None
    assert [one.message.content for one in without.choices] == [one.message.content for one in whole.choices]


def test_every_answer_has_an_id(client: openai.OpenAI, server: Running) -> None:
    answers = [client.completions.create(model=name_of(client), prompt="the", max_tokens=1) for _ in range(2)]
    assert len({one._request_id for one in answers}) == 2
    own = client.models.list(extra_headers={"X-Request-ID": "mine-17"})
    assert own._request_id == "mine-17"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-9", extra_headers={"X-Request-ID": "two words"})
    assert caught.value.request_id.startswith("req_")
    with httpx.Client(base_url=server.url) as plain:
        assert plain.get("/healthz", headers={"Host": "elsewhere.example"}).headers["x-request-id"].startswith("req_")
        assert plain.get("/").headers["x-request-id"]


def test_embeddings_in_both_forms(client: openai.OpenAI, server: Running) -> None:
    name = server.service.embedder_name
    texts = ["the quick brown fox", "an old oak"]
    packed = client.embeddings.create(model=name, input=texts)
    plain = client.embeddings.create(model=name, input=texts, encoding_format="float")
    assert packed.usage.prompt_tokens > 0
    own = server.service.embeddings.embed_documents(texts)
    for one, two, three in zip(packed.data, plain.data, own, strict=True):
        np.testing.assert_allclose(one.embedding, two.embedding, rtol=1e-6)
        np.testing.assert_allclose(one.embedding, three, rtol=1e-5, atol=1e-7)
