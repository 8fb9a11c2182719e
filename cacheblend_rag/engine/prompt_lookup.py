"""Several tokens of an answer in one pass, where the prompt seems to have them already.

Answers about documents repeat what the documents say. If the newest tokens of an answer stand in the prompt, those that
follow there are tried: one pass gives the logits behind each of them. A token is taken from them only if the answer
chose the very token that was tried, so what is answered does not change. This is prompt lookup decoding (A. Saxena,
2023, https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cacheblend_rag.models.cache import take_back

TRIED_AT_ONCE = 6
"""Most tokens of an answer that are tried at once."""

_LENGTHS = (3, 2)  # newest tokens that are looked for, the longest first


class PromptLookup:
    """Takes the steps of one answer.

    Parameters
    ----------
    ids : sequence of int
        The prompt.
    cache : transformers Cache
        Its KV, which grows by the answer.
    most : int
        Tokens tried at once.
    window : int
        Most tokens of prompt and answer.
    take : callable
        Takes what transformers hands to the model, with one or more ids, and gives logits ``[1, ids, vocab]``.
    wanted : callable
        Whether a step may have more than one id; asked before each.
    """

    def __init__(
        self,
        ids: Sequence[int],
        cache: Any,
        *,
        most: int,
        window: int,
        take: Callable[[Mapping[str, Any]], torch.Tensor],
        wanted: Callable[[], bool],
    ) -> None:
        self._text, self._cache, self._take, self._wanted = _TokenText(ids), cache, take, wanted
        self._most, self._window = most, window
        self._tried: deque[tuple[int, torch.Tensor]] = deque()  # tokens and the logits behind each

    def __call__(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """The logits behind the newest token, ``[1, 1, vocab]``."""
        newest = inputs["input_ids"]
        token = int(newest)
        self._text.append(token)
        if self._tried and self._tried[0][0] == token:
            return self._tried.popleft()[1][None, None]
        self.close()
        room = self._window - len(self._text)
        tried = self._text.continuation(min(self._most, room)) if self._wanted() else []
        rows = self._take({**inputs, "input_ids": torch.cat((newest, newest.new_tensor([tried])), dim=1)})[0]
        self._tried.extend(zip(tried, rows[1:], strict=True))
        return rows[None, :1]

    def close(self) -> None:
        """Remove rejected tokens from the cache."""
        if self._tried:
            take_back(self._cache, len(self._tried))
            self._tried.clear()


class _TokenText:
    """The tokens so far, and where each few of them stood last."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}
        for token in ids:
            self.append(token)

    def __len__(self) -> int:
        return len(self._ids)

    def append(self, token: int) -> None:
        """Go on by a token. Those before it are known from now on."""
        place = len(self._ids)
        for length in _LENGTHS:
            if place >= length:
                self._behind[tuple(self._ids[place - length :])] = place
        self._ids.append(token)

    def continuation(self, most: int) -> list[int]:
        """Tokens that followed when the newest tokens stood in the text before."""
        if most < 1:
            return []
        for length in _LENGTHS:
            place = self._behind.get(tuple(self._ids[-length:]))
            if place is not None:
                return self._ids[place : place + most]
        return []
