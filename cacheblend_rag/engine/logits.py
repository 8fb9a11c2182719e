"""Options of the logits: penalties, a bias for single tokens, log-probabilities, a grammar."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers.generation import SequenceBiasLogitsProcessor

from cacheblend_rag.engine.grammar import Grammar, schema_error
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.report import TokenLogProb


def logit_bias(bias: Mapping[int, float], vocabulary: int) -> SequenceBiasLogitsProcessor:
    """The logits processor that adds a number to the logit of each token named.

    Parameters
    ----------
    bias : mapping of int to float
        The addends by token id; at least one.
    vocabulary : int
        Number of the model's tokens.

    Raises
    ------
    ConfigError
        If it names a token that the model does not have.
    """
    if (largest := max(bias)) >= vocabulary:
        raise ConfigError("logit_bias", largest, f"the model's tokens are 0 to {vocabulary - 1}")
    return SequenceBiasLogitsProcessor({(token,): float(value) for token, value in bias.items()})


class Penalties:
    """Makes tokens of the answer less likely to come again; those of its prompt do not count.

    A logits processor for one answer.

    Parameters
    ----------
    presence : float
        Taken off the logit of each token that the answer holds.
    frequency : float
        Taken off for each time that the answer holds it.
    """

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = presence, frequency
        self._begins: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores ``[1, vocab]`` less what is taken off."""
        if self._begins is None:
            self._begins = input_ids.shape[1]
        counts = torch.bincount(input_ids[0, self._begins :], minlength=scores.shape[-1]).to(scores)  # [vocab]
        return scores - self._frequency * counts - self._presence * (counts > 0)


class TokenMask:
    """Leaves an answer no tokens but those with which it follows a grammar.

    A logits processor for one answer, to stand behind all others.

    Parameters
    ----------
    grammar : Grammar
    end_ids : collection of int
        Tokens that end an answer; possible where the grammar is at an end.

    Raises
    ------
    ConfigError
        If there is no token that ends an answer. While it is applied: if the grammar turns out to be too complex.
    """

    def __init__(self, grammar: Grammar, end_ids: Collection[int]) -> None:
        if not end_ids:
            raise ConfigError("eos_token_id", None, "use a model with a token that ends its answers")
        self._grammar, self._matcher, self._end_ids = grammar, grammar.matcher(), sorted(end_ids)
        self._begins: int | None = None
        self._taken = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores ``[1, vocab]`` with minus infinity for what may not come next."""
        if self._begins is None:
            self._begins = input_ids.shape[1]
        for token in input_ids[0, self._begins + self._taken :].tolist():
            self._taken += 1
            if token not in self._end_ids:  # on a GPU one step more may be run behind it
                self._matcher.consume_token(token)
        allowed = self._allowed(scores.shape[-1]).to(scores.device)
        masked = scores.masked_fill(~allowed, float("-inf"))
        if bool((masked == float("-inf")).all()):  # others have forbidden all that may come
            masked = torch.zeros_like(scores).masked_fill(~allowed, float("-inf"))
        return masked

    def _allowed(self, vocabulary: int) -> torch.Tensor:
        """Which tokens may come next: bool ``[vocab]``."""
        allowed = np.zeros(vocabulary, dtype=bool)
        ends = self._matcher.is_accepting()
        if not self._matcher.is_stopped():
            bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            known = min(vocabulary, len(bits))
            allowed[:known] = bits[:known]
        if self._matcher.is_error():
            raise schema_error(self._grammar.field, self._matcher.get_error())
        allowed[self._end_ids] = ends
        return torch.from_numpy(allowed)


class LogProbs:
    """Notes how likely the model found each token of an answer.

    A logits processor for one answer, to stand before those that change the logits: what is noted is the model's own,
    before penalties, bias and temperature. One thread may generate while another reads. An answer that is verified is
    decoded twice; pieces are of the first time, and `rest` of the last.

    Parameters
    ----------
    tokenizer : transformers tokenizer
    top : int
        How many of the likeliest tokens are noted beside the one that was taken.
    """

    def __init__(self, tokenizer: Any, top: int) -> None:
        self._tokenizer, self._top = tokenizer, top
        self._first = self._last = _NotedAnswer(tokenizer, top)
        self._tokens = 0  # of prompt and answer, when it was called last

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note the newest token, and give the scores ``[1, vocab]`` back as they are."""
        if input_ids.shape[1] <= self._tokens:
            self._last = _NotedAnswer(self._tokenizer, self._top)
        self._tokens = input_ids.shape[1]
        self._last.add(input_ids, scores)
        return scores

    def pass_over(self) -> None:
        """Leave out the tokens so far: they are of a thought."""
        fresh = self._last.behind_these()
        self._first, self._last = fresh if self._first is self._last else self._first, fresh

    def up_to(self, characters: int) -> list[TokenLogProb]:
        """Tokens not handed out before whose text lies within so many characters of the answer."""
        return self._first.up_to(characters)

    def rest(self, token_ids: Sequence[int], text: str) -> list[TokenLogProb]:
        """Tokens of a finished answer that were not handed out before.

        Parameters
        ----------
        token_ids : sequence of int
            All ids of the answer.
        text : str
            Its text; what ended it, a stop string or a special token, has no part in it.
        """
        return self._last.rest(token_ids, text, self._first.handed_out)

    def whole(self, token_ids: Sequence[int], text: str) -> list[TokenLogProb]:
        """All tokens of a finished answer, handed out or not; see `rest`."""
        return self._last.rest(token_ids, text, 0)


