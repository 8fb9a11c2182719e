"""Answers by greedy decoding, most of each read off one pass over an answer that is known already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cacheblend_rag.calibration.comparison import shared_cache
from cacheblend_rag.engine.decode import DecodeOptions, decode
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.fusor.teacher_forcing import answer_log_probs

# Settings of a generation config that do not keep greedy decoding from taking the likeliest token.
_HARMLESS = {
    "_from_model_config",
    "bos_token_id",
    "do_sample",
    "eos_token_id",
    "max_length",
    "max_new_tokens",
    "num_beams",
    "num_return_sequences",
    "pad_token_id",
    "temperature",
    "top_k",
    "top_p",
    "transformers_version",
    "use_cache",
}
# Known answers that are tried before tokens are generated one by one: a pass over one costs about two tokens.
_TRIES = 2


class GreedyAnswers:
    """Greedy answers to one prompt, whose KV several methods make.

    Methods mostly give the same answer, the gold one or full prefill's. One pass over a known answer shows whether
    greedy decoding writes it, to rounding; only where it does not are tokens generated one by one, from there on.

    Parameters
    ----------
    engine : BlendEngine
    prompt_ids : sequence of int
    max_new_tokens : int
        Most tokens of an answer.
    """

    def __init__(self, engine: BlendEngine, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
        self._engine, self._ids, self._most = engine, list(prompt_ids), max_new_tokens
        config = DecodeOptions(max_new_tokens=max_new_tokens, temperature=0.0).resolve(engine.model, engine.tokenizer)
        ends = config.eos_token_id
        self._ends = frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)
        self._plain = all(name in _HARMLESS or not value for name, value in config.to_diff_dict().items())
        self._known: list[list[int]] = []

    def text(self, cache: Any, logits: torch.Tensor, guess: Sequence[int], says: Sequence[int]) -> str:
        """The answer.

        Parameters
        ----------
        cache : transformers Cache
            KV of the prompt; it may grow.
        logits : Tensor, [vocab]
            Of the prompt's last position.
        guess : sequence of int
            Ids of an answer, and
        says : sequence of int
            the likeliest token where each of them stands.
        """
        if not self._plain:  # a penalty, say: what was written before changes what comes next
            return self._generated(cache, logits, self._ids, self._most)[1]
        ids, whole = self._followed(guess, says)
        for _ in range(_TRIES):
            other = None if whole else next((one for one in self._known if one[: len(ids)] == ids), None)
            if other is None:
                break
            found = answer_log_probs(self._engine.adapter, shared_cache(cache), logits, other)
            ids, whole = self._followed(other, found.argmax(dim=-1).tolist())
        if not whole:
            if ids:  # the KV of what is certain, and what comes next
                rows = answer_log_probs(self._engine.adapter, cache, logits, [*ids, ids[-1]])
                logits = rows[-1]
            ids += self._generated(cache, logits, [*self._ids, *ids], self._most - len(ids))[0]
        if ids not in self._known:
            self._known.append(ids)
        return str(self._engine.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _followed(self, guess: Sequence[int], says: Sequence[int]) -> tuple[list[int], bool]:
        """The certain part of the answer, up to the first token that differs, and whether that is all of it."""
        ids: list[int] = []
        for guessed, said in zip(guess, says, strict=True):
            ids.append(said)
            if said in self._ends or len(ids) == self._most:
                return ids, True
            if said != guessed:
                break
        return ids, False

    def _generated(self, cache: Any, logits: torch.Tensor, before: Sequence[int], most: int) -> tuple[list[int], str]:
        """Ids and text that decoding writes behind some ids."""
        options = DecodeOptions(max_new_tokens=most, temperature=0.0)
        model, tokenizer = self._engine.model, self._engine.tokenizer
        found = decode(model, tokenizer, input_ids=before, cache=cache, logits=logits, options=options)
        return found.token_ids, found.text
