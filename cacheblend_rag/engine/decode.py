"""DECODE: text from a fused cache, by transformers' own generation."""

from __future__ import annotations

import copy
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, TypedDict, Unpack

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo
from transformers import GenerationConfig
from transformers.generation import LogitsProcessorList, StoppingCriteria
from transformers.modeling_outputs import CausalLMOutputWithPast

from cacheblend_rag.config import (
    DEFAULT_NEW_TOKENS,
    FLAG,
    VERIFY,
    BlendConfig,
    Kind,
    Reasoning,
    check_mapping,
    check_names,
    choice,
    kind_of,
    number,
    read_reasoning,
    whole,
)
from cacheblend_rag.engine.grammar import Grammar
from cacheblend_rag.engine.logits import Drawing, LogProbs, Penalties, TokenMask, logit_bias
from cacheblend_rag.errors import CacheBlendError, ConfigError, GenerationError
from cacheblend_rag.models.modules import CACHE_FIELD, cache_argument, evaluating, keeping_nothing
from cacheblend_rag.prompt.thoughts import BUDGETS, Thought, hidden_ids, marks_of, splitter_of
from cacheblend_rag.report import TokenLogProb

LEAST_PENALTY = 0.01
"""Repetition penalty from which scores divided by it stay finite."""
_PENALTY = number(f"from {LEAST_PENALTY}", lambda value: value >= LEAST_PENALTY)
_TEMPERATURE = number("of 0, which decodes greedily, or of 0.000001 or more", lambda t: t == 0 or t >= 1e-6)
_SHARE = number("from 0 to 1", lambda p: 0 <= p <= 1)
_TAKEN_OFF = number("from -2 to 2", lambda penalty: -2 <= penalty <= 2)
_BIAS = number("from -100 to 100", lambda bias: -100 <= bias <= 100)
# Options that choose among the likeliest tokens, with the values that leave all of them.
_NARROWING = {"top_k": (None, 0, 1), "top_p": (None, 1), "min_p": (None, 0)}
_SAMPLING = {"typical_p": (None, 1), "epsilon_cutoff": (None, 0), "eta_cutoff": (None, 0)}
MORE_OPTIONS = (
    *("bad_words_ids", "begin_suppress_tokens", "eos_token_id", "exponential_decay_length_penalty"),
    *("max_time", "min_length", "min_new_tokens", "no_repeat_ngram_size", "pad_token_id"),
    *("remove_invalid_values", "renormalize_logits", "sequence_bias", "suppress_tokens", *_SAMPLING),
)
"""Options of transformers' generation that hold here and are no fields."""
_GENERATION = kind_of("a GenerationConfig of transformers", lambda value: isinstance(value, GenerationConfig))
_PROCESSORS = kind_of(
    "a list of logits processors", lambda value: isinstance(value, Iterable) and all(callable(one) for one in value)
)
_GRAMMAR = kind_of("what engine.grammar(schema) gives", lambda value: isinstance(value, Grammar))


Step = Callable[[Mapping[str, Any]], torch.Tensor]
"""Takes what transformers hands to the model for one token, and gives its logits ``[1, 1, vocab]``."""

# So often a stretch stands directly behind itself before an answer counts as repeating.
_TIMES = 4
PROSE_TOKENS, OTHER_TOKENS = 128, 512
"""So many tokens all its copies have together, if it is prose and if it is not."""
# Share of letters and white space in prose. Rows of a table, of numbers or of JSON, rules and code have fewer.
_LETTERS = 0.875
_TAIL = 32  # ids at a prompt's end in which the mark of a thought is looked for


class DecodeArguments(TypedDict, total=False):
    """The fields of `DecodeOptions` as arguments of functions, for type checkers alone."""

    max_new_tokens: int | None
    stop: str | Sequence[str]
    stop_repetition: bool | None
    temperature: float | None
    do_sample: bool | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: dict[int, float] | None
    logprobs: bool | None
    top_logprobs: int | None
    additional_kwargs: dict[str, Any]
    seed: int | None
    verify: str | None
    reasoning: Reasoning
    reasoning_tokens: int | None
    generation_config: GenerationConfig | None
    logits_processor: Sequence[Any]
    grammar: Grammar | None
    answer_begins: str


def stop_texts(stop: str | Iterable[str] | None) -> list[str]:
    """A list of the texts that end an answer.

    Raises
    ------
    ConfigError
        If a value is not a text, or is empty.
    """
    texts = [stop] if isinstance(stop, str) else stop or ()
    if not isinstance(texts, Iterable) or any(not isinstance(text, str) or not text for text in texts):
        raise ConfigError("stop", stop, "use texts that are not empty")
    return list(texts)


