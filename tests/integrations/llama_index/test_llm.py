"""CacheBlendLLM by itself: every form of every call, options, errors, timeouts, tools, tracing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import pytest
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.core.types import PydanticProgramMode
from pydantic import BaseModel, Field
from transformers import GenerationConfig

from cacheblend_rag.errors import GenerationTimeoutError
from cacheblend_rag.llama_index import CacheBlendLLM
from cacheblend_rag.llama_index.messages import turns_of
from tests import tiny
from tests.integrations.langchain.models import Script, tiny_parts
from tests.integrations.llama_index.common import listening, make_index, make_llm, make_nodes

FORMS = ("complete", "acomplete", "stream_complete", "astream_complete")
CHAT_FORMS = ("chat", "achat", "stream_chat", "astream_chat")
HELLO = [ChatMessage(role="system", content="Be kind."), ChatMessage(role="user", content="What fell?")]


@pytest.fixture
def llm() -> Iterator[CacheBlendLLM]:
    made = make_llm(max_new_tokens=6)
    with made.engine:
        yield made


async def responses(llm: CacheBlendLLM, form: str, asked: Any, **options: Any) -> list[Any]:
    """All responses of a call: one, or one a piece."""
    call = getattr(llm, form)
    if form in ("complete", "chat"):
        return [call(asked, **options)]
    if form in ("acomplete", "achat"):
        return [await call(asked, **options)]
    if form in ("stream_complete", "stream_chat"):
        return list(call(asked, **options))
    return [one async for one in await call(asked, **options)]


def text_of(response: Any) -> str:
    return str(response.message.content or "") if hasattr(response, "message") else str(response.text)


def fed(llm: CacheBlendLLM, response: Any) -> str:
    """The model's input, as text."""
    return str(llm.engine.tokenizer.decode(response.raw["input_ids"]))


def test_default_query_engine_answers_with_a_template_that_refuses_system_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = make_llm(chat=True)
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    with llm.engine, monkeypatch.context() as patch:
        patch.setattr(llm.engine.tokenizer, "chat_template", refuses + llm.engine.tokenizer.chat_template)
        assert "Empty" not in str(make_index(make_nodes(2)).as_query_engine(llm=llm).query("What fell?"))
        written = fed(llm, llm.chat(HELLO))
    assert written == "<s>[user] Be kind.\n\nWhat fell?\n[assistant] "


@pytest.mark.parametrize("form", FORMS)
async def test_all_forms_say_the_same(llm: CacheBlendLLM, form: str) -> None:
    whole = llm.complete("What fell?").text
    got = await responses(llm, form, "What fell?")
    assert whole
    assert got[-1].text == whole
    if "stream" in form:
        assert len(got) > 2
        assert "".join(one.delta for one in got) == whole
        assert [one.text for one in got] == ["".join(o.delta for o in got[: n + 1]) for n in range(len(got))]
    assert got[-1].raw["finish_reason"] == "length"


@pytest.mark.parametrize("form", CHAT_FORMS)
async def test_all_chat_forms_say_the_same(llm: CacheBlendLLM, form: str) -> None:
    got = await responses(llm, form, HELLO)
    assert text_of(got[-1]) == text_of(llm.chat(HELLO)) != ""
    assert got[-1].message.role is MessageRole.ASSISTANT
    assert got[-1].message.additional_kwargs == {}  # LlamaIndex would write them into the next prompt
    if "stream" in form:
        assert "".join(one.delta for one in got) == text_of(got[-1])
    ids = got[-1].raw["input_ids"]
    assert ids.count(llm.engine.tokenizer.bos_token_id) == 1
    assert fed(llm, got[-1]) == "<s>[system] Be kind.\n[user] What fell?\n[assistant] "


@pytest.mark.parametrize("form", ["complete", "stream_chat", "astream_complete"])
async def test_stop_strings_end_every_form(form: str) -> None:
    script = Script(tiny_parts()[1], lambda prompt: "one two three four")
    llm = make_llm(logits_processor=[script], max_new_tokens=60, stop=["four"])
    asked = HELLO if "chat" in form else "Count."
    assert text_of((await responses(llm, form, asked))[-1]) == "one two three "
    for stop in ("two", ["three", "two"]):
        got = await responses(llm, form, asked, stop=stop)
        assert [text_of(got[-1]), got[-1].raw["finish_reason"]] == ["one ", "stop"]
        assert "two" not in "".join(one.delta or "" for one in got)
    settings = GenerationConfig(max_new_tokens=60, stop_strings="two")
    for stopped in (llm, llm.model_copy(update={"generation_config": settings})):
        for off in ({"stop": []}, {"generate_kwargs": {"stop": []}}):
            assert text_of((await responses(stopped, form, asked, **off))[-1]) == "one two three four"
        assert text_of((await responses(stopped, form, asked, stop=None))[-1]) != "one two three four"


