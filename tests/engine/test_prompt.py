"""Prompts and their ids: the model reads the text as one, and chunks keep their ids wherever they stand."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from cacheblend_rag import Prompt
from cacheblend_rag.errors import PromptError
from cacheblend_rag.prompt import PromptTokenizer
from cacheblend_rag.prompt.chat import render_turns
from cacheblend_rag.prompt.control import control_tokens
from tests import tiny

SEPARATOR = " # # "
_CHARACTERS = 'abcdefghijklmnopqrstuvwxyzRW?:#.,\n"'
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


def _trained(inner: Tokenizer, trainer: Any) -> Any:
    inner.train_from_iterator([tiny.text(400, seed) for seed in range(3)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>")


def _unigram() -> Any:
    """As T5 and Gemma have it: pieces by likelihood, with a space before every text."""
    inner = Tokenizer(models.Unigram())
    inner.normalizer = normalizers.NFKC()
    inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    special = ["<unk>", "<s>", "</s>"]
    return _trained(
        inner,
        trainers.UnigramTrainer(
            vocab_size=300, special_tokens=special, unk_token="<unk>", initial_alphabet=list(_CHARACTERS)
        ),
    )


def _wordpiece() -> Any:
    """As BERT has it: no white space among the tokens, continuations marked."""
    inner = Tokenizer(models.WordPiece(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["<unk>", "<s>", "</s>"]
    return _trained(
        inner, trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, initial_alphabet=list(_CHARACTERS))
    )


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
    "unigram": _unigram,
    "wordpiece": _wordpiece,
}
OPENERS = {"byte, bos": (1,), "byte, bos and eos": (1,), "byte, two openers": (1, 2), "metaspace, bos": (1,),
           "converted, bos": (1,)}  # fmt: skip


@cache
def tokenizer_named(name: str) -> Any:
    return MAKERS[name]()


@pytest.fixture(params=MAKERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def plainly(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The ids that the model reads without this package; an end-of-text id behind them is not part of a prompt."""
    ids = tuple(tokenizer.encode(text))
    ends = tokenizer.encode("a")[-1] == 2
    return ids[:-1] if ends else ids


# Prompt -------------------------------------------------------------------------------------


def test_prompt_refuses_parts_that_are_no_text() -> None:
    for arguments in [
        {"chunks": "one text"},
        {"chunks": None},
        {"chunks": ["a", 5]},
        {"chunks": [None]},
        {"prefix": None},
        {"prefix": b"bytes"},
        {"suffix": 7},
        {"chunks": ["a", "b"], "between": ["x", "y"]},
        {"chunks": ["a", "b", "c"], "between": ["x"]},
        {"chunks": [], "between": ["x"]},
        {"chunks": ["a", "b"], "between": [5]},
        {"chunks": ["a", "b", "c"], "between": "xy"},
    ]:
        with pytest.raises(PromptError, match="give"):
            Prompt(**arguments)


def test_parse() -> None:
    for text, expected in [
        ("p # # a # # b # # q", Prompt("p", ["a", "b"], "q")),
        (" # # a # # ", Prompt("", ["a"], "")),
        ("p # #  # # q", Prompt("p", [""], "q")),
        ("p # # q", Prompt("p", [], " # # q")),
        ("only a question?", Prompt("", [], "only a question?")),
        ("", Prompt("", [], "")),
        ("p# # q", Prompt("", [], "p# # q")),
    ]:
        assert Prompt.parse(text, SEPARATOR) == expected


def test_parse_needs_a_separator() -> None:
    with pytest.raises(PromptError, match="separator"):
        Prompt.parse("text", "")


def test_without_texts_between_chunks_the_separator_stands_there() -> None:
    written = Prompt("Read:", ["a", "b"], "why").written("|")
    assert written.text == "Read:|a|b|why"
    assert [written.text[first:last] for first, last in written.chunks] == ["a", "b"]
    assert written.text[: written.prefix_stop] == "Read:|"
    assert Prompt("Read:", [], "why").written("|").text == "Read:why"
    assert Prompt("", ["a"], "why").written("|").text == "|a|why"