class _NotedAnswer:
    """The tokens of an answer that is decoded once; see `LogProbs`."""

    def __init__(self, tokenizer: Any, top: int, passed_over: int = 0) -> None:
        self._tokenizer, self._top, self._passed_over = tokenizer, top, passed_over
        self._row: torch.Tensor | None = None  # of the token that is about to be taken, [vocab]
        self._noted: list[tuple[int, float, list[tuple[int, float]]]] = []
        self._ids: list[int] = []
        self._context = self._read = self._length = 0  # as in the decoder's text assembler
        self._given: list[TokenLogProb] = []
        self.handed_out = 0
        """How many tokens were."""

    def behind_these(self) -> _NotedAnswer:
        """A copy without the tokens so far; the scores of the next token are known."""
        fresh = _NotedAnswer(self._tokenizer, self._top, self._passed_over + len(self._noted))
        fresh._row = self._row
        return fresh

    def add(self, input_ids: torch.Tensor, scores: torch.Tensor) -> None:
        """Note the newest token, with the scores of the token after it."""
        if self._row is not None:
            self._note(int(input_ids[0, -1]), self._row)
        self._row = scores[0].float().log_softmax(-1)

    def up_to(self, characters: int) -> list[TokenLogProb]:
        """See `LogProbs.up_to`."""
        self._name_noted()
        begun = self.handed_out
        while self.handed_out < self._read:
            one = self._given[self.handed_out]
            if one.offset + len(one.text) > characters:
                break
            self.handed_out += 1
        return self._given[begun : self.handed_out]

    def rest(self, token_ids: Sequence[int], text: str, begun: int) -> list[TokenLogProb]:
        """See `LogProbs.rest`; ``begun`` tokens were handed out before."""
        token_ids = token_ids[self._passed_over :]
        if self._row is not None and len(self._noted) < len(token_ids):
            self._note(token_ids[len(self._noted)], self._row)
        del self._noted[len(token_ids) :]  # a GPU may have run one step past the end
        self._name_noted()
        if len(text) > self._length:  # it ends within a character, and shows that
            first = self._given[self._read]
            ended = [replace(one, offset=len(text)) for one in self._given[self._read + 1 :]]
            self._given[self._read :] = [replace(first, text=text[self._length :]), *ended]
        self.handed_out = len(self._given)
        return [one for one in self._given[begun:] if one.offset < len(text)]

    def _note(self, token: int, row: torch.Tensor) -> None:
        values, ids = row.topk(min(self._top, len(row)))
        self._noted.append((token, float(row[token]), list(zip(ids.tolist(), values.tolist(), strict=True))))

    def _name_noted(self) -> None:
        for token, logprob, top in self._noted[len(self._given) :]:
            context, before = self._ids[self._context :], self._ids[self._context : self._read]
            names = [self._named(context, one) for one in (token, *(other for other, _ in top))]
            self._ids.append(token)
            whole = self._decoded([*context, token], plain=True)
            known = self._decoded(before, plain=True)
            text = ""
            if len(whole) > len(known) and not whole.endswith("\N{REPLACEMENT CHARACTER}"):
                text = whole[len(known) :]
                if self._passed_over and not self._length:
                    text = text.lstrip()
                self._context, self._read = self._read, len(self._ids)
            alternatives = [(name, value) for name, (_, value) in zip(names[1:], top, strict=True)]
            self._given.append(TokenLogProb(names[0], text, self._length, logprob, alternatives))
            self._length += len(text)

    def _named(self, context: list[int], token: int) -> str:
        """The text of a token behind others, where a tokenizer may write it with a space that it lacks alone."""
        before = self._decoded(context)
        return self._decoded([*context, token])[len(before) :] or self._decoded([token])

    def _decoded(self, ids: list[int], plain: bool = False) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=plain, clean_up_tokenization_spaces=False))


def completion_logprobs(tokens: Sequence[TokenLogProb]) -> dict[str, Any]:
    """Log-probabilities of a plain text, as OpenAI's completions have them."""
    return {
        "tokens": [one.token for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        # The token that was taken is among them, and of several with one text the likeliest counts.
        "top_logprobs": [{**dict(reversed(one.top)), one.token: one.logprob} for one in tokens],
        "text_offset": [one.offset for one in tokens],
    }


def conversation_logprobs(tokens: Sequence[TokenLogProb] | None) -> dict[str, Any] | None:
    """Log-probabilities of an answer in a conversation, in OpenAI's form; None if they were not requested."""
    return None if tokens is None else {"content": logprob_dicts(tokens), "refusal": None}


def logprob_dicts(tokens: Sequence[TokenLogProb]) -> list[dict[str, Any]]:
    """One dict a token, as OpenAI has them in conversations."""
    return [
        {
            "token": one.token,
            "logprob": one.logprob,
            "bytes": list(one.text.encode()),
            "top_logprobs": [
                {"token": name, "logprob": value, "bytes": list(name.encode())} for name, value in one.top
            ],
        }
        for one in tokens
    ]


class Drawing:
    """Draws each token by random numbers of its own, so that what others draw is theirs.

    It leaves the drawn token alone to choose from. The tokens are those of ``torch.manual_seed(seed)`` before
    transformers' own drawing.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._chance = torch.Generator(device).manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        drawn = torch.multinomial(scores.softmax(dim=-1), 1, generator=self._chance)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)