def checked(kind: Kind) -> BeforeValidator:
    """The check of a field, None apart; an error names the field."""

    def check(value: Any, info: ValidationInfo) -> Any:
        return None if value is None else kind.check(info.field_name or "", value)

    return BeforeValidator(check)


def reasoning_of(value: Any) -> Reasoning:
    """Whether a call lets the model think; False if the call does not say."""
    return False if value is None else read_reasoning("reasoning", value)


def calls_early(arguments: DecodeArguments, config: BlendConfig) -> bool:
    """Whether tool calls may be handed out before their answer has ended: not if it may be corrected until then."""
    return (arguments.get("verify") or config.verify) != "always"


def _bias(given: Any) -> Any:
    """The addends by token id; ids may be written as texts, as JSON has them."""
    if given is None:
        return None
    ids = {str(token) for token in given} if isinstance(given, Mapping) else {""}
    if not all(token.isdecimal() for token in ids):
        raise ConfigError("logit_bias", given, "use a dict of numbers by token id")
    return {int(token): float(_BIAS.check(f"logit_bias[{token}]", value)) for token, value in given.items()}


def _more(given: Any) -> dict[str, Any]:
    """More options of generation, by their names in transformers."""
    check_mapping("additional_kwargs", given, "options of transformers' GenerationConfig")
    check_names((given or {}).items(), (*DecodeFields.model_fields, "max_tokens", *MORE_OPTIONS))
    for name in given or {}:
        if name not in MORE_OPTIONS:
            raise ConfigError("additional_kwargs", {name: given[name]}, f"give {name} by itself")
    return dict(given or {})


class DecodeFields(BaseModel):
    """Options of decoding: the fields of `DecodeOptions`, and of the models of every adapter."""

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=(), use_attribute_docstrings=True)

    max_new_tokens: Annotated[int | None, checked(whole(1))] = None
    """Most tokens of the answer. None takes the generation config's, else 512, or what the context window has room for
    if that is less."""
    temperature: Annotated[float | None, checked(_TEMPERATURE)] = None
    """0 decodes greedily. None takes the generation config's choice when one is given, else 0."""
    do_sample: Annotated[bool | None, checked(FLAG)] = None
    """False decodes greedily. True samples, at ``temperature`` or at the generation config's. None leaves the choice to
    ``temperature``."""
    top_p: Annotated[float | None, checked(number("above 0, up to 1", lambda p: 0 < p <= 1))] = None
    """Nucleus sampling: only the likeliest tokens with this total probability are sampled from."""
    top_k: Annotated[int | None, checked(whole())] = None
    """Number of the likeliest tokens that are sampled from; 0 for all."""
    min_p: Annotated[float | None, checked(_SHARE)] = None
    """Least probability of tokens that are sampled from, as a share of the likeliest token's; 0 for all."""
    repetition_penalty: Annotated[float | None, checked(_PENALTY)] = None
    """Above 1, tokens that are already in the prompt or the answer become less likely; 1 changes nothing."""
    presence_penalty: Annotated[float | None, checked(_TAKEN_OFF)] = None
    """Subtracted from the logit of each token that is already in the answer, as OpenAI defines it; from -2 to 2."""
    frequency_penalty: Annotated[float | None, checked(_TAKEN_OFF)] = None
    """Subtracted from the logit of a token for each time that it is in the answer; from -2 to 2."""
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_bias)] = None
    """Numbers from -100 to 100 that are added to the logits of single tokens, by token id."""
    logprobs: Annotated[bool | None, checked(FLAG)] = None
    """Return the log-probability of each token of the answer: the model's own, before bias, penalties and
    temperature. Of a verified answer they are those of its final tokens."""
    top_logprobs: Annotated[int | None, checked(whole(0, 20))] = None
    """Number of likeliest tokens to return with each token, up to 20. Needs ``logprobs=True``."""
    seed: Annotated[int | None, checked(whole(-(2**63), 2**64 - 1))] = None
    """Makes sampling repeatable."""
    verify: Annotated[str | None, checked(choice(VERIFY))] = None
    """Whether the answer is compared with full prefill's, as for `BlendConfig`. None takes the engine's option."""
    reasoning: Annotated[Reasoning, BeforeValidator(reasoning_of)] = False
    """Whether the model thinks before it answers: False, True, ``"low"``, ``"medium"`` or ``"high"``. It sets
    the chat template's switch, if there is one. A thought is never part of the answer."""
    reasoning_tokens: Annotated[int | None, checked(whole())] = None
    """Most tokens of a thought, not counted as tokens of the answer. After them the thought ends and the answer begins.
    None means 2,048; 512 if reasoning is low, 8,192 if it is high, and 256 if a model thinks without being asked to."""
    stop: Annotated[list[str], BeforeValidator(stop_texts)] = Field(default_factory=list)
    """Text or texts that end the answer and are not part of it. A call adds its texts to those of the model; an empty
    list in a call means that no text ends the answer."""
    stop_repetition: Annotated[bool | None, checked(FLAG)] = None
    """False lets an answer repeat itself without end. Otherwise it is ended when its last 128 tokens are the same prose
    four times or more; 512 tokens if they are not prose, such as rows of a table. The report says so. Answers by a
    grammar, and answers shorter than ``min_new_tokens``, are not ended."""
    generation_config: Annotated[Any, checked(_GENERATION)] = Field(default=None, exclude=True, repr=False)
    """A `GenerationConfig` of transformers with anything else it offers; the options above win over it."""
    logits_processor: Annotated[
        list[Any], checked(_PROCESSORS), BeforeValidator(lambda given: [] if given is None else given)
    ] = Field(default_factory=list, exclude=True, repr=False)
    """Logits processors of transformers, applied to each step."""
    additional_kwargs: Annotated[dict[str, Any], BeforeValidator(_more)] = Field(default_factory=dict)
    """More options of generation by their names in transformers, such as ``{"no_repeat_ngram_size": 3}``."""


