"""The OpenAI-compatible API: completions, conversations, models, embeddings."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, TypeVar

import numpy as np
from fastapi import APIRouter, Depends, Request

from cacheblend_rag.app.server.admission_queue import Slot
from cacheblend_rag.app.server.chatting import Conversation, ServedChat
from cacheblend_rag.app.server.openai_models import ChatBody, CompletionBody, EmbeddingBody, Sampling, document_texts
from cacheblend_rag.app.server.problems import Problem, noted_problem
from cacheblend_rag.app.server.service import Session
from cacheblend_rag.app.server.sessions import session_of
from cacheblend_rag.app.server.streams import EventStream, event, unless_gone
from cacheblend_rag.app.server.templates import within
from cacheblend_rag.engine.engine import DecodeArguments
from cacheblend_rag.langchain.tools import call_chunks
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.prompt.matching import match_chunks
from cacheblend_rag.report import BlendReport, Generation

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["OpenAI"])
Here = Annotated[Session, Depends(session_of)]
_T = TypeVar("_T")
_DONE = "data: [DONE]\n\n"
# Below this, sampling is greedy but for rounding, and its probabilities overflow.
_COLDEST = 0.01
_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}, "description": "An answer, or its pieces."}
}


@router.get("/models")
async def models(here: Here) -> dict[str, Any]:
    """The model and the embedder."""
    return {"object": "list", "data": [_model(here, name) for name in _names(here)]}


@router.get("/models/{model:path}")
async def model(here: Here, model: str) -> dict[str, Any]:
    """One of them."""
    _check_model(model, _names(here))
    return _model(here, model)


@router.post("/embeddings")
async def embeddings(here: Here, request: Request, body: EmbeddingBody) -> dict[str, Any]:
    """Vectors of texts, by the embedder that collections use."""
    service = here.service
    _check_model(body.model, [service.embedder_name])
    texts = [body.input] if isinstance(body.input, str) else body.input
    if sum(map(len, texts)) > service.limits.prompt_chars:
        raise Problem(413, "too_long", f"all texts may have {service.limits.prompt_chars:,} characters", field="input")
    async with await unless_gone(request, service.queue.slot(here.tenant.name)) as slot:
        vectors = await slot.in_thread(service.embeddings.embed_documents, texts)
    tokens = await asyncio.to_thread(service.embedder_tokens, texts)
    data = [
        {"object": "embedding", "index": number, "embedding": _encoded(vector, body.encoding_format)}
        for number, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": body.model, "usage": usage}


@router.post("/completions", responses=_STREAMED, response_model=None)
async def completions(here: Here, request: Request, body: CompletionBody) -> Any:
    """Go on with a text. Chunks stand between separators in it, or come as ``documents`` before it."""
    work = _Completion(here, body)
    slot = await unless_gone(request, here.service.queue.slot(here.tenant.name))
    prompts = await _prepared(request, slot, work.prompts)
    if body.stream:
        return EventStream(work.events(prompts, slot), slot, here.service.longest)
    async with slot:
        return await unless_gone(request, work.whole(prompts, slot))


@router.post("/chat/completions", responses=_STREAMED, response_model=None)
async def chat(here: Here, request: Request, body: ChatBody) -> Any:
    """Answer a conversation. ``documents`` stand in its system message."""
    work = _Chat(here, body)
    slot = await unless_gone(request, here.service.queue.slot(here.tenant.name))
    conversation = await _prepared(request, slot, work.begin)
    slot.holds(conversation.stream)
    if body.stream:
        return EventStream(work.events(conversation), slot, here.service.longest)
    async with slot:
        return await unless_gone(request, work.whole(conversation))


async def _prepared(request: Request, slot: Slot, make: Callable[[], _T]) -> _T:
    """Make what the model is fed, in the request's own turn; the slot is left if that fails or the client goes."""
    try:
        return await unless_gone(request, slot.in_thread(make))
    except BaseException:
        await slot.leave()
        raise


