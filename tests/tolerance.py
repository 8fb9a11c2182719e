"""How far two right ways of computing the same floats may be apart.

A sum of n products, in whichever order, is off by at most n u sum(abs(a b)). Here u = eps / 2 is the largest relative
error of one rounding (Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1). So two ways are apart by
at most n eps sum(abs(a b)), and sums that feed each other add their errors up.

The bound grows with n, not with its square root. The root holds for errors that are independent, which no processor
promises. What n leaves over pays for what is not counted: sum(abs(a b)) may exceed the largest result, and exponentials
and norms have errors of their own. A result of other rows, positions or weights is off by orders of magnitude more.

The bound is relative to the largest element of a tensor. An element near zero is the rest of a sum of larger ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

# Results in a row on one layer, each rounded to a narrow type: norm (2), query, rotation (3), scores, softmax, values,
# output, residual; norm (2), gate, activation, their product, output, residual.
_ROUNDINGS = 17


def assert_close(found: torch.Tensor, expected: torch.Tensor, terms: int) -> None:
    """Both are the same but for the rounding of sums of so many terms in all, one after another.

    Parameters
    ----------
    found, expected : Tensor
        Of any float types; the coarser one counts.
    terms : int
        Lengths of all sums on the longest way to a result, added up.
    """
    eps = max(torch.finfo(one.dtype).eps for one in (found, expected))
    largest = float(expected.nan_to_num(0.0, 0.0, 0.0).abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found.to(expected.dtype), expected, rtol=0.0, atol=terms * eps * largest, equal_nan=True)


def terms_of(model: Any, tokens: int, layers: int | None = None) -> int:
    """Lengths of the sums on the way through some first layers (default: all of them, and the output head).

    Parameters
    ----------
    tokens : int
        Most positions that a row sees.
    """
    config = model.config.get_text_config()
    width, heads = config.hidden_size, config.num_attention_heads
    head = getattr(config, "head_dim", None) or width // heads
    # Norm, queries; scores, values, output; norm, gate, product of the network.
    layer = 2 * width + head + tokens + heads * head + 2 * width + config.intermediate_size
    return config.num_hidden_layers * layer + 2 * width if layers is None else layers * layer


def assert_logits_close(found: torch.Tensor, expected: torch.Tensor, model: Any, tokens: int) -> None:
    """Logits of two whole passes of a model are the same but for rounding."""
    assert_close(found, expected, terms_of(model, tokens))


def assert_layers_close(found: Iterable[Any], expected: Iterable[Any], model: Any) -> None:
    """Keys and values of each layer are the same but for rounding, of two whole passes of a model."""
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True), 1):
        terms = terms_of(model, theirs.keys.shape[2], number)
        assert_close(ours.keys, theirs.keys, terms)
        assert_close(ours.values, theirs.values, terms)


def narrow_error(model: Any) -> float:
    """Largest norm of the difference of two passes in the model's narrow type, relative to the result's norm.

    Products are summed in float32 there, and each result is rounded once. Over all elements of a tensor such roundings
    are independent, and so are those of two ways: all of them count by the square root of their number.
    """
    layers = model.config.get_text_config().num_hidden_layers
    return float((2 * _ROUNDINGS * layers) ** 0.5 * torch.finfo(model.dtype).eps / 2)