class DecodeOptions(DecodeFields):
    """How an answer is generated.

    Raises
    ------
    ConfigError
        If a value is out of range, or would be without effect.
    """

    model_config = ConfigDict(frozen=True)

    grammar: Annotated[Grammar | None, checked(_GRAMMAR)] = None
    """The grammar of the answer, such as a JSON schema; see `BlendEngine.grammar`."""
    answer_begins: str = ""
    """Text that is written for the model where its answer begins, behind a thought. It is no part of the answer."""

    def __init__(self, **options: Unpack[DecodeArguments]) -> None:
        given: dict[str, Any] = dict(options)
        check_names(given.items(), tuple(DecodeOptions.model_fields))
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise field_error(error) from None
        self._check_sampling()
        for name in ("num_beams", "num_return_sequences"):
            if (count := getattr(self.generation_config, name, None) or 1) != 1:
                raise ConfigError(name, count, "use 1; a prompt has one answer here")
        if (forced := getattr(self.generation_config, "forced_eos_token_id", None)) is not None:
            raise ConfigError("forced_eos_token_id", forced, "leave it out; max_new_tokens ends an answer")

    def _check_sampling(self) -> None:
        """Refuse options that contradict each other or have no effect on greedy decoding."""
        if self.do_sample and self.temperature == 0:
            raise ConfigError("do_sample", True, "use a temperature above 0 with it; temperature=0 decodes greedily")
        if self.do_sample is False and self.temperature:
            remedy = f"leave it out to sample at temperature={self.temperature}, or leave out the temperature"
            raise ConfigError("do_sample", False, remedy)
        if self.top_logprobs is not None and not self.logprobs:
            raise ConfigError("top_logprobs", self.top_logprobs, "give logprobs=True, too")
        for name, wide in _NARROWING.items():
            value = getattr(self, name)
            if value not in wide and self._greedy and self.temperature != 0:
                raise ConfigError(
                    name, value, "use it with do_sample=True or a temperature; greedy decoding ignores it"
                )
        narrowed = [
            name for name, value in self.additional_kwargs.items() if value not in _SAMPLING.get(name, (value,))
        ]
        for name in sorted(narrowed) if self._greedy else ():
            remedy = f"use {name} with do_sample=True or a temperature; greedy decoding ignores it"
            raise ConfigError("additional_kwargs", {name: self.additional_kwargs[name]}, remedy)

    @property
    def _greedy(self) -> bool:
        if self.do_sample is not None:
            return not self.do_sample
        return self.temperature == 0 or (self.temperature is None and self.generation_config is None)

    def samples(self, model: Any, tokenizer: Any) -> bool:
        """Whether tokens are drawn by chance."""
        return bool(self.resolve(model, tokenizer).do_sample)

    @property
    def stops(self) -> tuple[str, ...]:
        """All stop strings, those of the generation config included."""
        given = getattr(self.generation_config, "stop_strings", None) or ()
        return (*self.stop, *((given,) if isinstance(given, str) else given))

    @property
    def requested_tokens(self) -> int | None:
        """Tokens of the answer that were asked for; None if no number was given."""
        return self.max_new_tokens or getattr(self.generation_config, "max_new_tokens", None)

    @property
    def most_tokens(self) -> int | None:
        """Requested tokens of the answer, including the thought before it if there shall be one."""
        if not self.reasoning:
            return self.requested_tokens
        budget = BUDGETS[self.reasoning]
        return (self.requested_tokens or DEFAULT_NEW_TOKENS) + (
            budget if self.reasoning_tokens is None else self.reasoning_tokens
        )

    def resolve(self, model: Any, tokenizer: Any) -> GenerationConfig:
        """The generation config transformers is given."""
        config = copy.deepcopy(self.generation_config or model.generation_config)
        if self.max_new_tokens is not None or (config.max_new_tokens is None and config.max_length is None):
            config.max_new_tokens, config.max_length = self.max_new_tokens or DEFAULT_NEW_TOKENS, None
        for name, value in self.additional_kwargs.items():
            setattr(config, name, copy.deepcopy(value))
        if self._greedy:
            config.do_sample = False
            for name in ("temperature", *_NARROWING):
                setattr(config, name, None)
        else:
            config.do_sample = self.do_sample or self.temperature is not None or config.do_sample
            for name in ("temperature", *_NARROWING):
                if (value := getattr(self, name)) is not None:
                    setattr(config, name, value)
        if self.repetition_penalty is not None:
            config.repetition_penalty = float(self.repetition_penalty)
        if config.eos_token_id is None:
            config.eos_token_id = tokenizer.eos_token_id
        if config.pad_token_id is None:
            eos = config.eos_token_id
            config.pad_token_id = (eos[0] if isinstance(eos, list) else eos) or 0
        # One answer, from the fused cache; stop strings are watched for here.
        config.num_beams, config.num_return_sequences = 1, 1
        config.use_cache, config.cache_implementation, config.stop_strings = True, None, None
        return config

    def noted(self, tokenizer: Any) -> LogProbs | None:
        """The processor that takes down the log-probabilities of one answer, if they are asked for."""
        return LogProbs(tokenizer, self.top_logprobs or 0) if self.logprobs else None

    def processors(self, noted: LogProbs | None, end_ids: Collection[int], vocabulary: int) -> list[Any]:
        """Logits processors of one answer, in their order: first what sees the model's own logits.

        Parameters
        ----------
        noted : LogProbs or None
            From `noted`.
        end_ids : collection of int
            Tokens that end the answer.
        vocabulary : int
            Number of the model's tokens.

        Raises
        ------
        ConfigError
            If a bias is for a token that the model does not have.
        """
        given = list(self.logits_processor)
        first: list[Any] = [one for one in (noted, *given) if isinstance(one, LogProbs)]
        if self.logit_bias:
            first.append(logit_bias(self.logit_bias, vocabulary))
        if self.presence_penalty or self.frequency_penalty:
            first.append(Penalties(self.presence_penalty or 0.0, self.frequency_penalty or 0.0))
        others = [one for one in given if not isinstance(one, LogProbs)]
        return [*first, *others, *([] if self.grammar is None else [TokenMask(self.grammar, end_ids)])]