class _Work:
    """What both kinds of answers have in common."""

    kind, chunk_kind, mark = "", "", ""

    def __init__(self, here: Session, body: Sampling) -> None:
        self.here, self.body = here, body
        _check_model(body.model, [here.service.model_name])
        self.engine = here.engine(body.recompute_ratio, body.selection)
        self.documents = document_texts(body)
        self.id, self.created = f"{self.mark}-{secrets.token_hex(12)}", int(time.time())
        self._reports: list[BlendReport] = []

    def arguments(self, most: int) -> DecodeArguments:
        """How to decode."""
        body, temperature = self.body, self.body.temperature
        if temperature is not None:
            temperature = 0.0 if temperature < _COLDEST else temperature
        return DecodeArguments(
            max_new_tokens=most,
            temperature=temperature,
            do_sample=True if temperature is None and (body.top_p or 1) < 1 else None,  # who gives it wants sampling
            top_p=body.top_p,
            seed=body.seed,
            stop=body.stops,
        )

    def count(self, answer: Generation) -> None:
        """Take note of a finished answer."""
        self._reports.append(answer.report)
        self.here.service.metrics.answered(answer.report)

    def frame(self, choices: list[dict[str, Any]], chunk: bool = False) -> dict[str, Any]:
        """An answer, or a piece of one, around its choices."""
        kind = self.chunk_kind if chunk else self.kind
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.body.model,
            "choices": choices,
        }

    def closing(self) -> dict[str, Any]:
        """Usage, and how the answers came about."""
        return {"usage": _usage(self._reports), "cacheblend": [_mask_here(one) for one in self._reports]}

    async def guarded(self, pieces: AsyncIterator[str]) -> AsyncIterator[str]:
        """A stream with its end; an error becomes its last event."""
        try:
            async for piece in pieces:
                yield piece
            if self.body.stream_options is not None and self.body.stream_options.include_usage:
                yield event(None, {**self.frame([], chunk=True), **self.closing()})
        except Exception as error:
            yield event(None, noted_problem(error).body())
        yield _DONE


class _Completion(_Work):
    """One request for completions."""

    kind = chunk_kind = "text_completion"
    mark = "cmpl"

    def __init__(self, here: Session, body: CompletionBody) -> None:
        super().__init__(here, body)
        self._texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        self._most = here.service.answer_tokens(body.max_tokens)

    def prompts(self) -> list[Prompt]:
        """A prompt for each text."""
        with within(self.here.service.limits.prompt_seconds):
            prompts = [self._prompt(text) for text in self._texts]
            for prompt in prompts:
                self.here.service.check_length(prompt, self._most)
            return prompts

    def _prompt(self, text: str) -> Prompt:
        if self.documents:
            return Prompt(chunks=self.documents, suffix=text)
        return match_chunks(text, self.here.tenant.known, self.engine.config.text_separator)

    def _open(self, prompt: Prompt, slot: Slot) -> Any:
        timeout = self.here.service.limits.answer_seconds
        return slot.holds(self.engine.stream(prompt, timeout=timeout, **self.arguments(self._most)))

    def events(self, prompts: list[Prompt], slot: Slot) -> AsyncIterator[str]:
        """The texts as they are made, one after the other."""
        return self.guarded(self._pieces(prompts, slot))

    async def _pieces(self, prompts: list[Prompt], slot: Slot) -> AsyncIterator[str]:
        for number, prompt in enumerate(prompts):
            stream = self._open(prompt, slot)
            async for piece in stream:
                yield event(None, self.frame([_text_choice(number, piece, None)], chunk=True))
            self.count(stream.result)
            reason = stream.result.report.finish_reason
            yield event(None, self.frame([_text_choice(number, "", reason)], chunk=True))

    async def whole(self, prompts: list[Prompt], slot: Slot) -> dict[str, Any]:
        """All texts at once."""
        choices = []
        for number, prompt in enumerate(prompts):
            answer = await self._open(prompt, slot).acomplete()
            self.count(answer)
            choices.append(_text_choice(number, answer.text, answer.report.finish_reason))
        return {**self.frame(choices), **self.closing()}


