"""An answer's thought while it is decoded: how long it may be, how it is ended, and what holds for the answer alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor

from cacheblend_rag.config import Reasoning
from cacheblend_rag.engine.logits import LogProbs, TokenMask
from cacheblend_rag.prompt.thoughts import BUDGETS, Thought, hidden_ids, marks_of, splitter_of

_TAIL = 32  # ids at a prompt's end in which the mark of a thought is looked for


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
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_ids: Sequence[int],
        reasoning: Reasoning = False,
        most: int | None = None,
        begins: str = "",
        constrained: bool = False,
    ) -> None:
        self._tokenizer, self.marks, self._begins = tokenizer, marks_of(tokenizer), begins
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

    def forcing(self, end_ids: frozenset[int]) -> LogitsProcessor:
        """The logits processor that ends a thought which is too long; to stand behind all others."""
        return _Forcing(self, end_ids)

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


class _Forcing(LogitsProcessor):  # type: ignore[misc]
    def __init__(self, thinking: Thinking, end_ids: frozenset[int]) -> None:
        self._thinking, self._end_ids = thinking, sorted(end_ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores ``[1, vocab]`` with minus infinity for what may not come next."""
        thinking = self._thinking
        if (token := thinking.next_forced()) is not None:
            scores = torch.full_like(scores, float("-inf"))
            scores[0, token] = 0.0
        elif thinking.constrained and thinking.splitter.place == "thought" and self._end_ids:
            scores = scores.clone()  # an answer that has a form does not end before it has begun
            scores[:, self._end_ids] = float("-inf")
        return scores