def field_error(error: ValidationError) -> Exception:
    """The error of this package that pydantic has wrapped, or an equivalent error about the first field.

    An error that belongs to no field, such as one of loading a model, is given as it was.
    """
    first, *_ = error.errors()
    own = first.get("ctx", {}).get("error")
    if isinstance(own, CacheBlendError) or (isinstance(own, Exception) and not first["loc"]):
        return own
    return ConfigError(".".join(map(str, first["loc"])), first["input"], first["msg"])


@dataclass(frozen=True)
class DecodedAnswer:
    """A generated answer.

    Parameters
    ----------
    text : str
        The answer up to a stop string, including repetitions.
    token_ids : list of int
        All generated ids.
    finish_reason : str
        ``"stop"`` or ``"length"``.
    first_token_at : float
        `time.perf_counter` when the first token was known.
    thought : str
        The model's thought before it.
    thought_tokens : int
        Generated ids that belong to the thought.
    logprobs : tuple of TokenLogProb or None
        Log-probabilities of each token of the text, if requested.
    stopped_by : str
        ``"repetition"`` if it was ended because it repeated itself, else empty.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    first_token_at: float
    thought: str = ""
    thought_tokens: int = 0
    logprobs: tuple[TokenLogProb, ...] | None = None
    stopped_by: str = ""


def decode(
    model: Any,
    tokenizer: Any,
    *,
    input_ids: Sequence[int],
    cache: Any,
    logits: torch.Tensor,
    options: DecodeOptions,
    on_text: Callable[[str], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    step: Step | None = None,
    window: int | None = None,
) -> DecodedAnswer:
    """Generate from a fused cache; its logits give the first token without a second pass.

    Parameters
    ----------
    model, tokenizer : transformers objects
    input_ids : sequence of int
        Ids of the prompt.
    cache : transformers Cache
        KV of all prompt positions; it grows.
    logits : Tensor, [vocab]
        Logits of the last prompt position.
    options : DecodeOptions
        How to generate.
    on_text : callable, optional
        Called with each piece of text as soon as it is certain; those of a thought are of the type `Thought`.
    cancelled : callable
        Generation stops at the next token once this returns True.
    step : callable, optional
        Stands for the model's pass over each token after the first.
    window : int, optional
        Most tokens of the prompt with its answer.

    Raises
    ------
    GenerationError
        If transformers returned no token.
    """
    ids = torch.tensor([list(input_ids)], device=logits.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), cache_argument(model): cache}

    def continue_from_fused(model: Any, input_ids: torch.Tensor, **arguments: Any) -> Any:
        return type(model)._sample(_PrefilledModel(model, logits, cache, step), input_ids, **arguments)

    return generate(
        model,
        tokenizer,
        inputs=inputs,
        options=options,
        on_text=on_text,
        cancelled=cancelled,
        window=window,
        sample=continue_from_fused,
    )


def generate(
    model: Any,
    tokenizer: Any,
    *,
    inputs: Mapping[str, Any],
    options: DecodeOptions,
    on_text: Callable[[str], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    window: int | None = None,
    sample: Callable[..., Any] | None = None,
) -> DecodedAnswer:
    """Prefill and decode by transformers' own generation.

    Parameters
    ----------
    inputs : mapping
        Inputs of the model: ``input_ids``, and whatever belongs to them.
    model, tokenizer, options, on_text, cancelled, window
        As for `decode`.
    sample : callable, optional
        Stands for the model's own loop over tokens, prefill included.

    Raises
    ------
    GenerationError
        If transformers returned no token.
    """
    ids, config = inputs["input_ids"], options.resolve(model, tokenizer)
    prompt_tokens = ids.shape[1]
    if window is not None:
        if config.max_new_tokens is None:
            config.max_length = min(config.max_length, window)
        else:
            config.max_new_tokens = min(config.max_new_tokens, max(1, window - prompt_tokens))
    end_ids = frozenset(end_ids_of(config, tokenizer))
    thinking = Thinking(
        tokenizer,
        ids[0].tolist(),
        options.reasoning,
        options.reasoning_tokens,
        options.answer_begins,
        options.grammar is not None,
        end_ids,
    )
    most = thinking.make_room(config, prompt_tokens, window)
    repeating = _repetition(options, config, end_ids, tokenizer)
    assembler = _TextAssembler(thinking, options, end_ids, prompt_tokens, most, on_text, cancelled, repeating)
    noted = options.noted(tokenizer)
    vocabulary = model.config.get_text_config().vocab_size
    processors = [thinking.of_answer(one) for one in options.processors(noted, end_ids, vocabulary)]
    processors.append(thinking)
    if options.seed is not None:
        sample = partial(_drawn_by, options.seed, sample or type(model)._sample)
    with evaluating(model):
        keeping_nothing(model).generate(
            **inputs,
            generation_config=config,
            stopping_criteria=[assembler],
            logits_processor=processors,
            custom_generate=sample,
        )
    answer = assembler.result()
    return answer if noted is None else replace(answer, logprobs=tuple(noted.rest(answer.token_ids, answer.text)))


def _repetition(
    options: DecodeOptions, config: GenerationConfig, end_ids: Collection[int], tokenizer: Any
) -> Callable[[Sequence[int]], bool]:
    """Whether the ids of an answer repeat themselves and end it; never where it has a length or a form to keep to."""
    if options.stop_repetition is False or options.grammar is not None or not end_ids:
        return lambda ids: False
    least = config.min_new_tokens or 0

    def text_of(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    # Where as many tokens must be as may be, the length ends it.
    return lambda ids: len(ids) > least and repeats(ids, text_of)


def repeats(ids: Sequence[int], text_of: Callable[[list[int]], str]) -> bool:
    """Whether a text does nothing but repeat itself at its end.

    The text ends with the same tokens four times or more, over at least 128 tokens of prose or 512 of anything else: a
    table, a matrix, a rule or JSON may well repeat a line.

    Parameters
    ----------
    ids : sequence of int
        Token ids of the text.
    text_of : callable
        Converts ids to text.
    """
    period = shortest_period(ids, PROSE_TOKENS)
    if not period:
        return False
    text = text_of(list(ids[-2 * period :]))
    letters = sum(one.isspace() or unicodedata.category(one)[0] in "LM" for one in text)
    is_prose = not text.isspace() and letters >= _LETTERS * max(len(text), 1)
    return is_prose or bool(shortest_period(ids, OTHER_TOKENS))


def shortest_period(ids: Sequence[int], least: int) -> int:
    """Length of the shortest sequence that ends ids four times, over ``least`` tokens; 0 if none does."""
    count, last = len(ids), ids[-1] if ids else None
    if count < least:
        return 0
    for period in range(1, count // _TIMES + 1):
        span = max(_TIMES * period, least)
        if ids[-1 - period] == last and ids[count - span : count - period] == ids[count - span + period :]:
            return period
    return 0


class _PrefilledModel:
    """A model whose prefill is already done.

    transformers' sampling loop asks the model for its prefill and then for one token at a time;
    this hands it the fused logits first and is the model in everything else, or in all but its steps.
    """

    def __init__(self, model: Any, logits: torch.Tensor, cache: Any, step: Step | None) -> None:
        self._model, self._logits, self._cache, self._step = model, logits, cache, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _prefill(self, *args: object, **kwargs: object) -> CausalLMOutputWithPast:
        return self._output(self._logits[None, None])

    def __call__(self, return_dict: bool = True, **inputs: Any) -> Any:
        if self._step is None or cache_argument(self._model) not in inputs:
            self._step = None  # at the length where its frequencies change, Phi-3 reads all anew, and goes on from that
            return self._model(**inputs, return_dict=return_dict)
        return self._output(self._step(inputs))

    def _output(self, logits: torch.Tensor) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=logits, **{CACHE_FIELD: self._cache})


def _drawn_by(seed: int, sample: Callable[..., Any], model: Any, input_ids: torch.Tensor, **arguments: Any) -> Any:
    """The sampling loop, its tokens drawn by a seed if they are drawn at all."""
    config, processors = arguments["generation_config"], arguments["logits_processor"]
    if config.do_sample:
        config.do_sample = False
        arguments["logits_processor"] = LogitsProcessorList([*processors, Drawing(seed, input_ids.device)])
    return sample(model, input_ids, **arguments)


class _TextAssembler(StoppingCriteria):  # type: ignore[misc]
    """Turns generated ids into text, ends at stop strings, and hands out what is certain.

    It is a stopping criterion and no streamer because transformers asks its criteria first: an
    answer then ends with the token that completes a stop string, not with the one after.
    """

    def __init__(
        self,
        thinking: Thinking,
        options: DecodeOptions,
        end_ids: frozenset[int],
        prompt_tokens: int,
        most: int | None,
        on_text: Callable[[str], None] | None,
        cancelled: Callable[[], bool],
        repeating: Callable[[Sequence[int]], bool] = lambda ids: False,
    ) -> None:
        self._repeating, self._repeats = repeating, False
        self._thinking, self._stops, self._end_ids = thinking, options.stops, end_ids
        self._longest_stop = max(map(len, self._stops), default=0)
        self._on_text, self._cancelled = on_text, cancelled
        self._prompt_tokens, self._most = prompt_tokens, most
        self._ids: list[int] = []
        self._text = self._thought = ""
        self._sent = 0
        self._context, self._read = (0, 0)  # ids[context:read] are text already and give the next ids their context
        self._stopped = False
        self._first_token_at = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Take the newest id; true when the answer is complete."""
        if not self._ended() and not self._full():
            if not self._ids:
                self._first_token_at = time.perf_counter()
            self._ids = input_ids[0, self._prompt_tokens :].tolist()
            self._take_text(final=False)
            if not (self._thinking.under_way or self._ended()):
                self._repeats = self._repeating(self._ids[self._thinking.thought_tokens :])
        done = self._stopped or self._repeats or self._full() or self._cancelled()
        return torch.full((len(input_ids),), done, dtype=torch.bool, device=input_ids.device)

    def result(self) -> DecodedAnswer:
        """The whole answer; what was held back is handed out now."""
        if not self._ids:
            raise GenerationError("transformers returned no token; check the generation config")
        self._take_text(final=True)
        self._send(len(self._text))
        reason = "stop" if self._ended() else "length"
        tokens = self._thinking.thought_tokens
        stopped_by = "repetition" if self._repeats else ""
        return DecodedAnswer(
            self._text, self._ids, reason, self._first_token_at, self._thought, tokens, stopped_by=stopped_by
        )

    def _ended(self) -> bool:
        # On a GPU transformers may run one step past the end; that token is not part of the answer.
        return self._stopped or self._repeats or (bool(self._ids) and self._ids[-1] in self._end_ids)

    def _full(self) -> bool:
        """Whether the answer has as many tokens as it may have; those of a thought do not count."""
        if self._most is None or self._thinking.under_way:
            return False
        return len(self._ids) - self._thinking.thought_tokens >= self._most

    def _take_text(self, final: bool) -> None:
        if self._stopped:
            return
        before = self._thinking.text(self._ids[self._context : self._read])
        after = self._thinking.text(self._ids[self._context :])
        new = after[len(before) :]
        if new.endswith("\N{REPLACEMENT CHARACTER}") and not final:
            new = ""
        elif new:
            self._context, self._read = self._read, len(self._ids)
        held = self._thinking.splitter.undecided + new
        if held.isspace() and any(stop in held for stop in self._stops):
            self._thinking.splitter.settle()
        for piece in self._thinking.take(new, final):
            if isinstance(piece, Thought):
                self._thought += piece
                if self._on_text is not None:
                    self._on_text(piece)
            elif not self._stopped:
                self._take_answer(piece)

    def _take_answer(self, piece: str) -> None:
        """A piece of the answer, which may hold what ends it."""
        searched = max(0, len(self._text) - self._longest_stop)
        self._text += piece
        found = [at for at in (self._text.find(stop, searched) for stop in self._stops) if at >= 0]
        if found:
            self._stopped = True
            self._text = self._text[: min(found)]
        self._send(self._certain())

    def _certain(self) -> int:
        """Length of the text that no stop string can still take back."""
        if not self._stopped:
            for start in range(max(0, len(self._text) - self._longest_stop), len(self._text)):
                if any(stop.startswith(self._text[start:]) for stop in self._stops):
                    return start
        return len(self._text)

    def _send(self, stop: int) -> None:
        if stop > self._sent:
            if self._on_text is not None:
                self._on_text(self._text[self._sent : stop])
            self._sent = stop