def test_texts_between_chunks_are_joined_as_they_are() -> None:
    written = Prompt("Read: ", ["a", "b"], ". Why?", [" and "], preamble="Hm. ").written("|")
    assert written.text == "Read: Hm. a and b. Why?"
    assert [written.text[first:last] for first, last in written.chunks] == ["a", "b"]
    assert written.text[: written.prefix_stop] == "Read: ", "a preamble is not stored"


# Ids ----------------------------------------------------------------------------------------

PROMPTS = {
    "separated": Prompt("Read this:", CHUNKS, "What fell?"),
    "no prefix": Prompt("", CHUNKS, "What fell?"),
    "as written": Prompt("Read this:\n", CHUNKS, "\nWhat fell?", ["\n---\n", " "]),
    "in quotes": Prompt('{"text": "', CHUNKS, '"}', ['", "', '", "']),
    "touching": Prompt("<b>", CHUNKS, "</b>", ["</b><b>", ""]),
    "with a preamble": Prompt("Read this: ", CHUNKS, " Why?", ["\n\n", "\n\n"], preamble="The owl asks. "),
}


def test_the_ids_are_those_of_the_whole_text(name: str) -> None:
    for written in PROMPTS:
        tokenizer, prompt = tokenizer_named(name), PROMPTS[written]
        split = PromptTokenizer(tokenizer, SEPARATOR).tokenize(prompt)
        assert split.input_ids == plainly(tokenizer, prompt.written(SEPARATOR).text)


def test_chunk_has_the_same_ids_in_any_usual_prompt(name: str) -> None:
    for written in [name for name in PROMPTS if name != "touching"]:
        segments = PromptTokenizer(tokenizer_named(name), "\n\n")
        split = segments.tokenize(PROMPTS[written])
        assert [chunk.text for chunk in split.located] == CHUNKS
        for chunk in split.located:
            own = segments.chunk(chunk.text)
            assert chunk.usual
            assert split.ids(chunk.span) == own.ids
            assert chunk.head == own.head
            assert len(own.ids) >= len(encode(tokenizer_named(name), chunk.text)) - 6, "nearly all of a chunk is reused"
        assert split.chunk_tokens == sum(map(len, split.chunks))


def test_context_of_a_chunk_equals_the_ids_before_it_in_a_prompt(name: str) -> None:
    segments = PromptTokenizer(tokenizer_named(name), SEPARATOR)
    for prefix in ("", "Read this:"):
        split = segments.tokenize(Prompt(prefix, CHUNKS, "What fell?"))
        first = split.located[0]
        assert segments.context_ids(CHUNKS[0], prefix) + first.head == split.input_ids[: first.span.start]
    assert segments.start_ids == OPENERS.get(name, ())


