"""What training minimises: predicting the next id, and reading in a way that makes answers possible.

Next ids alone taught the model to find facts within a passage but not to settle, while reading, whom a passage about
"the violinist" is about, nor which number is larger (docs/decisions/0003). So more is asked for: a middle layer must
know who is meant and, where a number ends, its size; one attention head must look at the passage that says whose role
it is, and later ones, where an answer gives a value, at the place that tells it, and where it has compared two
numbers, at their ends. None of this is in the exported model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.toy.archive import NUMBERS

GUIDED = ("known", "owners", "sources", "rests", "sizes", "pairs")
"""What guidance asks for: who is meant, owners, sources of values, their next ids, numbers' sizes, numbers compared."""


@dataclass(frozen=True)
class Guidance:
    """Which layers are asked to read in a certain way; the defaults are for training from random weights.

    Parameters
    ----------
    owner : int
        Layer whose first head looks up the owner of a role. Behind it a probe must name who is meant.
    source : int
        Layer whose first head looks up the source of a value, and whose first head with other keys looks for the rest
        of it.
    """

    owner: int = 4
    source: int = 6

    @property
    def probed(self) -> int:
        """After how many layers the model is asked whom a passage is about."""
        return self.owner + 1

    @property
    def sized(self) -> int:
        """After how many layers the model is asked for the size of a number: so early that later ones can compare."""
        return max(1, self.source - 2)

    @property
    def compared(self) -> int:
        """Layer whose heads look at the ends of the two numbers that a comparison must weigh."""
        return max(0, self.source - 1)

    def moved(self, places: Sequence[int | None]) -> Guidance:
        """Return where these layers lie in a model whose layers begin as those (None: as a new one)."""
        return Guidance(*(places.index(at) if at in places else at for at in (self.owner, self.source)))


class Probes(nn.Module):
    """What is asked of hidden vectors while training; not exported.

    ``about`` gives a vector that the output head turns into a name, ``size`` a number's size as one of each kind.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.about = nn.Sequential(nn.RMSNorm(hidden), nn.Linear(hidden, hidden))
        self.size = nn.Sequential(nn.RMSNorm(hidden), nn.Linear(hidden, len(NUMBERS)))


class TrainingLoss(nn.Module):
    """Weighted cross-entropy at the chosen positions, with the guidance above where ``about_weight`` is positive."""

    def __init__(self, model: Any, probes: Probes, about_weight: float, guidance: Guidance) -> None:
        super().__init__()
        self.model, self.probes, self.about_weight, self.guidance = model, probes, about_weight, guidance

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor,
        about_positions: torch.Tensor,
        about: torch.Tensor,
        owners: torch.Tensor,
        sources: torch.Tensor,
        rests: torch.Tensor,
        firsts: torch.Tensor,
        seconds: torch.Tensor,
        number_positions: torch.Tensor,
        sizes: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the loss, which predictions are right [rows, kept], and the shares of right guidance (`GUIDED`).

        The shapes are those of `curriculum.Batch`.
        """
        guided = self.about_weight > 0
        out = self.model.model(input_ids=ids, use_cache=False, output_hidden_states=guided)
        logits = self.model.lm_head(_at(out.last_hidden_state, positions)).float()  # [rows, kept, vocab]
        flat = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        loss = (flat * weights.flatten()).sum() / weights.sum()
        right = logits.argmax(-1) == targets
        if not guided:
            return loss, right, loss.new_zeros(len(GUIDED))
        where = self.guidance
        middle = _at(out.hidden_states[min(where.probed, len(out.hidden_states) - 1)], about_positions)
        named = self.model.lm_head(self.probes.about(middle)).float()  # [rows, chosen, vocab]
        asked = nn.functional.cross_entropy(named.flatten(0, 1), about.flatten(), ignore_index=-1, reduction="sum")
        known = (about >= 0).sum().clamp(min=1)
        owner_loss, owner_found = looking(self.model.model, out.hidden_states, where.owner, owners)
        source_loss, source_found = looking(self.model.model, out.hidden_states, where.source, sources)
        rest_loss, rest_found = looking(self.model.model, out.hidden_states, where.source, rests, group=1)
        at = out.hidden_states[min(where.sized, len(out.hidden_states) - 1)]
        size_loss, size_known = self._sizing(_at(at, number_positions), sizes)
        first_loss, first_found = looking(self.model.model, out.hidden_states, where.compared, firsts)
        second_loss, second_found = looking(self.model.model, out.hidden_states, where.compared, seconds, group=1)
        guidance = asked / known + owner_loss + source_loss + rest_loss + size_loss + (first_loss + second_loss) / 2
        found = [(named.argmax(-1) == about).sum() / known, owner_found, source_found, rest_found, size_known]
        found.append((first_found + second_found) / 2)
        return loss + self.about_weight * guidance, right, torch.stack(found)

    def _sizing(self, hidden: torch.Tensor, sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return how far the sizes told by the probe are off, in tenths, and the share of those off by 0.01 at most."""
        asked = ~sizes.isnan()
        off = (self.probes.size(hidden).float() - sizes.nan_to_num()).abs()  # [rows, chosen, kinds]
        count = asked.sum().clamp(min=1)
        return 10 * (off * asked).sum() / count, ((off <= 0.01) & asked).sum() / count


def looking(
    decoder: Any, hidden_states: Any, layer_index: int, looks: torch.Tensor, group: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how little a head looks where it should, and the share of positions where it does.

    Parameters
    ----------
    decoder : transformers.LlamaModel or transformers.Qwen3Model
    hidden_states : sequence of torch.Tensor
        The input of each layer [rows, length, hidden].
    layer_index : int
        Zeros are returned where the model has no such layer yet.
    looks : torch.Tensor
        [rows, chosen, 3]: a position, and the first and last-but-one of the positions it should look at; -1: unused.
    group : int
        The head is the first of those that share this key head.
    """
    if layer_index >= len(decoder.layers):
        return hidden_states[0].new_zeros(()), hidden_states[0].new_zeros(())
    layer = decoder.layers[layer_index]
    attention, size = layer.self_attn, layer.self_attn.head_dim
    head = group * attention.num_key_value_groups
    hidden = layer.input_layernorm(hidden_states[layer_index])
    places = torch.arange(hidden.shape[1], device=hidden.device)
    cos, sin = decoder.rotary_emb(hidden, places.unsqueeze(0))
    at = looks[..., 0].clamp(min=0)  # [rows, chosen]
    query = nn.functional.linear(_at(hidden, at), attention.q_proj.weight[head * size : (head + 1) * size])
    key = nn.functional.linear(hidden, attention.k_proj.weight[group * size : (group + 1) * size])
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    query = query * cos[0][at] + _turned(query) * sin[0][at]
    key = key * cos + _turned(key) * sin
    scores = (query @ key.transpose(1, 2)).float() * size**-0.5  # [rows, chosen, length]
    scores = scores.masked_fill(places > at.unsqueeze(-1), -1e4)
    inside = (places >= looks[..., 1:2]) & (places < looks[..., 2:3])
    used = looks[..., 0] >= 0
    count = used.sum().clamp(min=1)
    missed = scores.logsumexp(-1) - scores.masked_fill(~inside, -1e4).logsumexp(-1)
    found = inside.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1) & used
    return (missed * used).sum() / count, found.sum() / count


def _turned(vectors: torch.Tensor) -> torch.Tensor:
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _at(hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows of ``hidden`` [rows, length, hidden] at ``positions`` [rows, chosen]."""
    return hidden.gather(1, positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
