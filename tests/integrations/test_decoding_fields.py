"""Options of decoding as fields and call arguments of both frameworks' models, in each form of call."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import torch
from langchain_core.messages import HumanMessage
from llama_index.core.llms import ChatMessage

from cacheblend_rag import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.langchain import CacheBlendLLM, ChatCacheBlend
from cacheblend_rag.llama_index import CacheBlendLLM as LlamaIndexLLM
from tests.integrations.langchain.models import Script, tiny_parts
from tests.probes import CHUNKS, engine_of

pytestmark = pytest.mark.usefixtures("no_variants")

KINDS = [CacheBlendLLM, ChatCacheBlend, LlamaIndexLLM]
ASKED = "the quick brown"
FREE = {"max_new_tokens": 8, "min_new_tokens": 8}


def plain_text(engine: BlendEngine, asked: str, **options: Any) -> str:
    """The answer of transformers alone."""
    tokenizer = engine.tokenizer
    ids = torch.tensor([tokenizer.encode(asked)])
    out = engine.model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def ways(kind: Any, model: Any, asked: str = ASKED, **options: Any) -> list[tuple[str, Any]]:
    """Text and log-probabilities of an answer: at once, asynchronously, and at the end of both streams."""
    if kind is LlamaIndexLLM:
        completion = model.complete(asked, **options)
        streamed = list(model.stream_complete(asked, **options))[-1]

        async def both() -> list[Any]:
            stream = await model.astream_complete(asked, **options)
            return [await model.acomplete(asked, **options), [one async for one in stream][-1]]

        return [(one.text, one.logprobs) for one in (completion, streamed, *asyncio.run(both()))]

    async def generated() -> list[Any]:
        whole = await model.agenerate([asked] if kind is CacheBlendLLM else [[HumanMessage(asked)]], **options)
        return [whole.generations[0][0], [one async for one in model.astream(asked, **options)]]

    if kind is CacheBlendLLM:
        one, _ = asyncio.run(generated())
        first = model.generate([asked], **options).generations[0][0]
        ended = list(model._stream(asked, **options))
        told = [(each.text, each.generation_info.get("logprobs")) for each in (first, one)]
        return [*told, ("".join(piece.text for piece in ended), ended[-1].generation_info.get("logprobs"))]
    whole, (last, pieces) = model.invoke(asked, **options), asyncio.run(generated())
    streams = [list(model.stream(asked, **options)), pieces]
    for stream in streams:
        for piece in stream[1:]:
            stream[0] += piece
    messages = [whole, last.message, *(stream[0] for stream in streams)]
    return [(one.text, one.response_metadata.get("logprobs")) for one in messages]


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_come_with_each_form_of_call(kind: Any, engine: BlendEngine) -> None:
    model = kind.from_engine(engine, generate_kwargs=FREE, logprobs=True, top_logprobs=2)
    (text, told), *others = ways(kind, model)
    assert text
    assert all(one == (text, told) for one in others)
    if kind is CacheBlendLLM:
        tokens, values, tops = told["tokens"], told["token_logprobs"], told["top_logprobs"]
        assert told["text_offset"][0] == 0
        assert all(len(top) <= 2 and token in top for token, top in zip(tokens, tops, strict=True))
    elif kind is ChatCacheBlend:
        tokens, values = ([one[name] for one in told["content"]] for name in ("token", "logprob"))
        assert all(len(one["top_logprobs"]) == 2 for one in told["content"])
        assert b"".join(bytes(one["bytes"]) for one in told["content"]).decode() == text
    else:
        tokens, values = [one[0].token for one in told], [one[0].logprob for one in told]
        assert all(one[0].logprob >= one[-1].logprob for one in told), "greedy decoding takes the likeliest"
    assert 7 <= len(tokens) == len(values) <= 8, "the last may be a part of a character"
    assert all(value < 0 for value in values)
    assert all(one == (text, None) for one in ways(kind, model, logprobs=False)), "a call may do without"


def test_log_probabilities_of_a_verified_answer_are_those_of_its_end() -> None:
    asked = "Read this:\n\n" + "\n\n".join(CHUNKS) + "\n\nWhat fell in the end?"
    tokenizer = tiny_parts()[1]
    with engine_of(tokenizer=tokenizer, selection="none", prompt_cache=0) as blending:
        model = ChatCacheBlend.from_engine(blending, max_new_tokens=9, logprobs=True)
        model.warm(CHUNKS)
        full = ChatCacheBlend.from_engine(blending.with_config(selection="all"), max_new_tokens=9, logprobs=True)
        ((expected, exact), *_), ((draft, rough), *_) = (
            ways(ChatCacheBlend, full, asked),
            ways(ChatCacheBlend, model, asked),
        )
        assert draft != expected
        assert str(rough) != str(exact)
        found = [told for _, told in ways(ChatCacheBlend, model, asked, verify="always")]
        assert model.last_report.verification.status == "corrected"
    for told in found:
        assert named(told) == named(exact)
        assert values_of(told) == pytest.approx(values_of(exact), abs=1e-3)


def named(told: Any) -> list[str]:
    if isinstance(told, list):
        return [one[0].token for one in told]
    return told["tokens"] if "tokens" in told else [one["token"] for one in told["content"]]


def values_of(told: Any) -> list[float]:
    if isinstance(told, list):
        return [one[0].logprob for one in told]
    return told["token_logprobs"] if "tokens" in told else [one["logprob"] for one in told["content"]]


def test_options_of_decoding_are_refused_where_they_are_wrong_or_ignored(engine: BlendEngine) -> None:
    for given, told in {
        ("top_logprobs", 3): "give logprobs=True, too",
        ("top_logprobs", 21): "from 0 to 20",
        ("logprobs", "yes"): "True or False",
        ("min_p", 0.1): "do_sample=True or a temperature",
        ("min_p", 2): "from 0 to 1",
        ("presence_penalty", 3): "from -2 to 2",
        ("frequency_penalty", "a"): "from -2 to 2",
    }.items():
        name, value = given
        with pytest.raises(ConfigError, match=rf"^{name}={value!r}.*{told}"):
            LlamaIndexLLM.from_engine(engine, **{name: value})
        with pytest.raises(ConfigError, match=rf"^{name}={value!r}.*{told}"):
            ways(LlamaIndexLLM, LlamaIndexLLM.from_engine(engine), **{name: value})
    for bias, told in {
        "a": "numbers by token id",
        (("x", 1),): "numbers by token id",
        ((1, 101),): r"logit_bias\[1\]=101.*-100 to 100",
        ((1_000_000, 1),): "the model's tokens are 0 to",
    }.items():
        with pytest.raises(ConfigError, match=told):
            ways(
                LlamaIndexLLM,
                LlamaIndexLLM.from_engine(engine),
                logit_bias=bias if isinstance(bias, str) else dict(bias),
            )
    for more, told in {
        ("no_repeat_ngram_sise", 3): "did you mean 'no_repeat_ngram_size'",
        ("num_beams", 2): "without beams",
        ("typical_p", 0.5): "do_sample=True or a temperature",
    }.items():
        with pytest.raises(ConfigError, match=told):
            LlamaIndexLLM.from_engine(engine, additional_kwargs=dict([more]))


def test_options_do_what_those_of_transformers_do(engine: BlendEngine) -> None:
    model = CacheBlendLLM.from_engine(engine, max_new_tokens=8)
    torch.manual_seed(5)
    sampled = plain_text(engine, ASKED, max_new_tokens=8, do_sample=True, temperature=3.0, min_p=0.3, top_k=0)
    given = {"temperature": 3.0, "min_p": 0.3, "top_k": 0, "seed": 5}
    assert {text for text, _ in ways(CacheBlendLLM, model, **given)} == {sampled}
    assert ways(CacheBlendLLM, CacheBlendLLM.from_engine(engine, max_new_tokens=8, **given))[0][0] == sampled
    for more in ({"no_repeat_ngram_size": 1}, {"suppress_tokens": [5, 9, 300]}, {"min_new_tokens": 8}):
        expected = plain_text(engine, ASKED, max_new_tokens=8, do_sample=False, **more)
        for outer in ("additional_kwargs", "generate_kwargs", "pipeline_kwargs"):
            made = CacheBlendLLM.from_engine(engine, max_new_tokens=8, **{outer: more})
            assert {text for text, _ in ways(CacheBlendLLM, made)} == {expected}
            assert {text for text, _ in ways(CacheBlendLLM, model, **{outer: more})} == {expected}
    both = CacheBlendLLM.from_engine(engine, max_new_tokens=8, additional_kwargs={"no_repeat_ngram_size": 1})
    expected = plain_text(engine, ASKED, max_new_tokens=8, do_sample=False, no_repeat_ngram_size=1, min_new_tokens=8)
    assert ways(CacheBlendLLM, both, additional_kwargs={"min_new_tokens": 8})[0][0] == expected, "both hold"


def test_json_mode_makes_each_answer_an_object_but_calls(engine: BlendEngine) -> None:
    fields: dict[str, Any] = {"json_mode": True, "max_new_tokens": 150, "temperature": 1.5}
    model = LlamaIndexLLM.from_engine(engine, **fields)
    finished = 0
    for seed in range(3):
        for answer in (model.complete(ASKED, seed=seed), model.chat([ChatMessage(content=ASKED)], seed=seed)):
            if answer.raw["finish_reason"] == "stop":
                finished += 1
                assert isinstance(json.loads(str(getattr(answer, "text", None) or answer.message.content)), dict)
    assert finished
    text = model.complete(ASKED, seed=1, response_format={"type": "text"}, max_tokens=8).text
    assert text == LlamaIndexLLM.from_engine(engine, temperature=1.5, max_new_tokens=8).complete(ASKED, seed=1).text
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
    script = [Script(tiny_parts()[1], lambda _: "{}}")]
    calling = LlamaIndexLLM.from_engine(engine, json_mode=True, max_new_tokens=20, logits_processor=script)
    response = calling.chat([ChatMessage(content=ASKED)], tools=[tool], tool_choice="any")
    assert [call.tool_name for call in calling.get_tool_calls_from_response(response)] == ["find"]