class Gate:
    """A logits processor that waits to be let through, and tells that it waits."""

    def __init__(self) -> None:
        self.waits, self.open = threading.Event(), threading.Event()

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.waits.set()
        assert self.open.wait(60)
        return scores


@pytest.mark.parametrize("form", ["acomplete", "astream_chat"])
async def test_the_event_loop_goes_on_meanwhile(form: str) -> None:
    gate = Gate()
    llm = make_llm(logits_processor=[gate])
    task = asyncio.create_task(responses(llm, form, HELLO if "chat" in form else "why"))
    while not gate.waits.is_set():
        await asyncio.sleep(0.001)  # a blocked loop would never come here
    assert not task.done()
    gate.open.set()
    assert text_of((await task)[-1])


def broken(input_ids: Any, scores: Any) -> Any:
    raise RuntimeError("no more memory")


@pytest.mark.parametrize("form", ["complete", "stream_chat", "astream_complete"])
async def test_errors_and_timeouts_reach_the_caller(form: str) -> None:
    asked = HELLO if "chat" in form else "why"
    with pytest.raises(RuntimeError, match="no more memory"):
        await responses(make_llm(logits_processor=[broken]), form, asked)
    gate = Gate()
    llm = make_llm(logits_processor=[gate], timeout=0.05)
    with pytest.raises(GenerationTimeoutError, match=r"0\.05 s"):
        await responses(llm, form, asked)
    gate.open.set()
    assert text_of((await responses(llm, form, asked, timeout=60))[-1])


def test_metadata_says_what_prompts_are_planned_by() -> None:
    llm = make_llm(chat=True, max_new_tokens=7)
    assert (llm.metadata.context_window, llm.metadata.num_output) == (8192, 7)
    assert llm.metadata.is_chat_model
    assert llm.metadata.is_function_calling_model
    assert make_llm(context_window=99).metadata.context_window == 99
    tokenizer = tiny.tokenizer()
    plain = CacheBlendLLM.from_model(tiny.model(), tokenizer, model_name="mine")
    assert not plain.metadata.is_chat_model
    assert not plain.metadata.is_function_calling_model
    assert plain.metadata.model_name == "mine"
    assert plain.metadata.num_output == 512
    assert make_llm(context_window=400, max_new_tokens=None).metadata.num_output == 100, "a quarter of a small window"
    assert plain.chat(HELLO, max_tokens=2).raw["prompt_tokens"] > 10  # LlamaIndex's own way to write messages