class _Chat(_Work):
    """One request for a conversation."""

    kind, chunk_kind, mark = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, here: Session, body: ChatBody) -> None:
        super().__init__(here, body)
        self._body = body

    def begin(self) -> Conversation:
        """Make the prompt."""
        most = self.here.service.answer_tokens(self._body.max_completion_tokens or self._body.max_tokens)
        arguments = self.arguments(most)
        model = ServedChat(
            engine=self.engine,
            mine=self.here.tenant.known,
            given=self.documents,
            model_name=self.here.service.model_name,
            max_tokens=most,
            temperature=arguments["temperature"],
            do_sample=arguments["do_sample"],
            top_p=arguments["top_p"],
            seed=arguments["seed"],
        )
        with within(self.here.service.limits.prompt_seconds):
            conversation = model.begin(self._body, self.here.service.limits.answer_seconds)
            self.here.service.check_length(conversation.prompt, most)
            return conversation

    def events(self, conversation: Conversation) -> AsyncIterator[str]:
        """The answer as it is made."""
        return self.guarded(self._pieces(conversation))

    async def _pieces(self, conversation: Conversation) -> AsyncIterator[str]:
        yield self._delta({"role": "assistant", "content": ""})
        async for piece in conversation.pieces():
            yield self._delta({"content": piece})
        message, answer = conversation.message(), conversation.stream.result
        if answer is not None:
            self.count(answer)
        if rest := str(message.content)[conversation.held.sent :]:
            yield self._delta({"content": rest})
        calls = [
            {
                "index": call["index"],
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"] or "", "arguments": call["args"]},
            }
            for call in call_chunks(message)
        ]
        if calls:
            yield self._delta({"tool_calls": calls})
        reason = "tool_calls" if calls else answer.report.finish_reason if answer else "stop"
        yield self._delta({}, reason)

    def _delta(self, delta: dict[str, Any], reason: str | None = None) -> str:
        return event(None, self.frame([{"index": 0, "delta": delta, "finish_reason": reason}], chunk=True))

    async def whole(self, conversation: Conversation) -> dict[str, Any]:
        """The answer at once."""
        answer = await conversation.stream.acomplete()
        self.count(answer)
        found = conversation.message()
        message: dict[str, Any] = {"role": "assistant", "content": str(found.content)}
        calls = [
            {"id": one["id"], "type": "function", "function": {"name": one["name"] or "", "arguments": one["args"]}}
            for one in call_chunks(found)
        ]
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        reason = "tool_calls" if calls else answer.report.finish_reason
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        return {**self.frame([choice]), **self.closing()}


def _text_choice(number: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": number, "text": text, "logprobs": None, "finish_reason": reason}


def _usage(reports: list[BlendReport]) -> dict[str, Any]:
    """Tokens; ``cached_tokens`` are those whose KV was read and kept on every layer."""
    prompt = sum(one.prompt_tokens for one in reports)
    answer = sum(one.generated_tokens for one in reports)
    cached = sum(one.reused_tokens - (one.recomputed_tokens or (0,))[-1] for one in reports)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _mask_here(report: BlendReport) -> dict[str, Any]:
    return {
        "ttft_s": report.ttft,
        "hits": report.hits,
        "misses": report.misses,
        "left_out": list(report.left_out),
        "recompute_ratio": report.recompute_ratio,
        "plain": report.plain,
    }


def _names(here: Session) -> list[str]:
    return [here.service.model_name, here.service.embedder_name]


def _model(here: Session, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": here.service.started, "owned_by": "local"}


def _check_model(name: str, known: list[str]) -> None:
    if name not in known:
        raise Problem(404, "model_not_found", "there is no such model; use " + " or ".join(known), field="model")


def _encoded(vector: list[float], form: str) -> list[float] | str:
    if form == "float":
        return vector
    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()
