"""Reports of the engine's work."""

from __future__ import annotations

import threading
import uuid
from collections import Counter, OrderedDict
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

Fidelity = Literal["exact", "checked", "corrected", "approximate"]
"""How near an answer is to full prefill's; see `Verification`."""


@dataclass(frozen=True)
class Seconds:
    """Where the time to first token went, in seconds.

    Parameters
    ----------
    split, look_up, load, fuse, first_token : float
        ``load`` is the time the blended pass waited for KV; reading that ran beside it is not
        in it. ``first_token`` is the time from the logits to the first token.
    read : float
        All time spent reading KV, that beside the pass too; no part of the sum.
    """

    split: float = 0.0
    look_up: float = 0.0
    load: float = 0.0
    fuse: float = 0.0
    first_token: float = 0.0
    read: float = 0.0

    @property
    def ttft(self) -> float:
        """Time to first token: the sum."""
        return self.split + self.look_up + self.load + self.fuse + self.first_token


@dataclass(frozen=True)
class ExpectedTimes:
    """Times that the loading controller predicts for a request, in seconds.

    Parameters
    ----------
    read : float
        Reading the KV; compare with `Seconds.read`.
    fuse : float
        The blended pass by itself; compare with `Seconds.fuse`.
    prefill : float
        A full prefill.
    """

    read: float
    fuse: float
    prefill: float