def test_tracing_sees_each_answer_once(llm: CacheBlendLLM) -> None:
    counter = TokenCountingHandler(tokenizer=llm.engine.tokenizer.encode)
    llm.callback_manager = CallbackManager([counter])
    with listening() as answers:
        raw = llm.complete("why").raw
        list(llm.stream_chat(HELLO))
    assert len(answers.events) == 2
    event = answers.events[0]
    assert (event.ttft, event.recomputed_tokens) == (raw["ttft"], raw["recomputed_tokens"])
    assert event.span_id is not None
    assert event.span_id.startswith("CacheBlendLLM.complete-")
    assert answers.events[1].span_id.startswith("CacheBlendLLM.stream_chat-")
    assert counter.completion_llm_token_count == 12
    assert raw["usage"]["total_tokens"] == raw["prompt_tokens"] + 6
    assert raw["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "blended_tokens": raw["blended_tokens"]}


# Tools --------------------------------------------------------------------------------------------


def find(what: str) -> str:
    """Find something."""
    return what


def with_script(answer: Callable[[str], str | None], **fields: Any) -> CacheBlendLLM:
    return make_llm(True, logits_processor=[Script(tiny_parts()[1], answer)], max_new_tokens=120, **fields)


CALL = 'Let me look.<tool_call>\n{"name": "find", "arguments": {"what": "leaf"}}\n</tool_call>'


async def test_tools_are_offered_and_called() -> None:
    llm, tool = with_script(lambda prompt: CALL), FunctionTool.from_defaults(find)
    whole = llm.chat_with_tools([tool], user_msg="What fell?")
    assert '"name": "find"' in fed(llm, whole)
    assert whole.message.content == "Let me look."
    calls = llm.get_tool_calls_from_response(whole)
    assert [(call.tool_name, call.tool_kwargs) for call in calls] == [("find", {"what": "leaf"})]
    pieces = list(llm.stream_chat_with_tools([tool], chat_history=HELLO))
    assert "".join(piece.delta or "" for piece in pieces) == "Let me look."
    assert len(pieces) > 3
    assert llm.get_tool_calls_from_response(pieces[-1])[0].tool_name == "find"
    turn = turns_of([whole.message])[0]
    assert turn["tool_calls"][0]["function"] == {"name": "find", "arguments": {"what": "leaf"}}
    assert str(llm.predict_and_call([tool], user_msg="What fell?")) == "leaf"


class Person(BaseModel):
    """A person."""

    name: str
    age: int


PERSON = '{"name": "Marie Curie", "age": 66}'
# By a call that is begun for the model, as JSON from its chat, and as JSON that goes on from a text.
WAYS: dict[str, dict[str, Any]] = {
    "call": {"said": PERSON + "}"},
    "chat": {"said": PERSON, "pydantic_program_mode": PydanticProgramMode.LLM},
    "text": {"said": PERSON, "is_chat_model": False, "is_function_calling_model": False},
}


async def objects_of(llm: CacheBlendLLM, form: str, kind: Any = Person, **options: Any) -> list[Any]:
    """The objects of a stream, as LlamaIndex's programs and structured models ask for them."""
    prompt, asked = PromptTemplate("Who was she? {hint}"), [ChatMessage(role="user", content="Who was she?")]
    if form == "stream_structured_predict":
        return list(llm.stream_structured_predict(kind, prompt, options, hint="Polish."))
    if form == "astream_structured_predict":
        return [one async for one in await llm.astream_structured_predict(kind, prompt, options, hint="Polish.")]
    structured = llm.as_structured_llm(kind)
    if form == "stream_chat":
        return [one.raw for one in structured.stream_chat(asked, **options)]
    return [one.raw async for one in await structured.astream_chat(asked, **options)]


# LlamaIndex's structured model calls a method that pydantic has deprecated.
object_forms = pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")
OBJECT_FORMS = ("stream_structured_predict", "astream_structured_predict", "stream_chat", "astream_chat")


@object_forms
@pytest.mark.parametrize(("form", "way"), list(zip(OBJECT_FORMS, [*WAYS] * 2, strict=False)))
async def test_objects_are_streamed(way: str, form: str) -> None:
    options = dict(WAYS[way])
    said = options.pop("said")
    llm = make_llm(
        logits_processor=[Script(tiny_parts()[1], lambda prompt: said)],
        max_new_tokens=120,
        **{"is_chat_model": True, **options},
    )
    objects = await objects_of(llm, form)
    assert objects[-1] == Person(name="Marie Curie", age=66)
    assert "Marie" in [one.name for one in objects], "it grows"
    with pytest.raises(ValueError, match="max_tokens"):
        await objects_of(llm, form, max_tokens=20)


class Leaf(BaseModel):
    """A leaf."""

    kind: Literal["oak", "ash"]
    length: Annotated[int, Field(ge=3, le=9)]


async def test_structured_answers_follow_their_schema() -> None:
    """By calls and as JSON, from a model that nobody has taught either."""
    prompt = PromptTemplate("What fell? {hint}")
    for mode in (PydanticProgramMode.DEFAULT, PydanticProgramMode.LLM):
        llm = make_llm(True, max_new_tokens=120, pydantic_program_mode=mode)
        assert llm.structured_predict(Leaf, prompt, hint="Green.").kind in ("oak", "ash")
        assert (await llm.astructured_predict(Leaf, prompt, hint="Red.")).kind in ("oak", "ash")
        assert llm.as_structured_llm(Leaf).complete("What fell?").raw.length in range(3, 10)
    told = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"enum": ["oak", "ash"]}}}
    for form in CHAT_FORMS:
        last = (await responses(llm, form, HELLO, response_format=told))[-1]
        assert last.message.content in ('"oak"', '"ash"')