class _Unaligned:
    """A tokenizer in Python: it does not say which characters its tokens cover."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.is_fast = inner, False

    def encode(self, text: str, **options: Any) -> list[int]:
        return list(self._inner.encode(text, **options))


def test_without_offsets_a_chunk_is_found_by_its_ids(name: str) -> None:
    tokenizer = tokenizer_named(name)
    fast, slow = (PromptTokenizer(one, "\n\n") for one in (tokenizer, _Unaligned(tokenizer)))
    for written in ("separated", "no prefix", "as written", "with a preamble"):
        split = slow.tokenize(PROMPTS[written])
        assert split.input_ids == fast.tokenize(PROMPTS[written]).input_ids
        for chunk in split.located:
            assert chunk.usual
            assert split.ids(chunk.span) == slow.chunk(chunk.text).ids
            assert len(chunk.span) >= len(fast.chunk(chunk.text).ids) - 1


def test_without_offsets_a_chunk_that_is_not_found_is_computed() -> None:
    slow = PromptTokenizer(_Unaligned(tokenizer_named("byte")), "\n\n")
    split = slow.tokenize(Prompt("", ["the quick fox", "zz"], "why"))
    assert split.input_ids == plainly(tokenizer_named("byte"), "\n\nthe quick fox\n\nzz\n\nwhy")
    assert len(slow.tokenize(Prompt("a", [" "], "b")).chunks[0]) == 0


def test_text_alone_has_the_ids_its_tokenizer_gives_it_without_an_eos(name: str) -> None:
    for text in ["What fell?", "the quick brown fox", " spaced", "\nline"]:
        tokenizer = tokenizer_named(name)
        segments = PromptTokenizer(tokenizer, SEPARATOR)
        expected = tuple(tokenizer.encode(text))
        if "eos" in name:
            assert expected[-1] == 2
            expected = expected[:-1]
        assert segments.tokenize(Prompt(suffix=text)).input_ids == expected
        assert segments.tokenize(Prompt.parse(text, SEPARATOR)).input_ids == expected
        assert segments.tokenize(Prompt(prefix=text)).input_ids == expected


@pytest.mark.parametrize(
    ("prefix", "starts"),
    [("<s>Read this:", 1), ("Read this:", 1), ("<s>", 1), ("", 1), ("<s><s>Read", 2), ("Read <s> this", 2)],
)
@pytest.mark.parametrize("name", ["byte, bos", "byte, bos and eos", "metaspace, bos", "converted, bos"])
def test_chat_templated_prefix_never_gets_a_second_bos(name: str, prefix: str, starts: int) -> None:
    segments = PromptTokenizer(tokenizer_named(name), SEPARATOR)
    ids = segments.tokenize(Prompt(prefix, CHUNKS, "What fell?")).input_ids
    assert ids[0] == 1
    assert ids.count(1) == starts


def test_chat_template_has_the_ids_of_the_template() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    messages = [{"role": "user", "content": "Read this: " + "\n".join(CHUNKS) + "\nWhy?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    before, after = text.split("\n".join(CHUNKS))
    split = PromptTokenizer(tokenizer, SEPARATOR).tokenize(Prompt(before, CHUNKS, after, ["\n", "\n"]))
    assert list(split.input_ids) == ids
    assert all(chunk.usual and len(chunk.span) for chunk in split.located)


def test_empty_prompt_is_refused_only_if_it_has_no_token() -> None:
    with pytest.raises(PromptError, match="empty"):
        PromptTokenizer(tiny.tokenizer(bos=False), SEPARATOR).tokenize(Prompt())
    assert PromptTokenizer(tiny.tokenizer(), SEPARATOR).tokenize(Prompt()).input_ids == (1,)


def test_control_tokens_of_a_message_are_text_and_the_templates_own_stay(name: str) -> None:
    tokenizer = tokenizer_named(name)
    segments, control = PromptTokenizer(tokenizer, SEPARATOR), control_tokens(tokenizer)
    frame, said = "<s>a fox</s>\n<s>{}</s>\nwhy", "an owl</s><s>falls </s> over"
    assert segments.tokenize(Prompt(suffix=control.owned(frame))) == segments.tokenize(Prompt(suffix=frame))
    assert segments.tokenize(Prompt("a", [said], "?", ())).input_ids == plainly(tokenizer, f"a{said}?"), "a chain's own"
    before, after = control.owned(frame).split("{}")
    split = segments.tokenize(Prompt(before, [said], after))
    marks = [tokenizer.convert_tokens_to_ids(one) for one in ("<s>", "</s>", "<s>", "</s>")]
    assert [id for id in split.input_ids if id in marks] in (marks, [*segments.start_ids, *marks])
    assert split.located[0].usual
    assert split.ids(split.chunks[0]) == segments.chunk(said).ids
    assert len(segments.chunk(said).ids) > 8


def test_control_tokens_of_no_template_and_those_that_others_leave_over_are_text() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ tools }}{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|a|>", ">>B<<"]})
    tokenizer.add_tokens([AddedToken("<|fim|>", special=False)])
    marks = {tokenizer.convert_tokens_to_ids(one) for one in ("<|a|>", ">>B<<", "<|fim|>", "</s>")}
    segments, said = PromptTokenizer(tokenizer, SEPARATOR), "<|a|>>B<< <|fim|> </s>"
    tool = {"type": "function", "function": {"name": "find", "description": said, "parameters": {said: said}}}
    calls = [{"type": "function", "id": "1", "function": {"name": "find", "arguments": {said: said}}}]
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": said, "tool_calls": calls}]
    for text in (control_tokens(tokenizer).owned("") + said, render_turns(tokenizer, turns, [tool])):
        ids = segments.tokenize(Prompt(suffix=text)).input_ids
        assert tokenizer.decode(ids).count("<|fim|>") == (1 if text.endswith(said) else 6)
        assert not marks.intersection(ids)
    split = segments.tokenize(Prompt(control_tokens(tokenizer).owned(""), ["<|", "a|>", "<|a"], "|>", ["", ""]))
    assert not marks.intersection(split.input_ids), "a token lies within one chunk"


def test_template_without_a_system_message_gives_its_words_to_the_first_question() -> None:
    each = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    silent = each.replace("messages %}", "messages if m.role != 'system' %}")
    said = [{"role": one, "content": f"{one} words"} for one in ("system", "user", "assistant", "user")]
    for template in (refuses + each, silent):
        tokenizer = tiny.tokenizer()
        tokenizer.chat_template = template
        written = render_turns(tokenizer, said)
        assert written.startswith("[user] system words\n\nuser words\n[assistant] ")
        assert render_turns(tokenizer, [{**said[0], "content": "a </s> b"}, *said[1:]]).count("a </s> b") == 1
        with pytest.raises(PromptError, match="not supported") if "raise" in template else nullcontext():
            render_turns(tokenizer, [said[0], said[2]])


WORDS = st.text(alphabet='abä #.\n"é', max_size=8)
KINDS = ["byte, bos", "metaspace, bos", "converted", "byte, prefix space", "unigram", "wordpiece"]


@settings(max_examples=60, deadline=None)
@given(prefix=WORDS, chunks=st.lists(WORDS, max_size=4), suffix=WORDS, data=st.data())
@pytest.mark.parametrize("name", KINDS)
def test_any_prompt_has_the_ids_of_its_text_and_chunks_lie_within_their_characters(
    name: str, prefix: str, chunks: list[str], suffix: str, data: st.DataObject
) -> None:
    tokenizer = tokenizer_named(name)
    segments = PromptTokenizer(tokenizer, "\n\n")
    count = max(0, len(chunks) - 1)
    between = data.draw(st.none() | st.lists(WORDS, min_size=count, max_size=count))
    prompt = Prompt(prefix, chunks, suffix, between)
    written = prompt.written("\n\n")
    try:
        split = segments.tokenize(prompt)
    except PromptError:
        assert not plainly(tokenizer, written.text)
        return
    assert split.input_ids == plainly(tokenizer, written.text)
    assert [chunk.text for chunk in split.located] == [chunk.strip() for chunk in chunks]
    opening = len(segments.start_ids)
    offsets = tokenizer(written.text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    for chunk, (first, last) in zip(split.located, written.chunks, strict=True):
        covered = offsets[chunk.span.start - opening : chunk.span.stop - opening]
        assert all(first <= start and stop <= last for start, stop in covered), "nothing around a chunk is stored"
        if chunk.usual and len(chunk.span):
            assert split.ids(chunk.span) == segments.chunk(chunk.text).ids


def test_chunks_are_tokenised_once_and_questions_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    tokenizer = tiny.tokenizer()
    real = type(tokenizer).__call__

    def noting(self: Any, text: str, **options: Any) -> Any:
        seen.append(text)
        return real(self, text, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", noting)
    segments = PromptTokenizer(tokenizer, SEPARATOR)
    prompt = Prompt("Read:", ["the quick fox", "a slow snail"], "Which is quick?")
    first = segments.tokenize(prompt)
    assert len(seen) > 1
    seen.clear()
    assert segments.tokenize(prompt) == first
    assert seen == [prompt.written(SEPARATOR).text], "only the prompt itself"
    segments.forget()
    assert segments.tokenize(prompt) == first
    assert len(seen) > 2


def test_another_separator_changes_what_stands_before_a_chunk_alone() -> None:
    segments = PromptTokenizer(tiny.tokenizer(), SEPARATOR)
    other = segments.with_separator("\n--\n")
    assert segments.with_separator(SEPARATOR) is segments
    assert other.chunk("the quick fox").ids == segments.chunk("the quick fox").ids
    assert other.context_ids("the quick fox") != segments.context_ids("the quick fox")


def test_answer_goes_on_where_its_prompt_ended() -> None:
    """Also where the prompt's last token alone, a space or part of a word, would merge with the answer."""
    for style in ["byte", "metaspace"]:
        for before in ["What fell?", "What fell? ", "What fell?\n", "The f"]:
            tokenizer = tiny.tokenizer(bos=False, style=style)
            ids = PromptTokenizer(tokenizer, SEPARATOR).continued_ids("owl and a fox", before)
            assert tokenizer.decode([*encode(tokenizer, before), *ids]) == before + "owl and a fox"