@dataclass(frozen=True)
class DocumentUse:
    """Outcome of a retrieved document in one prompt.

    Parameters
    ----------
    document : str
        The beginning of the document, to recognise it by.
    outcome : str
        ``"hit"``: it stands in the prompt, and its KV was read from the store. ``"miss"``: it stands there, and its KV
        was computed. ``"not found"``: it does not stand there in any form that is looked for. ``"left out"``: it does
        not stand there because a later step of the chain, such as a reranker, handed on other documents, or because the
        prompt was too long.
    change : str
        In what it differs in the prompt from the document as it was retrieved; empty if in nothing. Such as
        ``"json-escaped"``, ``"html-escaped"``, ``"python-escaped"``, ``"unicode normal form NFC"``, ``"white space"``,
        ``"line-wrapped"``, ``"truncated at the end"``, ``"truncated at the start"``, ``"truncated at the ends"``,
        ``"within a longer chunk"``, ``"rewritten"``. Of one that was not found, ``"too short"`` says that it is
        not looked for.
    """

    document: str
    outcome: Literal["hit", "miss", "not found", "left out"]
    change: str = ""

    @property
    def found(self) -> bool:
        """True if the document is in the prompt."""
        return self.outcome in ("hit", "miss")

    def asdict(self) -> dict[str, str]:
        """The same as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Verification:
    """Result of comparing an answer with full prefill's.

    Parameters
    ----------
    status : str
        ``"off"``: it was not. ``"waiting"``: it will be, once nothing else waits; ``BlendEngine.verifications`` has the
        result then. ``"verified"``: the model itself gives this very answer. ``"corrected"``: it gave another one,
        which is the answer now. ``"given up"``: it could not be, so the answer is that from blended KV.
    kept_tokens : int
        Tokens of the first answer that stay.
    position : int
        Characters of the first answer that stay.
    before, after : str
        Its text from there on, and the text that stands there now.
    reason : str
        Why it was given up, or why there was nothing to do.
    ties : int
        Tokens that were kept although full prefill scores another one higher, by no more than rounding explains.
    seconds : float
        Time it took.
    id : str
        Its name, where it was made to wait.
    exact : bool
        Whether the first answer is full prefill's without a check, as nothing approximate was reused.
    fidelity : str
        How near the answer is to full prefill's; nothing is said of facts. ``"exact"``: it is full prefill's.
        ``"checked"``: it was compared, and is the same. ``"corrected"``: it was compared, and is full prefill's now.
        ``"approximate"``: it is from blended KV, and was not compared, or not yet.
    """

    status: Literal["off", "waiting", "verified", "corrected", "given up"] = "off"
    kept_tokens: int = 0
    position: int = 0
    before: str = ""
    after: str = ""
    reason: str = ""
    ties: int = 0
    seconds: float = 0.0
    id: str = ""
    exact: bool = False
    fidelity: Fidelity = field(init=False, default="approximate")

    def __post_init__(self) -> None:
        compared: dict[str, Fidelity] = {"corrected": "corrected", "verified": "checked"}
        object.__setattr__(self, "fidelity", "exact" if self.exact else compared.get(self.status, "approximate"))

    @property
    def done(self) -> bool:
        """True if the answer is full prefill's, either unchanged or corrected."""
        return self.status in ("verified", "corrected")

    def asdict(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class BlendReport:
    """How one prompt was answered.

    Parameters
    ----------
    input_ids : tuple of int
        Ids the model was fed.
    prefix_tokens, chunk_tokens, suffix_tokens : int
        Tokens of each part; text between chunks counts as neither.
    hits, misses : int
        Chunks that were read from the store, or stood in a kept prompt, and chunks that were not read.
    chunk_tiers : tuple of str
        For each chunk, in the order of the prompt, the tier that it was read from, such as ``"disk"`` or ``"memory"``;
        ``""`` if it was not stored.
    missed : tuple of str
        Of each chunk, in that order, why it was not read: ``"not stored"`` (new, erased or evicted), ``"stored
        otherwise"`` (for another model, or with other settings or neighbours), ``"left to be computed"`` (that is
        quicker, or its record failed); ``""`` if it was read. Empty if it is not known: of a prefill, and of stores on
        other machines.
    variants : tuple of int
        Chunks whose KV an earlier, verified prompt left behind nearly the same chunks, by their number in that order,
        from 0; see `BlendConfig.variants`.
    left_out : tuple of int
        Chunks that the context window had no room for, by their number in the prompt as it was given, from 0. All other
        figures of chunks are of the others.
    prefix_hit : bool
        Whether the prefix was read from the store, or was the beginning of a kept prompt.
    reused_tokens : int
        Tokens whose KV was read from the store, or was that of a kept prompt.
    blended_tokens : int
        Those of them that were not recomputed, and whose KV is not that of a full prefill: it was computed behind other
        text, or the store may have rounded it.
    tokens_to_store : int
        Tokens of the prefix and the chunks that were not stored, and whose KV goes into the store now.
    resumed_tokens : int
        First tokens that one of the last prompts, in memory (``prompt_cache``), had in common with this one. Their
        chunks count as hits.
    recomputed_tokens : tuple of int
        Reused chunk tokens recomputed on each layer.
    computed_tokens : tuple of int
        All rows computed on each layer: recomputed tokens, chunks not stored, and the suffix.
    work : float
        Floating-point work of all rows on all layers, scoring and checks included, as a share of
        a full prefill's.
    plain : bool
        Whether the prompt was prefilled in full.
    plain_reason : str
        Why it did, where that is not for the prompt's length: ``"verify='held' lets full prefill answer"``,
        ``"too little of it is stored to be worth reading"``, or ``"blending was found poor on this model"``.
        Else empty.
    lost : int
        Records that failed while they were loaded; the pass began again without them.
    recompute_ratio : float
        Share of the reused chunk tokens that was to be recomputed; 0 where plain prefill answered.
    expected : ExpectedTimes or None
        The loading controller's expectations, if it chose the ratio.
    seconds : Seconds
        Where the time to first token went.
    generated_tokens : int
        Tokens of the answer, including its thought.
    thought_tokens : int
        Tokens of the thought.
    finish_reason : str
        ``"stop"``, ``"length"``, or ``""`` before generation.
    stopped_by : str
        ``"repetition"``: the answer did nothing but repeat itself, and was ended; ``finish_reason`` is ``"stop"`` then.
        Else empty.
    documents : tuple of DocumentUse
        The use of each document that was retrieved for the prompt; empty where that is not known.
    found : tuple of bool
        For each chunk that was found because its text repeats, whether its KV was read. The other counts include it.
    verification : Verification
        How the answer was compared with full prefill.
    id : str
        Id of the answer.
    """

    input_ids: tuple[int, ...] = field(repr=False)
    prefix_tokens: int = 0
    chunk_tokens: int = 0
    suffix_tokens: int = 0
    hits: int = 0
    misses: int = 0
    chunk_tiers: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()
    variants: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()
    prefix_hit: bool = False
    reused_tokens: int = 0
    blended_tokens: int = 0
    tokens_to_store: int = 0
    resumed_tokens: int = 0
    recomputed_tokens: tuple[int, ...] = ()
    computed_tokens: tuple[int, ...] = ()
    work: float = 0.0
    plain: bool = False
    plain_reason: str = ""
    lost: int = 0
    recompute_ratio: float = 0.0
    expected: ExpectedTimes | None = None
    seconds: Seconds = field(default_factory=Seconds)
    generated_tokens: int = 0
    thought_tokens: int = 0
    finish_reason: str = ""
    stopped_by: str = ""
    documents: tuple[DocumentUse, ...] = ()
    found: tuple[bool, ...] = ()
    verification: Verification = field(default_factory=Verification)
    id: str = field(default_factory=lambda: uuid.uuid4().hex, repr=False, compare=False)

    @property
    def fidelity(self) -> Fidelity:
        """Whether the answer is approximate, checked, corrected or exact; see `Verification`."""
        return self.verification.fidelity

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens that the model was given."""
        return len(self.input_ids)

    @property
    def cached_tokens(self) -> int:
        """Number of tokens whose KV was reused exactly: neither blended nor recomputed."""
        return self.reused_tokens - (self.recomputed_tokens or (0,))[-1] - self.blended_tokens

    @property
    def ttft(self) -> float:
        """Time to first token, in seconds."""
        return self.seconds.ttft


def usage_of(reports: Sequence[BlendReport], n: int = 1) -> dict[str, Any]:
    """Tokens as OpenAI counts them, those of each prompt once for its ``n`` answers."""
    prompt = sum(one.prompt_tokens for one in reports[::n])
    answer = sum(one.generated_tokens for one in reports)
    reused = {name: sum(getattr(one, name) for one in reports[::n]) for name in ("cached_tokens", "blended_tokens")}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": reused,
        "completion_tokens_details": {"reasoning_tokens": sum(one.thought_tokens for one in reports)},
    }


@dataclass(frozen=True)
class FusedKV:
    """A prompt's KV, ready for decoding.

    Parameters
    ----------
    cache : transformers Cache
        KV of all positions. Decoding from it extends it.
    logits : Tensor, [vocab]
        Logits of the last position.
    input_ids : list of int
        Ids the model was fed.
    recomputed : tuple of Tensor, each [rows] long
        Positions whose KV was computed, layer by layer: recomputed chunk tokens, chunks that
        were not stored, and the suffix.
    deviation : Tensor or None, [tokens] float32
        KV deviation at the first check layer; NaN where it was not measured.
    report : BlendReport
        How it was made.
    done : RowsDone or None
        All rows the blended pass worked on; None after a plain prefill.
    """

    cache: Any
    logits: torch.Tensor
    input_ids: list[int]
    recomputed: tuple[torch.Tensor, ...]
    deviation: torch.Tensor | None
    report: BlendReport
    done: Any = None


@dataclass(frozen=True)
class TokenLogProb:
    """A token of an answer with its log-probability.

    Parameters
    ----------
    token : str
        Its text, special tokens and incomplete characters included.
    text : str
        Its text in the answer. A character of several tokens is added by the last of them.
    offset : int
        Where in the answer that begins.
    logprob : float
        Of the token.
    top : sequence of (str, float)
        Text and log-probability of the likeliest tokens in its place.
    """

    token: str
    text: str
    offset: int
    logprob: float
    top: Sequence[tuple[str, float]]


@dataclass(frozen=True)
class Generation:
    """An answer.

    Parameters
    ----------
    text : str
        The generated text, up to a stop string.
    token_ids : list of int
        The generated ids, those of a thought included.
    report : BlendReport
        How it was made.
    thought : str
        The model's thought before it, which is no part of the text.
    logprobs : tuple of TokenLogProb or None
        Of each token of the text, if they were asked for.
    recomputed : tuple of Tensor, each [rows] long
        As in `FusedKV`.
    deviation : Tensor or None, [tokens] float32
        As in `FusedKV`.
    """

    text: str
    token_ids: list[int]
    report: BlendReport
    thought: str = ""
    logprobs: tuple[TokenLogProb, ...] | None = field(default=None, repr=False)
    recomputed: tuple[torch.Tensor, ...] = field(default=(), repr=False, compare=False)
    deviation: torch.Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def verification(self) -> Verification:
        """Result of comparing the answer with full prefill's."""
        return self.report.verification


@dataclass(frozen=True)
class WarmReport:
    """Counts of what warming stored.

    Parameters
    ----------
    computed : int
        Chunks whose KV was computed and stored.
    present : int
        Chunks that were stored already, or given twice.
    skipped : int
        Chunks left out because the store would have passed its size limit, or cannot be written.
    tokens : int
        Tokens computed.
    bytes : int
        Bytes the computed records take.
    seconds : float
        Time it took.
    plain_reason : str
        Why the model's answers are not blended, so that nothing is stored; empty if they are.
    """

    computed: int
    present: int
    skipped: int
    tokens: int
    bytes: int
    seconds: float
    plain_reason: str = ""


@dataclass(frozen=True)
class AnswerStats:
    """Counts of a model's requests, and of what the store had for them.

    Parameters
    ----------
    requests : int
        Prompts that were answered.
    matched : int
        Prompts in which at least one known chunk was found, whether its KV was stored or not.
    hits, misses : int
        Chunks of those prompts whose KV was read from the store, and chunks whose KV was not there.
    reused_tokens : int
        Tokens whose KV was read from the store, or was that of a kept prompt.
    resumed_tokens : int
        Those of them that were the beginning of a kept prompt.
    documents_hit, documents_missed, documents_not_found, documents_left_out : int
        Retrieved documents by outcome, counted once for each prompt; see `DocumentUse`.
    documents_changed : int
        Documents, hit or missed, that a chain had rewritten.
    verified, corrected : int
        Answers that were confirmed by full prefill, and answers that were corrected.
    variants : int
        Chunks whose KV was stored by an earlier, verified prompt after nearly the same chunks.
    """

    requests: int = 0
    matched: int = 0
    hits: int = 0
    misses: int = 0
    reused_tokens: int = 0
    resumed_tokens: int = 0
    documents_hit: int = 0
    documents_missed: int = 0
    documents_not_found: int = 0
    documents_left_out: int = 0
    documents_changed: int = 0
    verified: int = 0
    corrected: int = 0
    variants: int = 0


@dataclass(frozen=True, eq=False)
class Newest:
    """Newest report of each model within a context; threads and tasks with a copy of the context share it."""

    outer: Newest | None
    thread: int = field(default_factory=threading.get_ident)
    reports: WeakKeyDictionary[Tally, BlendReport] = field(default_factory=WeakKeyDictionary)

    @staticmethod
    def here() -> Newest:
        """The reports of this context, created if there are none yet."""
        if (found := _newest.get()) is None or found.thread != threading.get_ident():
            _newest.set(found := Newest(found))
        return found


_newest: ContextVar[Newest | None] = ContextVar("cacheblend_rag_newest_reports", default=None)
# Answers of a model whose reports are found by id.
_REMEMBERED = 64


class Tally:
    """Counts answers from any thread. A copy starts at zero."""

    def __init__(self) -> None:
        self._stats = AnswerStats()
        self._lock = threading.Lock()
        self.reports = OrderedDict[str, BlendReport]()
        """The latest reports by id."""
        Newest.here()  # so that threads begun by the caller say what is newest

    def note(self, answer: Generation) -> None:
        """Count a complete answer."""
        report = answer.report
        here: Newest | None = Newest.here()
        while here is not None:
            here.reports[self] = report
            here = here.outer
        outcomes = Counter(use.outcome for use in report.documents)
        with self._lock:
            self.reports[report.id] = report
            if len(self.reports) > _REMEMBERED:
                self.reports.popitem(last=False)
            seen = self._stats
            self._stats = replace(
                seen,
                requests=seen.requests + 1,
                matched=seen.matched + (report.hits + report.misses > 0),
                hits=seen.hits + report.hits,
                misses=seen.misses + report.misses,
                reused_tokens=seen.reused_tokens + report.reused_tokens,
                variants=seen.variants + len(report.variants),
                resumed_tokens=seen.resumed_tokens + report.resumed_tokens,
                documents_hit=seen.documents_hit + outcomes["hit"],
                documents_missed=seen.documents_missed + outcomes["miss"],
                documents_not_found=seen.documents_not_found + outcomes["not found"],
                documents_left_out=seen.documents_left_out + outcomes["left out"],
                documents_changed=seen.documents_changed
                + sum(use.found and bool(use.change) for use in report.documents),
            )
        self.note_verification(report.verification)

    def note_verification(self, found: Verification) -> None:
        """Count a verified answer, at its end or later."""
        with self._lock:
            self._stats = replace(
                self._stats,
                verified=self._stats.verified + (found.status == "verified"),
                corrected=self._stats.corrected + (found.status == "corrected"),
            )

    def stats(self) -> AnswerStats:
        """Counts of all answers so far."""
        return self._stats

    @property
    def last(self) -> BlendReport | None:
        """Report of the newest answer in this context."""
        here = _newest.get()
        return None if here is None else here.reports.get(self)

    def __reduce__(self) -> tuple[type[Tally], tuple[()]]:
        return Tally, ()
