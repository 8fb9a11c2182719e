"""A conversation with a model: its turns, the tools that may be called, and how much is thought."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cacheblend_rag.config import Reasoning
from cacheblend_rag.prompt.chat import check_choice, opening, render_turns
from cacheblend_rag.prompt.matching import RetrievedDocument, match_chunks
from cacheblend_rag.prompt.prompt import Prompt
from cacheblend_rag.prompt.registry import ChunkRegistry
from cacheblend_rag.prompt.thoughts import begin_answer, thinks


@dataclass(frozen=True)
class WrittenConversation:
    """A conversation as the model reads it, with the beginning of its answer.

    Parameters
    ----------
    text : str
        The finished prompt.
    opening : str
        Beginning of the answer that is written for the model, which is a call; empty if it makes its own.
    later : str
        The part of that which is written behind a thought.
    reasoning : bool or str
        Whether the model will think.
    """

    text: str
    opening: str
    later: str
    reasoning: Reasoning


@dataclass(frozen=True)
class Conversation:
    """A conversation that is to be answered.

    Parameters
    ----------
    turns : sequence of dict
        Messages as chat templates take them, each with a text; see `turn_of`.
    tools : sequence of dict or None
        Tools that may be called, in OpenAI's form.
    choice : object
        Which of them must be called, as `check_choice` takes it.
    reasoning : bool or str
        Whether the model shall think.
    options : dict, optional
        Anything else that the chat template takes.
    """

    turns: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    choice: Any = None
    reasoning: Reasoning = False
    options: Mapping[str, Any] | None = None

    def write(self, tokenizer: Any, text: str | None = None) -> WrittenConversation:
        """Write the conversation by the chat template, unless its text is given.

        Raises
        ------
        ConfigError
            If there is no such tool, or no chat template that takes the conversation.
        PromptError
            If the template refuses it.
        """
        begun = opening(check_choice(self.choice, [tool["function"]["name"] for tool in self.tools or ()]), tokenizer)
        if text is None:
            text = render_turns(tokenizer, self.turns, self.tools, self.options, self.reasoning)
        level = thinks(self.reasoning, self.options)
        text, later = begin_answer(tokenizer, text, begun, level)
        return WrittenConversation(text, begun, later, level)

    def split(
        self,
        text: str,
        known: ChunkRegistry,
        separator: str,
        documents: Iterable[RetrievedDocument] = (),
        reuse_answers: bool = True,
    ) -> Prompt:
        """The segments of the written conversation.

        Separators count within messages alone, and nothing from the first message on that is not the system's becomes
        part of the prefix. A template may strip a message, move it or write it otherwise; one that is not found behind
        the one before is passed over.

        Parameters
        ----------
        text : str
            As it is written.
        known : ChunkRegistry
        separator : str
        documents : iterable of RetrievedDocument
            Documents that were retrieved for it.
        reuse_answers : bool
            Whether earlier answers are chunks, too.
        """
        parts, questions, behind = list[tuple[int, int]](), [len(text)], 0
        for turn in self.turns:
            said = turn["content"]
            if not (content := said.strip()):
                continue
            if (at := text.find(content, behind)) >= 0:
                behind = at + len(content)
                parts.append((at, behind))
            if turn["role"] != "system":
                questions.append(text.find(said if said in text else content))  # wherever the template put it first
        prompt = match_chunks(
            text,
            known,
            separator,
            documents=documents,
            parts=parts,
            questions_from=max(0, min(questions)),
            quotes=[one["content"] for one in self.turns if one["role"] == "assistant"] if reuse_answers else (),
        )
        return replace(prompt, turns=tuple(self.turns))


def turn_of(
    role: str, text: str, thought: str = "", calls: Iterable[tuple[str | None, str, Any]] = (), **answered: str
) -> dict[str, Any]:
    """A message as chat templates take it.

    Parameters
    ----------
    role, text : str
    thought : str
        The thought before an answer.
    calls : iterable of (str, str, dict)
        Calls of tools: the id, the name and the arguments of each.
    **answered
        ``tool_call_id`` and ``name`` of the call that a tool has answered.
    """
    turn = {"role": role, "content": text, **({"reasoning_content": thought} if thought else {}), **answered}
    made = [
        {"type": "function", "id": one, "function": {"name": name, "arguments": given}} for one, name, given in calls
    ]
    return {**turn, "tool_calls": made} if made else turn
