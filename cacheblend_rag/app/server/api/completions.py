"""Completions and conversations of OpenAI's API: the request, and its answers as a body or as a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cacheblend_rag.app.server.api.openai_bodies import ChatBody, ChatMessage, CompletionBody, Sampling, document_texts
from cacheblend_rag.app.server.api.streams import event
from cacheblend_rag.app.server.problems import noted_problem
from cacheblend_rag.app.server.security.templates import check_arguments
from cacheblend_rag.app.server.services.admission_queue import Slot
from cacheblend_rag.app.server.services.service import Session
from cacheblend_rag.config import Reasoning
from cacheblend_rag.engine.answer_form import answer_grammar
from cacheblend_rag.engine.decode import DecodeArguments, DecodeOptions, calls_early
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.engine.logits import LogProbs, completion_logprobs, conversation_logprobs
from cacheblend_rag.engine.model_call import ModelCall, Said
from cacheblend_rag.engine.streaming import TextStream
from cacheblend_rag.errors import CacheBlendError, ConfigError, GenerationTimeoutError, PromptError
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.prompt.call_stream import CallPiece, new_call_id
from cacheblend_rag.prompt.calls import CALL_END, ParsedAnswer, parse_calls
from cacheblend_rag.prompt.control import control_tokens
from cacheblend_rag.prompt.conversation import Conversation, turn_of
from cacheblend_rag.prompt.matching import RetrievedDocument, match_chunks
from cacheblend_rag.prompt.registry import ChunkRegistry
from cacheblend_rag.prompt.thoughts import check_reasoning, thinks
from cacheblend_rag.report import BlendReport, Generation, TokenLogProb, usage_of

C = TypeVar("C", bound="Choice")
_DONE = "data: [DONE]\n\n"
# Below this, sampling is greedy but for rounding, and its probabilities overflow.
COLDEST = 0.01


class AnswerRequest:
    """A request for ``n`` answers to each prompt, generated one after the other."""

    kind, chunk_kind, mark = "", "", ""
    most_field = "max_tokens"

    def __init__(self, here: Session, body: Sampling, most: int | None) -> None:
        self.here, self.body = here, body
        self.model = here.service.model_of(body.model)
        self.most = here.service.answer_tokens(most, self.most_field)
        self.required = here.service.required_tokens(most, self.most_field)
        self.engine = here.engine(self.model, body.recompute_ratio, body.selection)
        vocabulary = self.engine.model.config.get_text_config().vocab_size
        if (largest := max(body.logit_bias, default=0)) >= vocabulary:
            raise ConfigError("logit_bias", largest, f"the model's tokens are 0 to {vocabulary - 1}")
        self.reasoning, self.thought_most = self.thinking()
        self.documents = document_texts(body)
        self.id, self.created = f"{self.mark}{secrets.token_hex(12)}", int(time.time())
        self._reports: list[BlendReport] = []
        self._ends: float | None = None

    def prepare(self) -> None:
        """Build the prompts, and refuse them if they do not fit or if the tenant has too few tokens left."""
        raise NotImplementedError

    def choices(self, slot: Slot) -> Iterator[Choice]:
        """The answers in order; read each to its end before taking the next."""
        raise NotImplementedError

    def thinking(self) -> tuple[Reasoning, int | None]:
        """Whether the model shall think, and the most tokens of its thought."""
        return False, self.model.thought_tokens(False)

    def arguments(self) -> DecodeArguments:
        """How to decode."""
        body, temperature = self.body, self.body.temperature
        if temperature is not None:
            temperature = 0.0 if temperature < COLDEST else temperature
        narrows = (body.top_p or 1) < 1 or (body.top_k or 0) > 1 or bool(body.min_p)
        wants_sampling = narrows or body.n > 1  # who gives them alone
        return DecodeArguments(
            max_new_tokens=self.required,
            temperature=temperature,
            do_sample=True if temperature is None and wants_sampling else None,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            stop_repetition=body.stop_repetition,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=body.logit_bias,
            stop=body.stops,
            verify=body.verify,
            reasoning=self.reasoning,
            reasoning_tokens=self.thought_most,
        )

    def answer(self, slot: Slot, call: ModelCall[Said], number: int, kind: type[C], first: int = 0) -> C:
        """One answer to a call.

        Parameters
        ----------
        slot : Slot
            Holds it.
        call : ModelCall
        number : int
            Its number among the ``n``, which has a seed of its own.
        kind : type
        first : int
            Number of the first of the ``n`` among all answers.
        """
        body, top = self.body, self.body.top_of_each
        noted = None if top is None else LogProbs(self.engine.tokenizer, top)
        seed = None if body.seed is None else body.seed + number
        own = DecodeArguments(seed=seed, logits_processor=[] if noted is None else [noted])
        call = replace(call, arguments=call.arguments | own, timeout=self.left())
        return kind(first + number, call, slot.holds(call.open(), self.here.took), noted)

    def charge(self, prompts: Sequence[Prompt]) -> None:
        """Take the tokens of all answers, once it is known that they fit."""
        fits = [self.model.check_length(prompt, self.required) for prompt in prompts]
        most = self.most + (self.thought_most or 0)
        self.here.charge([len(fit.split.input_ids) + most for fit in fits for _ in range(self.body.n)])

    def left(self) -> float:
        """Seconds left for all answers together, from the first time this is asked."""
        if self._ends is None:
            self._ends = time.monotonic() + self.here.service.limits.answer_seconds
        return max(0.0, self._ends - time.monotonic())

    @contextmanager
    def in_time(self) -> Iterator[None]:
        """Say of an answer that came too late how long all of them may take."""
        try:
            yield
        except GenerationTimeoutError as error:
            raise GenerationTimeoutError(self.here.service.limits.answer_seconds) from error

    def count(self, answer: Generation) -> None:
        """Take note of a finished answer."""
        self._reports.append(self.here.answered(self.engine, answer.report))

    def frame(self, choices: list[dict[str, Any]], chunk: bool = False) -> dict[str, Any]:
        """An answer, or a piece of one, around its choices."""
        kind = self.chunk_kind if chunk else self.kind
        return {"id": self.id, "object": kind, "created": self.created, "model": self.body.model, "choices": choices}

    def closing(self) -> dict[str, Any]:
        """Usage, and how the answers came about."""
        return {"usage": usage_of(self._reports, self.body.n), **self.made()}

    def made(self) -> dict[str, Any]:
        """How the answers came about."""
        return {"cacheblend": [_how_made(one) for one in self._reports]}

    async def events(self, slot: Slot) -> AsyncIterator[str]:
        """The answers as they are made, one after the other; an error becomes the last event."""
        try:
            for choice in self.choices(slot):
                with self.in_time():
                    async for piece in choice.pieces():
                        ended = choice.stream.result if piece["finish_reason"] else None
                        told = {} if ended is None else {"fidelity": ended.report.fidelity}
                        more = {name: piece.pop(name) for name in ("prompt_progress",) if name in piece}
                        yield event(None, {**self.frame([{**piece, **told}], chunk=True), **more})
                if (answer := choice.stream.result) is not None:
                    self.count(answer)
                    if answer.verification.status == "corrected":
                        correction = {"index": choice.index, **answer.verification.asdict()}
                        yield event(None, {**self.frame([], chunk=True), "correction": correction})
            if self.body.stream_options is not None and self.body.stream_options.include_usage:
                yield event(None, {**self.frame([], chunk=True), **self.closing()})
            elif any(one.verification.status != "off" for one in self._reports):
                yield event(None, {**self.frame([], chunk=True), **self.made()})
        except Exception as error:
            yield event(None, noted_problem(error).body())
        yield _DONE

    async def whole(self, slot: Slot) -> dict[str, Any]:
        """All answers at once."""
        choices = []
        for choice in self.choices(slot):
            with self.in_time():
                answer = await choice.stream.acomplete()
            self.count(answer)
            choices.append(choice.whole(answer))
        return {**self.frame(choices), **self.closing()}


@dataclass
class Choice:
    """One of a request's answers on its way.

    Parameters
    ----------
    index : int
        Its number among all.
    call : ModelCall
        The call of the engine that it answers.
    stream : TextStream
        Gives it.
    noted : LogProbs or None
        Its log-probabilities, if they are asked for.
    """

    index: int
    call: ModelCall[Said]
    stream: TextStream
    noted: LogProbs | None

    def pieces(self) -> AsyncIterator[dict[str, Any]]:
        """The choice in pieces, as chunks of a stream have it."""
        raise NotImplementedError

    def whole(self, answer: Generation) -> dict[str, Any]:
        """The choice as a whole."""
        raise NotImplementedError

    async def texts(self) -> AsyncIterator[tuple[Said, Sequence[TokenLogProb] | None]]:
        """Text as soon as it is certain, with its log-probabilities; thoughts, calls and the end without any."""
        sent = 0
        async for said in self.call.aread(self.stream):
            sent += len(said.text)
            noted = self.noted if said.text and said.answer is None else None
            yield said, None if noted is None else noted.up_to(sent)

    def rest(self, answer: Generation | None) -> Sequence[TokenLogProb] | None:
        """Log-probabilities not handed out before; None if they are not asked for."""
        return None if self.noted is None or answer is None else self.noted.rest(answer.token_ids, answer.text)


class Completion(AnswerRequest):
    """One request for completions."""

    kind = chunk_kind = "text_completion"
    mark = "cmpl-"

    def __init__(self, here: Session, body: CompletionBody) -> None:
        super().__init__(here, body, body.max_tokens)
        self._texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        self._prompts: list[Prompt] = []

    def prepare(self) -> None:
        """See `AnswerRequest.prepare`."""
        self._prompts = [self._prompt(text) for text in self._texts]
        self.charge(self._prompts)

    def _prompt(self, text: str) -> Prompt:
        if self.documents:
            return Prompt(chunks=self.documents, suffix=control_tokens(self.engine.tokenizer).owned(text))
        prompt = match_chunks(text, self.here.known, self.engine.config.text_separator)
        return replace(prompt, turns=())

    def choices(self, slot: Slot) -> Iterator[Choice]:
        """See `AnswerRequest.choices`."""
        for at, prompt in enumerate(self._prompts):
            call = ModelCall(self.engine, [prompt], self.arguments(), lambda said: said)
            for number in range(self.body.n):
                yield self.answer(slot, call, number, _TextChoice, at * self.body.n)


class _TextChoice(Choice):
    """A text as it goes on."""

    async def pieces(self) -> AsyncIterator[dict[str, Any]]:
        """See `Choice.pieces`."""
        async for said, tokens in self.texts():
            if said.answer is None:
                yield {**self._choice(said.text, None, tokens), **_thought(said.thought)}
        answer = self.stream.result
        yield self._choice("", answer.report.finish_reason if answer else "stop", self.rest(answer))

    def whole(self, answer: Generation) -> dict[str, Any]:
        """See `Choice.whole`."""
        whole = self._choice(answer.text, answer.report.finish_reason, self.rest(answer))
        return {**whole, **_thought(answer.thought)}

    def _choice(self, text: str, reason: str | None, tokens: Sequence[TokenLogProb] | None) -> dict[str, Any]:
        logprobs = completion_logprobs(tokens) if tokens else None
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": reason}


# Instructions before documents that come without a system message.
_INSTRUCTIONS = (
    "You are an assistant for question-answering tasks. Use the following pieces of retrieved context to "
    "answer the question. If you don't know the answer, say that you don't know. Keep the answer concise."
)


def call_of(
    body: ChatBody,
    engine: BlendEngine,
    known: ChunkRegistry,
    documents: Sequence[str],
    arguments: DecodeArguments,
    schemas: Any,
) -> ModelCall[Said]:
    """The call of the engine for a conversation; nothing is generated yet.

    Parameters
    ----------
    body : ChatBody
    engine : BlendEngine
        The tenant's, named in traces as a chat's.
    known : ChunkRegistry
        Texts of the tenant's documents, and no others.
    documents : sequence of str
        Texts of the request's own documents.
    arguments : DecodeArguments
        How to decode, and whether the model shall think.
    schemas : SchemaCheck
        Sees the tenant's JSON schemas before they are compiled here.

    Raises
    ------
    PromptError
        If the chat template refuses the conversation.
    ConfigError
        If a tool or an option cannot be used.
    Problem
        400 if the chat template takes no such argument.
    """
    check_arguments(engine.tokenizer, body.chat_template_kwargs)
    if not body.tools and body.tool_choice not in (None, "auto", "none"):
        raise ConfigError("tool_choice", body.tool_choice, "give tools, too, or leave it out")
    tools = [tool.model_dump() for tool in body.tools or []] if body.tool_choice != "none" else []
    choice = body.tool_choice if tools else None
    form = None if body.response_format is None else body.response_format.model_dump(by_alias=True)
    turns = [_turn_of(one, f"messages[{number}]") for number, one in enumerate(body.messages)]
    conversation = Conversation(
        _with_documents(turns, documents), tools or None, choice, arguments["reasoning"], body.chat_template_kwargs
    )
    try:
        written = conversation.write(engine.tokenizer)
        retrieved = [RetrievedDocument((text,)) for text in dict.fromkeys(documents)]
        prompt = conversation.split(written.text, known, engine.config.text_separator, retrieved)
        grammar = answer_grammar(form, tools, choice, engine.tokenizer, schemas.check)
    except CacheBlendError as error:
        unread = [
            f"messages[{number}].tool_calls[{at}].function.arguments"
            for number, turn in enumerate(turns)
            for at, call in enumerate(turn.get("tool_calls", ()))
            if isinstance(call["function"]["arguments"], str)
        ]
        if unread and isinstance(error, PromptError):
            raise ConfigError(
                unread[0], None, "send a JSON object; the model's chat template refuses others"
            ) from error
        raise
    except (TypeError, ValueError, KeyError) as error:
        raise PromptError(f"this conversation cannot be written as a prompt ({type(error).__name__})") from error
    arguments = {**arguments, "reasoning": written.reasoning, "answer_begins": written.later}
    if grammar is not None:
        arguments["grammar"] = grammar
    elif written.opening:
        arguments["stop"] = [*body.stops, CALL_END]
    return ModelCall(
        engine,
        [prompt],
        arguments,
        lambda said: said,
        tools=tools or None,
        opening=written.opening,
        early=calls_early(arguments, engine.config),
        # An answer is not ended behind its first call: text and thoughts may name the mark of one.
        most=None if body.parallel_tool_calls else 1,
    )


def calls_in(read: ParsedAnswer, most: int | None) -> list[dict[str, Any]]:
    """The calls of a complete answer, at most ``most`` of them; unreadable calls come last, as text."""
    calls = [(one.name, json.dumps(one.arguments)) for one in read.calls]
    calls += [(one.name, one.raw) for one in read.unread]
    return [
        {"id": new_call_id(), "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in calls[:most]
    ]


def _with_documents(turns: list[dict[str, Any]], documents: Sequence[str]) -> list[dict[str, Any]]:
    """A conversation with documents within its system message."""
    if not documents:
        return turns
    context, first = "\n\n".join(documents), turns[0]
    if first["role"] == "system":
        return [turn_of("system", f"{first['content']}\n\n{context}"), *turns[1:]]
    return [turn_of("system", f"{_INSTRUCTIONS}\n\n{context}"), *turns]


def _turn_of(message: ChatMessage, place: str) -> dict[str, Any]:
    """A message as a turn of a chat template."""
    content = message.content or message.refusal or ""
    text = content if isinstance(content, str) else "".join(one.text for one in content)
    if message.role == "tool":
        if message.tool_call_id is None:
            raise ConfigError(f"{place}.tool_call_id", None, "give the id of the call that the tool has answered")
        return turn_of("tool", text, tool_call_id=message.tool_call_id, name=message.name or "")
    if message.role != "assistant":
        return turn_of("system" if message.role == "developer" else message.role, text)
    thought = message.reasoning_content or message.reasoning
    calls = [(one.id, one.function.name, _arguments_of(one.function.arguments)) for one in message.tool_calls or []]
    return turn_of("assistant", text, thought if isinstance(thought, str) else "", calls)


def _arguments_of(written: str) -> Any:
    """Arguments of a call in an earlier turn, as the template expects them; a cut call keeps its arguments as text."""
    try:
        given = json.loads(written.strip() or "{}", strict=False)
    except ValueError:
        return written
    return {} if given is None else given if isinstance(given, dict) else written


class Chat(AnswerRequest):
    """One request for a conversation."""

    kind, chunk_kind, mark = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, here: Session, body: ChatBody) -> None:
        if body.max_completion_tokens is not None:
            self.most_field = "max_completion_tokens"
        super().__init__(here, body, body.max_completion_tokens or body.max_tokens)
        self._conversation = body
        check_reasoning(self.engine.tokenizer, self.reasoning, most_thought=self.thought_most)
        DecodeOptions(**self.arguments())  # refused before anybody waits for it
        self._call: ModelCall[Said]

    def thinking(self) -> tuple[Reasoning, int | None]:
        """See `AnswerRequest.thinking`."""
        body: Any = self.body
        asked, most, own = body.level, body.reasoning.max_tokens, self.here.service.settings.rag
        level = thinks(own.reasoning if asked is None else asked, body.chat_template_kwargs)
        if asked is None and level and not self.model.thinks:  # what the server has for its other models
            level = False
        check_reasoning(self.engine.tokenizer, level, "reasoning_effort")
        return level, self.model.thought_tokens(level, own.reasoning_tokens if most is None else most)

    def prepare(self) -> None:
        """See `AnswerRequest.prepare`."""
        engine, known = self.engine.named(self.model.name, "chat"), self.here.known
        call = call_of(self._conversation, engine, known, self.documents, self.arguments(), self.here.schemas)
        self._call = replace(call, progress=bool(self._conversation.return_progress))
        self.charge(self._call.prompts)

    def choices(self, slot: Slot) -> Iterator[_ChatChoice]:
        """See `AnswerRequest.choices`."""
        for number in range(self.body.n):
            yield self.answer(slot, self._call, number, _ChatChoice)


class _ChatChoice(Choice):
    """An answer to a conversation."""

    async def pieces(self) -> AsyncIterator[dict[str, Any]]:
        """See `Choice.pieces`."""
        yield self._delta({"role": "assistant", "content": ""})
        reason = "stop"
        async for said, tokens in self.texts():
            if said.progress:
                yield {**self._delta({}), "prompt_progress": said.progress}
            if said.thought:
                yield self._delta(_thought(said.thought))
            if said.text:
                yield self._delta({"content": said.text}, tokens)
            if said.calls:
                yield self._delta({"tool_calls": [_call_delta(one) for one in said.calls]})
            if said.answer is not None:
                reason = _reason(said.answer, bool(said.split.calls), bool(said.split.unread))
        yield self._delta({}, self.rest(self.stream.result), reason)

    def whole(self, answer: Generation) -> dict[str, Any]:
        """See `Choice.whole`."""
        read = parse_calls(self.call.opening + answer.text, self.call.tools, begun=bool(self.call.opening))
        message: dict[str, Any] = {"role": "assistant", "content": read.content, **_thought(answer.thought)}
        if calls := calls_in(read, self.call.most):
            message |= {"content": message["content"] or None, "tool_calls": calls}
        reason = _reason(answer, bool(calls), len(calls) > len(read.calls))
        logprobs = conversation_logprobs(self.rest(answer))
        return {"index": self.index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _delta(
        self, delta: dict[str, Any], tokens: Sequence[TokenLogProb] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        logprobs = conversation_logprobs(tokens or None)
        return {"index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _thought(text: str) -> dict[str, str]:
    """A thought under both names that clients look for."""
    return {"reasoning": str(text), "reasoning_content": str(text)} if text else {}


def _call_delta(piece: CallPiece) -> dict[str, Any]:
    function = {"arguments": piece.arguments}
    if piece.name is None:
        return {"index": piece.index, "function": function}
    named = {"name": piece.name, **function}
    return {"index": piece.index, "id": piece.call_id, "type": "function", "function": named}


def _reason(answer: Generation, called: bool, unread: bool) -> str:
    """Why an answer ended. A call that was cut off does not count as a call."""
    reason = answer.report.finish_reason
    return "tool_calls" if called and not (unread and reason == "length") else reason


def _how_made(report: BlendReport) -> dict[str, Any]:
    return {
        "fidelity": report.fidelity,
        "ttft_s": report.ttft,
        "hits": report.hits,
        "misses": report.misses,
        "resumed": report.resumed_tokens,
        "tokens_to_store": report.tokens_to_store,
        "tiers": list(report.chunk_tiers),
        "missed": list(report.missed),
        "left_out": list(report.left_out),
        "recompute_ratio": report.recompute_ratio,
        "plain": report.plain,
        "plain_reason": report.plain_reason,
        "stopped_by": report.stopped_by,
        "found": list(report.found),
        "verification": report.verification.asdict(),
    }
