"""Models that Ollama has fetched: GGUF files in its folder, named by tags such as ``qwen2.5:1.5b``."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

_TAG = re.compile(r"(?P<name>[\w.-]{2,}(?:/[\w.-]+)*):(?P<tag>[\w.-]+)")
# Of a user, and of the service that Ollama's installer sets up on Linux.
_FOLDERS = ("~/.ollama/models", "/usr/share/ollama/.ollama/models", "/var/lib/ollama/.ollama/models")
_WEIGHTS = "application/vnd.ollama.image.model"


def is_tag(model: str | os.PathLike[str]) -> bool:
    """Whether a name is written as a tag of Ollama's library."""
    return isinstance(model, str) and _TAG.fullmatch(model) is not None


def local_path(model: str | os.PathLike[str]) -> Path:
    """The local file of an Ollama tag; any other name as a path, with ``~`` expanded."""
    tag = _TAG.fullmatch(model) if isinstance(model, str) else None
    if tag is not None and not os.path.exists(model):
        folders = [os.environ["OLLAMA_MODELS"]] if os.environ.get("OLLAMA_MODELS") else _FOLDERS
        for folder in folders:
            if (file := _weights(Path(folder).expanduser(), tag["name"], tag["tag"])) is not None:
                return file
    return Path(model).expanduser()


def _weights(folder: Path, name: str, tag: str) -> Path | None:
    """The weights that Ollama's manifest of a model names."""
    parts = name.split("/")
    if len(parts) < 3:  # else it begins with a registry, such as hf.co
        parts = ["registry.ollama.ai", *(["library"] if len(parts) == 1 else []), *parts]
    try:
        manifest = json.loads(folder.joinpath("manifests", *parts, tag).read_text(encoding="utf-8"))
        digests = [layer["digest"] for layer in manifest["layers"] if layer["mediaType"] == _WEIGHTS]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    files = [folder / "blobs" / digest.replace(":", "-") for digest in digests]
    return files[0] if len(files) == 1 and files[0].is_file() else None
