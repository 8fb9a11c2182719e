"""Tracking: LlamaIndex's instrumentation tells which nodes any retriever of the process returns.

There is one listener for the process, because LlamaIndex's root dispatcher gives none back. It notes nodes with the
tracker of the context in which a retriever is called.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from contextvars import ContextVar
from inspect import BoundArguments
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.instrumentation.events.synthesis import SynthesizeEndEvent
from llama_index.core.instrumentation.span import BaseSpan
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import BaseNode, Document, MetadataMode, NodeWithScore, TextNode
from pydantic import PrivateAttr

from cacheblend_rag.engine.llm_base import known_chunks
from cacheblend_rag.prompt.matching import RetrievedDocument
from cacheblend_rag.prompt.registry import ChunkRegistry, Match, chunk_text
from cacheblend_rag.report import BlendReport, DocumentUse

# Known texts are indexed every few characters by so many; a part of both together is always seen.
_STEP, _SEED = 16, 32
# Shorter parts are not worth a chunk of their own.
_SHORTEST = 64
# A rewritten node whose text is one part of the original, or known chunks, for this share is found as these.
_MOSTLY = 0.8
# Nodes that count as retrieved lately.
_RECENT = 128
# Spans that never end are forgotten after so many others.
_SPANS = 16_384
_SUMS = "cacheblend"
"""Name under which ``Response.metadata`` has what all calls of the model for it came to."""
# Of what several calls say of a document, that which holds for all of them together.
_BEST = ("hit", "miss", "not found", "left out")
_SUMMED = ("hits", "misses", "reused_tokens", "prompt_tokens", "generated_tokens")


def find_parts(
    text: str, known: Iterable[str], gaps: Sequence[tuple[int, int]] | None = None
) -> Iterator[tuple[Match, str]]:
    """Stretches of a text that also stand in one of the known texts.

    Parameters
    ----------
    text : str
        Where to look.
    known : iterable of str
        Texts that were cut; of equal stretches, those of the first win.
    gaps : sequence of (int, int), optional
        Within which characters to look; by default everywhere.

    Yields
    ------
    (Match, str)
        The stretch, as long as it can be and without the white space around it, in the order in
        which they stand, not overlapping; and the known text it is part of. Those of fewer than
        64 characters are left out.
    """
    gaps = [gap for gap in gaps or [(0, len(text))] if gap[1] - gap[0] >= _SHORTEST]
    if not gaps:
        return
    seeds: dict[str, tuple[str, int]] = {}
    for one in known:
        for at in range(0, len(one) - _SEED + 1, _STEP):
            seeds.setdefault(one[at : at + _SEED], (one, at))
    for start, stop in gaps:
        at = start
        while at + _SEED <= stop:
            found = seeds.get(text[at : at + _SEED])
            if found is None:
                at += 1
                continue
            match = _extend(text, at, start, stop, *found)
            at = start = match.stop
            part = text[match.start : match.stop]
            begin = match.start + len(part) - len(part.lstrip())
            match = Match(begin, begin + len(part.strip()))
            if match.stop - match.start >= _SHORTEST:
                yield match, found[0]


def _extend(text: str, at: int, start: int, stop: int, known: str, place: int) -> Match:
    """The longest stretch around an equal seed within which both texts are equal."""
    begin, end, other = at, at + _SEED, place + _SEED
    while begin > start and place > 0 and text[begin - 1] == known[place - 1]:
        begin, place = begin - 1, place - 1
    while end < stop and other < len(known) and text[end] == known[other]:
        end, other = end + 1, other + 1
    return Match(begin, end)


def node_texts(node: BaseNode) -> list[str]:
    """Texts of a node that a prompt may contain: with the model's metadata, and without."""
    forms = (MetadataMode.LLM, MetadataMode.NONE)
    texts = [chunk_text(node.get_content(metadata_mode=form)) for form in forms]
    return [text for text in dict.fromkeys(texts) if text]


