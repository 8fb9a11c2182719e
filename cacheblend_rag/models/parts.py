"""Attributes of transformers' modules, or a clear word on what the installed version lacks."""

from __future__ import annotations

from typing import Any

import transformers

from cacheblend_rag.errors import UnsupportedModelError

__all__ = ["misshapen", "part_of"]


def part_of(module: Any, name: str) -> Any:
    """An attribute of a module, or an error that says what the installed transformers lacks."""
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise misshapen(module, name) from error


def misshapen(owner: Any, name: str | None) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(owner).__name__} of transformers {transformers.__version__} has no {name!r}: either "
        "transformers has renamed it, and a version this package was tested with is needed, or the model "
        "is not shaped like the family it is treated as"
    )
