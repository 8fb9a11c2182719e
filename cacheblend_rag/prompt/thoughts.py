"""Thoughts: how a model marks them, how its chat template switches them on, and an answer without them.

A family is known by what its chat template and its tokenizer hold. A thought is one only where it stands before the
answer: a mark within an answer, or within a document, is text.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from jinja2 import Environment, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from cacheblend_rag.config import Reasoning, read_reasoning
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.prompt.calls import certain_length, may_become

BUDGETS: dict[Reasoning, int] = {False: 256, "low": 512, True: 2048, "medium": 2048, "high": 8192}
"""Most tokens of a thought where no number is given. Without reasoning it is that of a model that cannot do without."""


class Thought(str):
    """A piece of text that is part of a thought."""

    __slots__ = ()


@dataclass(frozen=True)
class ThoughtMarks:
    """The marks of one family.

    Parameters
    ----------
    begin, end : tuple of str
        Texts around a thought; of several, the first is written where one has to be.
    signs : tuple of str
        Texts that a template or the tokens of the family hold; all of them. By default the first beginning.
    answer : tuple of str
        Texts around the answer, for families that mark it, too: before and behind it. Either may be empty.
    channels : bool
        Whether an answer is a row of messages, each with a header that names its channel.
    known : bool
        Whether the model is known to be of the family. Others may have learned to think without a word of it in their
        template.
    """

    begin: tuple[str, ...]
    end: tuple[str, ...]
    signs: tuple[str, ...] = ()
    answer: tuple[str, str] = ("", "")
    channels: bool = False
    known: bool = True

    @property
    def opening(self) -> str:
        """Text that begins a thought for the model."""
        return self.begin[0] if self.channels else self.begin[0] + "\n"

    @property
    def closing(self) -> str:
        """Text that ends a thought for the model, up to where its answer begins."""
        return self.end[0] + self.behind if self.channels else f"\n{self.end[0]}{self.behind}"

    @property
    def behind(self) -> str:
        """Text between the end of a thought and the answer."""
        if self.channels:
            return f"<|start|>assistant{self.answer[0]}"
        return "\n\n" + self.answer[0]

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends with the beginning of a thought, so that the answer goes on with it."""
        return prompt.rstrip().endswith(self.begin)