class Thinking:
    """Follows one answer token by token, and knows which of them are thought.

    Parameters
    ----------
    tokenizer : transformers tokenizer
    prompt_ids : sequence of int
    reasoning : bool or str
        Whether the model shall think.
    most : int or None
        Most tokens of its thought; by default as many as its reasoning is worth.
    begins : str
        Text with which the answer is begun for the model. It is no part of the answer.
    constrained : bool
        Whether the answer has a form. Then it is told apart from a thought by force: a thought that is wanted is begun
        for the model, and one that is under way has to end.
    end_ids : collection of int
        Tokens that end the answer.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_ids: Sequence[int],
        reasoning: Reasoning = False,
        most: int | None = None,
        begins: str = "",
        constrained: bool = False,
        end_ids: Collection[int] = (),
    ) -> None:
        self._tokenizer, self.marks, self._begins = tokenizer, marks_of(tokenizer), begins
        self._ends = sorted(end_ids)
        self._hidden = hidden_ids(tokenizer, self.marks)
        self.constrained = constrained or bool(begins)
        in_thought = self.marks.opened_by(self.text(list(prompt_ids[-_TAIL:])))
        self.splitter = splitter_of(self.marks, in_thought, begins)
        self.budget = BUDGETS[reasoning] if most is None else most
        self.tokens = 0
        """Tokens so far that are thought, or not known to be answer."""
        self._forced = deque[int]()  # ids that come next, whatever the model wants
        self._answer_begun = not self.constrained
        if self.constrained and not in_thought:
            if reasoning and self.marks.known:
                self._force(self.marks.opening)
            else:
                self._force((self.marks.answer[0] if self.marks.channels else "") + begins)
                self._answer_begun = True
                if not self._forced:
                    self.splitter.settle()

    def text(self, ids: list[int]) -> str:
        """Text of ids, with the marks of thoughts in it where these are special tokens."""
        if self._hidden is None:
            return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        shown = [one for one in ids if one not in self._hidden]
        return str(self._tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def make_room(self, config: GenerationConfig, prompt_tokens: int, window: int | None) -> int | None:
        """Let an answer be longer by its thought, as far as the window holds both; most tokens of the answer itself.

        Parameters
        ----------
        config : GenerationConfig
            Its limit is that of the answer, and that of both together afterwards.
        prompt_tokens : int
        window : int or None
            Most tokens of the prompt with its answer.
        """
        most: int | None = config.max_new_tokens
        if most is None and config.max_length is not None:
            most = config.max_length - prompt_tokens
        if most is None or most < 1:
            return None
        marks = len(self._ids(self.marks.opening + self.marks.closing + self._begins))
        room = most + marks + self.budget if window is None else max(most, window - prompt_tokens)
        self.budget = max(0, min(self.budget, room - most - marks))
        config.max_new_tokens, config.max_length = min(room, most + marks + self.budget), None
        return most

    def take(self, text: str, final: bool = False) -> list[str]:
        """The pieces that are certain after one more token, whose text is given."""
        splitter, answered = self.splitter, self.splitter.place == "answer" and not self._forced
        pieces = splitter.feed(text)
        if final:
            pieces += splitter.end()
        else:
            self.tokens += not (answered or any(not isinstance(one, Thought) for one in pieces))
        # The token that ended a thought may hold more, which has not the form of the answer.
        return pieces if self._answer_begun else [one for one in pieces if isinstance(one, Thought)]

    @property
    def thought_tokens(self) -> int:
        """Tokens of the answer so far that are thought, the marks around it included."""
        return self.tokens if self.splitter.thought or self._begins else 0

    @property
    def under_way(self) -> bool:
        """Whether the next token still belongs to the thought, as far as is known."""
        begins = self.marks.known and bool(self.splitter.undecided.strip())  # so far it is the beginning of a mark
        return bool(self._forced) or begins or self.splitter.place in ("thought", "header")

    def of_answer(self, processor: Any) -> Any:
        """The processor, kept to the answer where it is of the answer's form or takes down its log-probabilities."""

        def masked(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self._begin_answer()
            begun = self._answer_begun and not self._forced and self.splitter.place in ("answer", "behind")
            return processor(input_ids, scores) if begun else scores

        def noted(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            processor(input_ids, scores)
            if self.under_way or self.splitter.place == "behind":
                processor.pass_over()
            return scores

        return masked if isinstance(processor, TokenMask) else noted if isinstance(processor, LogProbs) else processor

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores ``[1, vocab]`` with minus infinity for what may not come next: the logits processor behind all others.

        It is an object, as transformers looks at the signature of each processor at each step: 0.3 ms for a function.
        """
        if (token := self.next_forced()) is not None:
            scores = torch.full_like(scores, float("-inf"))
            scores[0, token] = 0.0
        elif self.constrained and self.splitter.place == "thought" and self._ends:
            scores = scores.clone()  # an answer that has a form does not end before it has begun
            scores[:, self._ends] = float("-inf")
        return scores

    def next_forced(self) -> int | None:
        """The id that is forced next; None if the model chooses."""
        self._begin_answer()
        if not self._forced and self.splitter.place == "thought" and self.tokens >= self.budget:
            self._force(self.marks.closing + self._begins)
            self._answer_begun = True
        return self._forced.popleft() if self._forced else None

    def _begin_answer(self) -> None:
        """Behind a thought that the model has ended, begin an answer that has a form."""
        if not self._answer_begun and self.splitter.thought and self.splitter.place != "thought":
            self._answer_begun = True
            self._force(self.marks.behind + self._begins)

    def _force(self, text: str) -> None:
        self._forced.extend(self._ids(text))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []


def default_room(window: int | None) -> int:
    """Tokens that room is made for where an answer's length is not given: the default, a quarter of the window at most.

    Parameters
    ----------
    window : int or None
        The model's context window, in tokens.
    """
    return DEFAULT_NEW_TOKENS if window is None else max(1, min(DEFAULT_NEW_TOKENS, window // 4))


def end_ids_of(config: GenerationConfig | None, tokenizer: Any) -> list[int]:
    """Tokens that end an answer, from the generation config or else the tokenizer; empty if neither names any."""
    end = getattr(config, "eos_token_id", None)
    end = tokenizer.eos_token_id if end is None else end
    if end is None:
        return []
    return list(end) if isinstance(end, Iterable) else [int(end)]
