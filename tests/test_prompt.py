"""Prompts and their ids: segments keep their ids wherever they stand, and nothing is slipped in between."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from cacheblend_rag import Prompt
from cacheblend_rag.errors import PromptError
from cacheblend_rag.prompt import SegmentTokenizer
from tests import tiny

SEPARATOR = " # # "
CHUNKS = ["the quick brown fox", "over a lazy dog", "seven grey owls"]


def _template(tokenizer: Any, template: str) -> Any:
    inner = tokenizer.backend_tokenizer
    inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
    return tokenizer


def _prefix_space() -> Any:
    """GPT-2's tokenizer with ``add_prefix_space=True``."""
    tokenizer = tiny.tokenizer(bos=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def _sentencepiece_converted(bos: bool = True) -> Any:
    """Llama 2's tokenizer as converted from SentencePiece: a normalizer prepends the space."""
    tokenizer = tiny.tokenizer(bos, style="metaspace")
    inner = tokenizer.backend_tokenizer
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.pre_tokenizer = pre_tokenizers.Sequence([])
    return tokenizer


def _merging_anchors() -> Any:
    """Puts a space before every text, and knows runs of newlines and full stops as one token."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "\n", ".", "|", "a", "b", "▁a", "▁b", "\n\n", "..", "▁.", "▁\n"]
    pieces += ["▁..", "▁\n\n", "#", "▁#", "▁|", "||"]
    merges = [("▁", "a"), ("▁", "b"), ("\n", "\n"), (".", "."), ("▁", "."), ("▁", "\n"), ("▁", ".."), ("▁", "\n\n")]
    merges += [("▁", "#"), ("▁", "|"), ("|", "|")]
    inner = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, merges, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>")


MAKERS: dict[str, Any] = {
    "byte, bos": lambda: tiny.tokenizer(),
    "byte": lambda: tiny.tokenizer(bos=False),
    "byte, bos and eos": lambda: _template(tiny.tokenizer(), "<s> $A </s>"),
    "byte, eos": lambda: _template(tiny.tokenizer(bos=False), "$A </s>"),
    "byte, two openers": lambda: _template(tiny.tokenizer(), "<s> </s> $A"),
    "byte, prefix space": _prefix_space,
    "metaspace, bos": lambda: tiny.tokenizer(style="metaspace"),
    "metaspace": lambda: tiny.tokenizer(bos=False, style="metaspace"),
    "converted, bos": _sentencepiece_converted,
    "converted": lambda: _sentencepiece_converted(bos=False),
}
OPENERS = {"byte, bos": (1,), "byte, bos and eos": (1,), "byte, two openers": (1, 2), "metaspace, bos": (1,),
           "converted, bos": (1,)}  # fmt: skip
SPACED = [name for name in MAKERS if "space" in name or "converted" in name]


@cache
def tokenizer_named(name: str) -> Any:
    return MAKERS[name]()


@pytest.fixture(params=MAKERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def inside(name: str, text: str) -> tuple[int, ...]:
    """Ids of a text that goes on behind another, by hand: cut off an opening that is one token for sure."""
    tokenizer = tokenizer_named(name)
    if name not in SPACED:
        return encode(tokenizer, text)
    head, both = encode(tokenizer, "\n"), encode(tokenizer, "\n" + text)
    assert both[: len(head)] == head
    return both[len(head) :]


# Prompt -------------------------------------------------------------------------------------


def test_segments_are_kept_as_they_are() -> None:
    prompt = Prompt(" a # # b ", ["", " # # ", "c"], "\n")
    assert (prompt.prefix, prompt.chunks, prompt.suffix) == (" a # # b ", ("", " # # ", "c"), "\n")
    with pytest.raises(dataclasses.FrozenInstanceError):
        prompt.prefix = "other"  # type: ignore[misc]


def test_chunks_of_any_iterable_are_all_kept() -> None:
    assert Prompt("p", (chunk for chunk in CHUNKS), "q").chunks == tuple(CHUNKS)
    assert Prompt("p", iter(CHUNKS), "q", glue=iter(["x", "y"])).glue == ("x", "y")


@pytest.mark.parametrize(
    "arguments",
    [
        {"chunks": "one text"},
        {"chunks": None},
        {"chunks": ["a", 5]},
        {"chunks": [None]},
        {"prefix": None},
        {"prefix": b"bytes"},
        {"suffix": 7},
        {"chunks": ["a", "b"], "glue": ["x", "y"]},
        {"chunks": ["a", "b", "c"], "glue": ["x"]},
        {"chunks": [], "glue": ["x"]},
        {"chunks": ["a", "b"], "glue": [5]},
        {"chunks": ["a", "b", "c"], "glue": "xy"},
    ],
    ids=str,
)
def test_what_is_no_text_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(PromptError, match="give"):
        Prompt(**arguments)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p # # a # # b # # q", Prompt("p", ["a", "b"], "q")),
        (" # # a # # ", Prompt("", ["a"], "")),
        ("p # #  # # q", Prompt("p", [""], "q")),
        ("p # # q", Prompt("p", [], "q")),
        ("only a question?", Prompt("", [], "only a question?")),
        ("", Prompt("", [], "")),
        ("p# # q", Prompt("", [], "p# # q")),
    ],
)
def test_parse(text: str, expected: Prompt) -> None:
    assert Prompt.parse(text, SEPARATOR) == expected


def test_parse_needs_a_separator() -> None:
    with pytest.raises(PromptError, match="separator"):
        Prompt.parse("text", "")


@given(parts=st.lists(st.text("ab #\n", max_size=8).filter(lambda part: SEPARATOR not in part), min_size=2, max_size=6))
def test_parse_undoes_a_join(parts: list[str]) -> None:
    text = "<>".join(parts)
    prompt = Prompt.parse(text, "<>")
    assert [prompt.prefix, *prompt.chunks, prompt.suffix] == parts


# Ids ----------------------------------------------------------------------------------------


def test_ids_are_a_hand_made_splice(name: str) -> None:
    tokenizer = tokenizer_named(name)
    segments = SegmentTokenizer(tokenizer, SEPARATOR)
    prompt = Prompt("Read this:", CHUNKS, "What fell?")
    split = segments.tokenize(prompt)
    separator = inside(name, SEPARATOR)
    opening = OPENERS.get(name, ()) + encode(tokenizer, "Read this:")
    chunks = [separator + inside(name, chunk) for chunk in CHUNKS]
    suffix = separator + inside(name, "What fell?")
    assert split.input_ids == opening + sum(chunks, ()) + suffix
    assert split.ids(split.prefix) == opening
    assert [split.ids(span) for span in split.chunks] == chunks
    assert split.ids(split.suffix) == suffix
    assert split.chunk_tokens == sum(map(len, chunks))
    assert [segments.chunk_ids(chunk) for chunk in CHUNKS] == chunks
    assert segments.separator_ids == separator
    assert segments.start_ids == OPENERS.get(name, ())


def test_ids_with_glue_without_prefix_without_suffix_and_with_an_empty_chunk(name: str) -> None:
    segments = SegmentTokenizer(tokenizer_named(name), SEPARATOR)
    separator, start = inside(name, SEPARATOR), OPENERS.get(name, ())
    glued = segments.tokenize(Prompt("", ["a", "", "b"], "", glue=["\nContext:", ""]))
    expected = start + separator + inside(name, "a") + inside(name, "\nContext:")
    expected += separator + separator + inside(name, "b") + separator
    assert glued.input_ids == expected
    assert [len(span) for span in glued.chunks] == [
        len(separator) + len(inside(name, "a")), len(separator), len(separator) + len(inside(name, "b"))
    ]  # fmt: skip
    assert glued.prefix.stop == len(start)


@pytest.mark.parametrize("text", ["What fell?", "the quick brown fox", " spaced", "\nline"])
def test_a_text_alone_has_the_ids_its_tokenizer_gives_it_without_an_eos(name: str, text: str) -> None:
    tokenizer = tokenizer_named(name)
    segments = SegmentTokenizer(tokenizer, SEPARATOR)
    expected = tuple(tokenizer.encode(text))
    if "eos" in name:
        assert expected[-1] == 2
        expected = expected[:-1]
    assert segments.tokenize(Prompt(suffix=text)).input_ids == expected
    assert segments.tokenize(Prompt.parse(text, SEPARATOR)).input_ids == expected
    assert segments.tokenize(Prompt(prefix=text)).input_ids == expected


def test_eos_stands_nowhere_in_a_prompt() -> None:
    for name in ("byte, bos and eos", "byte, eos"):
        segments = SegmentTokenizer(tokenizer_named(name), SEPARATOR)
        assert 2 not in segments.tokenize(Prompt("Read this:", CHUNKS, "What fell?")).input_ids


@pytest.mark.parametrize("spaced", SPACED)
def test_no_space_is_slipped_in_at_a_seam(spaced: str) -> None:
    tokenizer = tokenizer_named(spaced)
    segments = SegmentTokenizer(tokenizer, "<->")
    prompt = Prompt("fox", ["dog", "owl"], "why")
    ids = segments.tokenize(prompt).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "fox<->dog<->owl<->why"
    assert encode(tokenizer, "dog") != segments.inner_ids("dog"), "this tokenizer should put a space before a text"


@pytest.mark.parametrize("text", ["\n\na", "\na", "..a", ".a", "a", "||", "#a", " a", "\n"])
def test_a_text_that_merges_with_an_anchor_still_gets_no_space(text: str) -> None:
    tokenizer = _merging_anchors()
    segments = SegmentTokenizer(tokenizer, "#")
    tokens = tokenizer.convert_ids_to_tokens(segments.inner_ids(text))
    assert "".join(tokens) == text.replace(" ", "▁")


@pytest.mark.parametrize(
    ("prefix", "starts"),
    [("<s>Read this:", 1), ("Read this:", 1), ("<s>", 1), ("", 1), ("<s><s>Read", 2), ("Read <s> this", 2)],
)
@pytest.mark.parametrize("name", ["byte, bos", "byte, bos and eos", "metaspace, bos", "converted, bos"])
def test_a_chat_templated_prefix_never_gets_a_second_bos(name: str, prefix: str, starts: int) -> None:
    segments = SegmentTokenizer(tokenizer_named(name), SEPARATOR)
    ids = segments.tokenize(Prompt(prefix, CHUNKS, "What fell?")).input_ids
    assert ids[0] == 1
    assert ids.count(1) == starts


def test_a_chat_template_as_prefix_has_the_ids_of_the_template() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    messages = [{"role": "user", "content": "Read this:"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    split = SegmentTokenizer(tokenizer, SEPARATOR).tokenize(Prompt(text, CHUNKS, "What fell?"))
    assert list(split.ids(split.prefix)) == ids
    assert split.input_ids.count(1) == 1


def test_an_empty_prompt_is_refused_only_if_it_has_no_token() -> None:
    with pytest.raises(PromptError, match="empty"):
        SegmentTokenizer(tiny.tokenizer(bos=False), SEPARATOR).tokenize(Prompt())
    assert SegmentTokenizer(tiny.tokenizer(), SEPARATOR).tokenize(Prompt()).input_ids == (1,)


WORDS = st.text(alphabet="ab #.\n", max_size=6)


@settings(max_examples=60, deadline=None)
@given(prefix=WORDS, chunks=st.lists(WORDS, max_size=4), suffix=WORDS, order=st.randoms(use_true_random=False))
@pytest.mark.parametrize("name", ["byte, bos", "metaspace, bos", "converted", "byte, prefix space"])
def test_a_segment_has_the_same_ids_in_any_prompt(
    name: str, prefix: str, chunks: list[str], suffix: str, order: Any
) -> None:
    segments = SegmentTokenizer(tokenizer_named(name), SEPARATOR)
    try:
        split = segments.tokenize(Prompt(prefix, chunks, suffix))
    except PromptError:
        assert (prefix, chunks, suffix) == ("", [], "")
        return
    spans = [split.prefix, *split.chunks, split.suffix]
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == len(split.input_ids)
    moved = order.sample(range(len(chunks)), len(chunks))
    again = segments.tokenize(Prompt("Read", [chunks[n] for n in moved], "why"))
    for place, number in enumerate(moved):
        ids = again.ids(again.chunks[place])
        assert ids == split.ids(split.chunks[number]) == segments.chunk_ids(chunks[number])


def test_a_separator_inside_a_segment_changes_only_its_own_ids() -> None:
    segments = SegmentTokenizer(tiny.tokenizer(), SEPARATOR)
    plain = segments.tokenize(Prompt("Read:", ["a", "b", "c"], "why"))
    chunk = segments.tokenize(Prompt("Read:", ["a", "b # # b", "c"], "why"))
    question = segments.tokenize(Prompt("Read:", ["a", "b", "c"], "why # # not"))
    assert len(chunk.chunks) == len(question.chunks) == 3
    assert chunk.ids(chunk.prefix) == plain.ids(plain.prefix)
    for number in (0, 2):
        assert chunk.ids(chunk.chunks[number]) == plain.ids(plain.chunks[number])
    assert chunk.ids(chunk.suffix) == plain.ids(plain.suffix)
    assert question.input_ids[: question.suffix.start] == plain.input_ids[: plain.suffix.start]
    assert question.ids(question.suffix)[: len(plain.ids(plain.suffix))] == plain.ids(plain.suffix)


def test_chunks_are_tokenised_once_and_questions_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = SegmentTokenizer._encode

    def noting(self: SegmentTokenizer, text: str) -> tuple[int, ...]:
        seen.append(text)
        return real(self, text)

    monkeypatch.setattr(SegmentTokenizer, "_encode", noting)
    segments = SegmentTokenizer(tiny.tokenizer(), SEPARATOR)
    prompt = Prompt("Read:", ["the quick fox", "a slow snail"], "Which is quick?")
    first = segments.tokenize(prompt)
    seen.clear()
    other = segments.with_separator("\n--\n")
    seen.clear()
    assert segments.tokenize(prompt) == first
    assert (
        other.chunk_ids("the quick fox")[len(other.separator_ids) :]
        == first.ids(first.chunks[0])[len(segments.separator_ids) :]
    )
    assert not any("fox" in text or "snail" in text for text in seen)
    assert any("Which is quick?" in text for text in seen)
    segments.forget()
    assert segments.tokenize(prompt) == first
    assert any("fox" in text for text in seen)