class NodeTracker:
    """Keeps the texts of retrieved nodes, and which of them are the newest.

    Parameters
    ----------
    known : ChunkRegistry
        Gets their texts.

    Notes
    -----
    Safe to use from several threads.
    """

    def __init__(self, known: ChunkRegistry) -> None:
        self.known = known
        self._recent: OrderedDict[str, str] = OrderedDict()  # by id of the node, the last retrieved last
        self._lock = threading.Lock()

    def note(self, nodes: Sequence[BaseNode]) -> None:
        """Note retrieved nodes."""
        self.known.add(text for node in nodes for text in node_texts(node))
        with self._lock:
            for node in nodes:
                for text in node_texts(node)[:1]:
                    self._recent[node.node_id] = text
                    self._recent.move_to_end(node.node_id)
            while len(self._recent) > _RECENT:
                self._recent.popitem(last=False)

    def forget(self, texts: Iterable[str] | None = None) -> None:
        """Forget that these texts, or all texts, were retrieved."""
        with self._lock:
            gone = set(self._recent.values() if texts is None else texts)
            for node_id in [one for one, text in self._recent.items() if text in gone]:
                del self._recent[node_id]

    @property
    def recent(self) -> list[str]:
        """Texts of the last retrieved nodes, the newest first."""
        with self._lock:
            return list(dict.fromkeys(reversed(self._recent.values())))

    def note_given(self, nodes: Sequence[BaseNode], inside: bool) -> None:
        """Note nodes that a synthesizer was given and that no retriever returned.

        Within a query engine these are those that have a document, such as neighbours of retrieved nodes. Others are
        made of answers, or cut of retrieved nodes for citations.
        """
        new = [node for node in nodes if self._recent.get(node.node_id) is None]
        if inside and (len(new) < len(nodes) or not _cut_of_retrieved(nodes)):
            new = [node for node in new if isinstance(node, Document) or node.ref_doc_id is not None]
        elif inside:
            return
        self.note(new)

    def documents(self, nodes: Sequence[BaseNode]) -> tuple[RetrievedDocument, ...]:
        """The documents among a synthesizer's nodes; the retrieved documents if all nodes are parts."""
        known = [(node, original) for node in nodes if (original := self._recent.get(node.node_id)) is not None]
        retrieved = [RetrievedDocument(texts) for node in _retrieved.get() if (texts := tuple(node_texts(node)))]
        cut = not known and _cut_of_retrieved(nodes)
        _retrieved.set(())
        if not known:
            return tuple(retrieved) if cut else ()
        found = []
        for node, original in known:
            texts = tuple(node_texts(node))
            found.append(RetrievedDocument(texts) if original in texts else RetrievedDocument((original,), texts))
        return tuple(found)

    def note_rewritten(self, nodes: Iterable[BaseNode]) -> None:
        """Note the new texts of retrieved nodes. Nodes made of answers and questions are not documents."""
        for node in nodes:
            original = self._recent.get(node.node_id)
            text = chunk_text(node.get_content(metadata_mode=MetadataMode.LLM))
            if original is None or text in self.known:
                continue
            known = sum(match.stop - match.start for match in self.known.find(text))
            longest = max((part.stop - part.start for part, _ in find_parts(text, [original])), default=0)
            if max(known, longest) < _MOSTLY * len(text):
                self.known.add([text])
                self.known.forms.note(original, text)


shared_tracker = NodeTracker(known_chunks)
"""Where nodes are noted outside of any `tracking` with a registry."""