_CHANNELS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_THINK = ThoughtMarks(("<think>",), ("</think>",))
# The first whose signs a model has is its family.
FAMILIES = (
    ThoughtMarks(  # gpt-oss
        ("<|channel|>analysis<|message|>",),
        ("<|end|>",),
        ("<|channel|>", "<|message|>"),
        ("<|channel|>final<|message|>", ""),
        channels=True,
    ),
    ThoughtMarks(("<|channel>thought",), ("<channel|>",), ("<|channel>", "<channel|>")),  # Gemma 4
    ThoughtMarks(("[THINK]",), ("[/THINK]",)),  # Mistral
    ThoughtMarks(("<seed:think>",), ("</seed:think>",)),  # Seed-OSS
    ThoughtMarks(("◁think▷",), ("◁/think▷",)),  # Kimi
    ThoughtMarks(  # Command A
        ("<|START_THINKING|>",), ("<|END_THINKING|>",), answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    ThoughtMarks(  # OpenThinker, Sky-T1
        ("<|begin_of_thought|>",),
        ("<|end_of_thought|>",),
        answer=("<|begin_of_solution|>", "<|end_of_solution|>"),
    ),
    ThoughtMarks(  # Granite 3.2
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        ("Here is my thought process:",),
    ),
    ThoughtMarks(  # Granite 3.3
        ("<think>",), ("</think>",), ("<think>", "<response>"), answer=("<response>", "</response>")
    ),
    ThoughtMarks(("<think>",), ("</think>",), ("<think>", "<answer>"), answer=("<answer>", "</answer>")),  # Hunyuan
    ThoughtMarks(("<thought>",), ("</thought>",)),  # EXAONE Deep
    _THINK,  # Qwen3, SmolLM3, DeepSeek, GLM, Phi-4, MiniMax, Nemotron, …
)
"""How families of models mark their thoughts."""

# Variables of templates that switch thoughts on and off, and the one that says how much is thought.
_SWITCHES = ("enable_thinking", "thinking", "enable_reasoning", "reasoning")
_EFFORT, _BUDGET = "reasoning_effort", "thinking_budget"
_SOFT_SWITCH = ("/no_think", "/think")  # words in a question, for templates that read them
_OF_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # what a message may call an earlier thought
# Where a template reads a field of messages.
_READ = r"\.{0}\b|\[\s*['\"]{0}['\"]\s*\]|get\(\s*['\"]{0}['\"]"


class _Generation(Extension):
    """The tag with which transformers marks answers in a template."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=64)
def template_variables(template: str) -> frozenset[str]:
    """Variables that a chat template reads; empty if the template cannot be parsed."""
    environment = Environment(extensions=[_Generation, "jinja2.ext.loopcontrols"])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(template)))
    except TemplateSyntaxError:  # it can make no prompt either
        return frozenset()


# Of each tokenizer, the template for which its marks were found last, and these.
_found: weakref.WeakKeyDictionary[Any, tuple[str, ThoughtMarks]] = weakref.WeakKeyDictionary()


def marks_of(tokenizer: Any) -> ThoughtMarks:
    """How a model marks its thoughts, by its chat template and its tokens.

    A model that holds no marks of any family counts as one that may write ``<think>``, and is not `known` to.

    Parameters
    ----------
    tokenizer : transformers tokenizer
    """
    template = str(getattr(tokenizer, "chat_template", None) or "")
    if (seen := _found.get(tokenizer)) is not None and seen[0] == template:
        return seen[1]
    tokens = {str(token) for token in added_tokens(tokenizer).values()}
    for family in FAMILIES:
        if all(sign in template or sign in tokens for sign in family.signs or family.begin[:1]):
            break
    else:
        family = ThoughtMarks(_THINK.begin, _THINK.end, known=False)
    _found[tokenizer] = template, family
    return family


def hidden_ids(tokenizer: Any, marks: ThoughtMarks) -> frozenset[int] | None:
    """Special tokens to leave out of an answer's text; None if all are to be left out.

    In some families the marks of thoughts are special tokens, and must stay visible.
    """
    texts = "".join((*marks.begin, *marks.end, *marks.answer, *(_CHANNELS if marks.channels else ())))
    added = added_tokens(tokenizer)
    special = {number: str(token) for number, token in added.items() if getattr(token, "special", False)}
    hidden = frozenset(number for number, token in special.items() if token not in texts)
    return None if len(hidden) == len(special) else hidden


def added_tokens(tokenizer: Any) -> dict[int, Any]:
    """Tokens that a tokenizer finds in a text before all others, by their ids."""
    return dict(getattr(tokenizer, "added_tokens_decoder", None) or {})


def check_reasoning(
    tokenizer: Any, reasoning: Reasoning, name: str = "reasoning", most_thought: int | None = None
) -> None:
    """Refuse thinking for a model that marks no thoughts, and a length of thoughts for a model that will not think.

    Raises
    ------
    ConfigError
    """
    for field, value in ((name, reasoning), ("reasoning_tokens", most_thought)):
        if value and not marks_of(tokenizer).known:
            remedy = "leave it out, or use a model that thinks; this one's chat template and tokens mark no thoughts"
            raise ConfigError(field, value, remedy)


def has_switch(tokenizer: Any) -> bool:
    """Whether the chat template can switch thoughts off."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    read = template_variables(template)
    if read.intersection((*_SWITCHES, _BUDGET)) or (_EFFORT in read and _quotes(template, "none")):
        return True
    return _SOFT_SWITCH[0] in template


def switched(template: str, reasoning: Reasoning) -> dict[str, Any]:
    """Arguments of a chat template with which a model thinks, or does not.

    Parameters
    ----------
    template : str
    reasoning : bool or str
        Without it, templates that only say how much is thought are told to let it be little.
    """
    read, options = template_variables(template), dict[str, Any]()
    options.update({name: bool(reasoning) for name in _SWITCHES if name in read})
    if _EFFORT in read and (reasoning or not options):
        level: str = reasoning if isinstance(reasoning, str) else "medium" if reasoning else "low"
        lists = _quotes(template, "none")  # then it names those that it takes
        if lists and not reasoning:
            level = "none"
        elif lists and not _quotes(template, level):
            level = "high"
        options[_EFFORT] = level
    if _BUDGET in read and not reasoning:
        options[_BUDGET] = 0
    return options


def thinks(reasoning: Reasoning, options: Mapping[str, Any] | None) -> Reasoning:
    """Whether a model will think. A call's own arguments for the chat template take precedence."""
    for name in _SWITCHES:
        if isinstance(given := (options or {}).get(name), bool):
            return (reasoning or True) if given else False
    effort = (options or {}).get(_EFFORT)
    return read_reasoning(_EFFORT, effort) if isinstance(effort, str) else reasoning


def begin_answer(tokenizer: Any, prompt: str, begun: str, reasoning: Reasoning) -> tuple[str, str]:
    """A prompt with the beginning of its answer, and the part of that which is to be written behind a thought.

    Parameters
    ----------
    tokenizer : transformers tokenizer
    prompt : str
    begun : str
        Beginning of the answer that is written for the model.
    reasoning : bool or str
    """
    marks = marks_of(tokenizer)
    if marks.channels or (reasoning and marks.known) or marks.opened_by(prompt):
        return prompt, begun
    return prompt + begun, ""


def turns_to_think(template: str, turns: Sequence[Mapping[str, Any]], reasoning: Reasoning) -> list[Mapping[str, Any]]:
    """Turns as a template expects them: with thoughts if it reads them, and with its switch if that is a word.

    Parameters
    ----------
    template : str
    turns : sequence of dict
        Earlier thoughts stand under ``reasoning_content``.
    reasoning : bool or str
    """
    shown: list[Mapping[str, Any]] = []
    for turn in turns:
        thought = turn.get("reasoning_content")
        others = {name: value for name, value in turn.items() if name != "reasoning_content"}
        wanted = [name for name in _OF_THOUGHTS if thought and re.search(_READ.format(name), template)]
        shown.append({**others, **dict.fromkeys(wanted, thought)} if wanted else others)
    if _SOFT_SWITCH[0] in template and not template_variables(template).intersection(_SWITCHES):
        word = _SOFT_SWITCH[bool(reasoning)]
        for at in reversed(range(len(shown))):
            content = shown[at].get("content")
            if shown[at].get("role") == "user" and isinstance(content, str):
                if not any(one in content.split() for one in _SOFT_SWITCH):
                    shown[at] = {**shown[at], "content": f"{content} {word}"}
                break
    return shown


def _quotes(template: str, word: str) -> bool:
    return f"'{word}'" in template or f'"{word}"' in template


class ThoughtSplitter:
    """Splits an answer into thoughts and what it says, as it is written.

    Parameters
    ----------
    marks : ThoughtMarks
    in_thought : bool
        Whether the prompt has begun a thought.
    skip : str
        Text that was written for the model where its answer begins. It is no part of it.
    """

    def __init__(self, marks: ThoughtMarks, in_thought: bool = False, skip: str = "") -> None:
        self.marks = marks
        self.place: Literal["start", "header", "thought", "behind", "answer"] = "thought" if in_thought else "start"
        """Where the answer is: before it is known whether it begins with a thought, within a header of a channel,
        within a thought, behind one, or within what it says."""
        self.thought = in_thought
        """Whether there was a thought."""
        self._skip, self._held, self._marked = skip, "", False

    @property
    def undecided(self) -> str:
        """Text that may still turn out to begin a thought."""
        return self._held if self.place == "start" else ""

    def settle(self) -> None:
        """Treat an answer that has not begun as one without a thought."""
        if self.place == "start":
            self.place = "behind" if self._skip else "answer"

    def feed(self, text: str) -> list[str]:
        """Pieces that are certain now; those of thoughts are of the type `Thought`."""
        self._held += text
        return self._pieces(final=False)

    def end(self) -> list[str]:
        """The remaining pieces at the end of the answer."""
        return self._pieces(final=True)

    def _pieces(self, final: bool) -> list[str]:
        steps = {"start": self._start, "header": self._header, "thought": self._thought}
        steps |= {"behind": self._behind, "answer": self._answer}
        pieces: list[str] = []
        while True:
            place = self.place
            if piece := steps[place](final):
                pieces.append(piece)
            if self.place == place:
                return pieces

    def _start(self, final: bool) -> str:
        text, begin = self._held.lstrip(), self.marks.begin
        if found := next((one for one in begin if text.startswith(one)), None):
            self._held, self.place, self.thought = text[len(found) :], "thought", True
        elif final or not may_become(text, *begin):
            self.settle()
        return ""

    def _header(self, final: bool) -> str:
        raise NotImplementedError

    def _thought(self, final: bool) -> str:
        """Up to the thought's end; white space around it is left out."""
        said, ended = self._up_to(self.marks.end, final)
        if ended:
            self.place = "behind"
        return Thought(said)

    def _up_to(self, ends: Sequence[str], final: bool) -> tuple[str, bool]:
        """Text of a thought that is certain, and whether one of its ends was behind it."""
        at, mark = _first(self._held, ends)
        if at >= 0:
            said, self._held = self._held[:at].rstrip(), self._held[at + len(mark) :]
        else:
            said = (self._held if final else self._held[: certain_length(self._held, ends)]).rstrip()
            self._held = "" if final else self._held[len(said) :]
        if not self._begun:
            said = said.lstrip()
            self._begun = bool(said)
        return said, at >= 0

    _begun = False  # whether a word of the thought has been said

    def _behind(self, final: bool) -> str:
        """White space, the mark before an answer, and what was written for the model."""
        self._held = self._held.lstrip()
        before = "" if self._marked else self.marks.answer[0]
        if before and self._held.startswith(before):
            self._held, self._marked = self._held[len(before) :].lstrip(), True
        elif not final and before and may_become(self._held, before):
            return ""
        if self._skip:
            if self._held.startswith(self._skip):
                self._held, self._skip = self._held[len(self._skip) :], ""
                self.place = "answer"
                return ""
            if not final and may_become(self._held, self._skip):
                return ""
        if self._held or final:
            self.place = "answer"
        return ""

    def _answer(self, final: bool) -> str:
        """The answer without the mark that ends it. A mark that more text follows is text."""
        mark = self.marks.answer[1] if self._marked else ""
        stop = len(self._held)
        if mark:
            at = self._held.rfind(mark)
            if at >= 0 and not self._held[at + len(mark) :].strip():
                stop = len(self._held[:at].rstrip())
            elif not final:
                stop = len(self._held[: certain_length(self._held, (mark,))].rstrip())
        said, self._held = self._held[:stop], "" if final else self._held[stop:]
        return said


class ChannelSplitter(ThoughtSplitter):
    """Splits an answer that is a row of messages, each with its channel: gpt-oss.

    A call has a message of its own there. It becomes text in the form in which calls are read here.
    """

    _ends = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
    _called = ""  # the function that the message under way calls
    _written = False  # whether the beginning of that call was handed out
    _said = False  # whether the answer has said something

    def _start(self, final: bool) -> str:
        text = self._held.lstrip()
        if text.startswith(("<|channel|>", "<|start|>")):
            self.place = "header"
        elif final or not may_become(text, "<|channel|>", "<|start|>"):
            self.settle()
        return ""

    def _header(self, final: bool) -> str:
        """The header of a message, which names its channel and whom it is for."""
        header, found, rest = self._held.partition("<|message|>")
        if not found:
            self._held = "" if final else self._held
            return ""
        channel, to = re.search(r"<\|channel\|>\s*(\w+)", header), re.search(r"to=functions\.([\w.-]+)", header)
        self._held, self._called, self._marked = rest, "" if to is None else to[1], True
        if channel is not None and channel[1] == "analysis" and to is None:
            self.place, self.thought = "thought", True
            if self._begun:  # one more
                self._begun = False
                return Thought("\n\n")
            return ""
        self.place = "behind" if self._skip else "answer"
        return "\n\n" if self._said else ""

    def _thought(self, final: bool) -> str:
        said, ended = self._up_to(self._ends, final)
        if ended:
            self.place = "header"
        return Thought(said)

    def _answer(self, final: bool) -> str:
        at, mark = _first(self._held, self._ends)
        stop = at if at >= 0 else len(self._held) if final else certain_length(self._held, self._ends)
        said, self._held = self._held[:stop], "" if final else self._held[stop:]
        if at >= 0:
            self._held, self.place = self._held[len(mark) :], "header"
        if self._called:
            said = self._of_call(said, at >= 0 or final)
        self._said |= bool(said)
        return said

    def _of_call(self, said: str, ended: bool) -> str:
        """A piece of a call's arguments within the form in which calls are read."""
        said = said if self._written else said.lstrip()
        if not self._written and (said or ended):
            said = f'<tool_call>\n{{"name": "{self._called}", "arguments": {said or "{}"}'
            self._written = True
        if ended:
            said, self._called, self._written = f"{said.rstrip()}}}\n</tool_call>", "", False
        return said


def splitter_of(marks: ThoughtMarks, in_thought: bool = False, skip: str = "") -> ThoughtSplitter:
    """The splitter for a family; see `ThoughtSplitter`."""
    return (ChannelSplitter if marks.channels else ThoughtSplitter)(marks, in_thought, skip)


def _first(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Where the first of some marks stands in a text, and which it is; -1 if there is none."""
    return min(((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=(-1, ""))
