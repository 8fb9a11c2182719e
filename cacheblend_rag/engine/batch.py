"""The order in which the prompts of a batch are answered: those with chunks in common together."""

from __future__ import annotations

from collections.abc import Sequence


def by_common_chunks(prompts: Sequence[Sequence[str]]) -> list[int]:
    """An order of prompts in which those with chunks in common are neighbours.

    Parameters
    ----------
    prompts : sequence of sequence of str
        The chunks of each prompt.

    Returns
    -------
    list of int
        Their numbers: always the prompt next that shares the most chunks with the one before, of
        several the first.
    """
    chunks = [frozenset(prompt) for prompt in prompts]
    waiting, order = dict.fromkeys(range(len(prompts))), list[int]()
    last: frozenset[str] = frozenset()
    while waiting:
        number = max(waiting, key=lambda one: (len(chunks[one] & last), -one))
        del waiting[number]
        order.append(number)
        last = chunks[number]
    return order