class _Synthesis:
    """The answer that a synthesizer makes of some documents, and the sums of its calls of the model."""

    def __init__(
        self, outer: _Synthesis | None, tracker: NodeTracker, documents: tuple[RetrievedDocument, ...] = ()
    ) -> None:
        self.outer, self.documents, self._tracker = outer, documents, tracker
        self.sums: dict[str, Any] = {**dict.fromkeys(("answers", *_SUMMED), 0), "documents": [], "verification": {}}
        self._uses: list[DocumentUse] = []
        self._lock = threading.Lock()

    def note(self, report: BlendReport) -> None:
        """One call has answered."""
        with self._lock:
            self.sums["answers"] += 1
            for name in _SUMMED:
                self.sums[name] += getattr(report, name)
            pairs = zip(self._uses or report.documents, report.documents, strict=True)
            self._uses = [min(pair, key=lambda use: _BEST.index(use.outcome)) for pair in pairs]
            self.sums["documents"] = [one.asdict() for one in self._uses]
            self.sums["verification"] = report.verification.asdict()  # of the last call, whose words the answer has
            if self.sums.get("fidelity") != "approximate":  # as is what any call made of others' words
                self.sums["fidelity"] = report.fidelity

    def end(self) -> None:
        """No more calls come; warn of documents that none of them held."""
        looked_for = [one for one in self._uses if not one.change or one.found]
        self._tracker.known.warn_of_missing(sum(not one.found for one in looked_for), len(looked_for))

    def pieces(self, stream: Generator[str, None, None]) -> Generator[str, None, None]:
        """A stream's pieces, made within this."""
        with closing(stream):
            while True:
                token = _synthesis.set(self)
                try:
                    piece = next(stream, None)
                finally:
                    _synthesis.reset(token)
                if piece is None:
                    self.end()
                    return
                yield piece

    async def apieces(self, stream: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """`pieces` of an asynchronous stream."""
        async with aclosing(stream):
            while True:
                token = _synthesis.set(self)
                try:
                    piece = await anext(stream, None)
                finally:
                    _synthesis.reset(token)
                if piece is None:
                    self.end()
                    return
                yield piece


_synthesis: ContextVar[_Synthesis | None] = ContextVar("cacheblend_rag_llama_index_synthesis", default=None)


def answers_noted() -> Callable[[BlendReport], None]:
    """Callback that notes answers for the synthesizer that now calls the model; streams answer after it has ended."""
    under_way = _synthesis.get()
    return under_way.note if under_way is not None else lambda report: None


def documents_retrieved() -> tuple[RetrievedDocument, ...]:
    """Documents of the synthesizer that is calling the model."""
    under_way = _synthesis.get()
    return under_way.documents if under_way is not None else ()


# Nodes that were retrieved last, and of which no synthesizer has made an answer yet.
_retrieved: ContextVar[tuple[BaseNode, ...]] = ContextVar("cacheblend_rag_llama_index_retrieved", default=())
# None: nothing is noted.
_tracker: ContextVar[NodeTracker | None] = ContextVar("cacheblend_rag_llama_index_tracker", default=shared_tracker)
_lock = threading.Lock()
_registered = False


class _Retrieved(BaseEventHandler):
    """Notes the nodes that retrievers return, and adds the reuse to responses."""

    @classmethod
    def class_name(cls) -> str:
        return "CacheBlendRetrieved"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        if isinstance(event, RetrievalEndEvent) and (tracker := _tracker.get()) is not None:
            nodes = [one.node for one in event.nodes]
            tracker.note(nodes)
            _retrieved.set(tuple(nodes))
        if isinstance(event, SynthesizeEndEvent) and (made := _synthesis.get()) is not None:
            _synthesis.set(made.outer)
            response = event.response
            # The model may be called only when a stream is read; its sums grow until then.
            if isinstance(response, StreamingResponse):
                response.response_gen = made.pieces(response.response_gen)
            elif isinstance(response, AsyncStreamingResponse):
                response.response_gen = made.apieces(response.response_gen)
            elif made.sums["answers"]:
                made.end()
            else:  # another model's
                return
            response.metadata = {**(response.metadata or {}), _SUMS: made.sums}


class _Synthesized(BaseSpanHandler[BaseSpan]):
    """Notes the start of synthesizers, and the nodes and texts that they are given."""

    # Spans of query engines and synthesizers, and all within them. What these ask may be made of answers.
    _inside: OrderedDict[str, None] = PrivateAttr(default_factory=OrderedDict)

    @classmethod
    def class_name(cls) -> str:
        return "CacheBlendSynthesized"

    def span_enter(
        self,
        id_: str,
        bound_args: BoundArguments,
        instance: Any = None,
        parent_id: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        inside = parent_id in self._inside
        if inside or isinstance(instance, (BaseQueryEngine, BaseSynthesizer)):
            self._inside[id_] = None
            if len(self._inside) > _SPANS:
                self._inside.popitem(last=False)
        if not isinstance(instance, BaseSynthesizer):
            return
        name = id_.partition("-")[0].rpartition(".")[2]
        tracker = _tracker.get()
        if name in ("synthesize", "asynthesize"):
            documents: tuple[RetrievedDocument, ...] = ()
            if tracker is not None:
                given: Sequence[NodeWithScore] = bound_args.arguments.get("nodes", ())
                nodes = [one.node for one in given]
                tracker.note_given(nodes, inside)
                documents = tracker.documents(nodes)
                tracker.note_rewritten(nodes)
            _synthesis.set(_Synthesis(_synthesis.get(), tracker or shared_tracker, documents))
        elif name in ("get_response", "aget_response") and not inside and tracker is not None:
            texts: Sequence[str] = bound_args.arguments.get("text_chunks", ())
            tracker.note_given([TextNode(id_=text, text=text) for text in texts], inside)

    def span_exit(self, id_: str, *args: Any, **kwargs: Any) -> None:
        self._inside.pop(id_, None)

    span_drop = span_exit

    def new_span(self, *args: Any, **kwargs: Any) -> None:
        return None

    prepare_to_exit_span = prepare_to_drop_span = new_span


def _cut_of_retrieved(nodes: Sequence[BaseNode]) -> bool:
    """Whether parts of nodes that were retrieved for this stand in a synthesizer's nodes."""
    retrieved = [text for node in _retrieved.get() for text in node_texts(node)]
    return any(find_parts("\n".join(node.get_content() for node in nodes), retrieved))


def split_again(known: ChunkRegistry, documents: Iterable[RetrievedDocument]) -> list[str]:
    """Texts of which a prompt may contain parts, most recently retrieved first.

    Parameters
    ----------
    known : ChunkRegistry
        The model's registry. Recently retrieved texts count if they are in it.
    documents : iterable of RetrievedDocument
        Of the prompt.
    """
    lately = [text for one in _trackers() if one.known is known for text in one.recent]
    return list(dict.fromkeys([*lately, *(text for one in documents for text in one.texts)]))


def rewritten_texts(documents: Iterable[RetrievedDocument]) -> list[str]:
    """Texts that replaced documents and that a tracker has noted as chunks."""
    return [text for one in documents for text in one.rewritten if any(text in each.known for each in _trackers())]


def forget_retrieved(texts: Sequence[str]) -> None:
    """Forget texts of recently retrieved nodes."""
    for tracker in _trackers():
        tracker.forget(texts)


def _trackers() -> set[NodeTracker]:
    return {shared_tracker, _tracker.get() or shared_tracker}


def switch_on() -> None:
    """Listen to LlamaIndex's root dispatcher from now on. Calling this again does nothing."""
    global _registered
    with _lock:
        if not _registered:
            dispatcher = get_dispatcher()
            dispatcher.add_event_handler(_Retrieved())
            dispatcher.add_span_handler(_Synthesized())
            _registered = True


@contextmanager
def tracking_off() -> Iterator[None]:
    """Context manager in which retrievers are not tracked."""
    token = _tracker.set(None)
    try:
        yield
    finally:
        _tracker.reset(token)


@contextmanager
def tracking(known: ChunkRegistry | None = None) -> Iterator[ChunkRegistry]:
    """Context manager in which retrievers are tracked, also inside `tracking_off`; it yields the registry.

    Parameters
    ----------
    known : ChunkRegistry, optional
        Where texts of their nodes are noted, and nowhere else; by default in `known_chunks`.
    """
    switch_on()
    tracker = shared_tracker if known is None else NodeTracker(known)
    token = _tracker.set(tracker)
    try:
        yield tracker.known
    finally:
        _tracker.reset(token)
