"""Names that no model can be loaded by, told from how they are written and from the folder that they name.

Nothing is loaded or fetched for it, and no hub is asked.
"""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

from cacheblend_rag.models.ollama import is_tag, local_path
from cacheblend_rag.models.starters import starter_named, starters_of

# How alike a name must be to a starter's to be taken for a slip of the pen.
_ALIKE = 0.7
_PLAIN = re.compile(r"[\w.-]+")
CONFIGS = ("config.json", "adapter_config.json", "modules.json")
"""Files that say how a folder is loaded: a model, an adapter, an embedder."""
_WEIGHTS = (".safetensors", ".bin", ".index.json", ".pt", ".pth", ".h5", ".msgpack", ".onnx")


def why_no_model(
    model: str | os.PathLike[str], kind: str = "language model", *, weights: bool = True, elsewhere: bool = False
) -> str | None:
    """The fault of a name that certainly names no model, with its remedy; None if only loading can tell.

    Parameters
    ----------
    model : str or path
    kind : {"language model", "embedder"}
        The kind of model that is wanted.
    weights : bool
        Whether a folder without weights is a fault.
    elsewhere : bool
        Whether the caller says by other arguments where in the folder the files are.

    Raises
    ------
    ModelLoadError
        If it is a starter of the other kind.
    """
    name, remedy = os.fspath(model), name_remedy(kind)
    if not name.strip():
        return remedy
    try:
        path = local_path(model)
        file = path.is_file()
    except (RuntimeError, OSError) as error:  # no such user, a name too long, a folder that may not be read
        return f"this cannot be looked up ({getattr(error, 'strerror', None) or error}); {remedy}"
    if starter_named(model, kind) is not None or file:
        return None
    if path.is_dir():
        return None if elsewhere else _fault_of_folder(path, kind, weights, remedy)
    if tag := tag_remedy(name):
        return tag
    if path.is_absolute() or name.startswith((".", "~")) or name.lower().endswith(".gguf") or name.count("/") > 1:
        beside = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
        near = "".join(f", but there is {one!r}" for one in get_close_matches(path.name, beside, n=1))
        return f"there is no such file or folder{near}; {remedy}"
    if "/" not in name and (alike := get_close_matches(name.lower(), starters_of(kind), n=2, cutoff=_ALIKE)):
        return f"there is no such folder; did you mean the starter model {' or '.join(map(repr, alike))}?"
    return None


def name_remedy(kind: str = "language model", said: str = "") -> str:
    """Everything that a model of a kind may be named by, as a phrase.

    Parameters
    ----------
    kind : {"language model", "embedder"}
    said : str
        The name by which no model was found. One like ``"llama3.2"`` may be of Ollama's library, which is then said.
    """
    kinds = "a folder of a saved model" + (", a GGUF file" if kind == "language model" else "")
    known = f"name {kinds}, a hub id or the starter model {' or '.join(map(repr, starters_of(kind)))}"
    plain = kind == "language model" and _PLAIN.fullmatch(said) and not os.path.exists(said)
    return f"if it is a name of Ollama's, {_instead_of(said)}; or {known}" if plain else known


def tag_remedy(said: str | os.PathLike[str]) -> str:
    """The names to use in place of a tag of Ollama's library, such as ``"llama3.2:3b"``; empty of any other name."""
    if not is_tag(said):
        return ""
    return (
        f"a tag of Ollama's library, and its file is not here: fetch it by `ollama pull {said}`, or name the model's "
        "id on the hub"
    )


def _instead_of(name: str) -> str:
    """The names to use in place of one of Ollama's library, as a phrase."""
    return (
        "name the model's id on the hub, such as 'meta-llama/Llama-3.2-3B-Instruct', or the GGUF file that "
        f"`ollama show --modelfile {name}` names behind FROM"
    )


def _fault_of_folder(folder: Path, kind: str, weights: bool, remedy: str) -> str | None:
    """The fault of a folder that holds no saved model."""
    names = sorted(one.name for one in folder.iterdir())
    if not names:
        return f"the folder is empty; {remedy}"
    if not set(CONFIGS).intersection(names):
        gguf = [one for one in names if one.lower().endswith(".gguf")] if kind == "language model" else []
        instead = f"name the file in it: {str(folder / gguf[0])!r}" if gguf else remedy
        return f"the folder holds no config.json; {instead}"
    if weights and kind == "language model" and not any(one.lower().endswith(_WEIGHTS) for one in names):
        fetch = "fetch the model whole, or save it by save_pretrained"
        return f"the folder holds no weights, such as model.safetensors; {fetch}; or {remedy}"
    return None
