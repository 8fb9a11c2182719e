"""Documents and models of ``ask`` and ``serve``; checked before anything heavy is loaded."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.config import (
    DEFAULT_EMBEDDER,
    DEFAULT_MODEL,
    DTYPES,
    BlendConfig,
    check_choice,
    check_whole,
    default_data_path,
)
from cacheblend_rag.errors import ConfigError

# Bytes for chunks that come back: those of one prompt and more in most models, little beside the model.
_MEMORY_LIMIT = 256 * 2**20
_DEVICE = re.compile(r"(auto|cpu|cuda|mps|xpu|hpu|xla)(:\d+)?")
# How alike a name must be to a starter's to be taken for a slip of the pen.
_ALIKE = 0.7


@dataclass(frozen=True, kw_only=True)
class FolderRAGOptions:
    """Documents to answer from, and models to answer with.

    Parameters
    ----------
    docs : path
        Folder of documents; by default the bundled articles.
    model, embedder : str or path
        Id or path of the model and of the sentence-transformers model; by default the starter models
        `DEFAULT_MODEL` and `DEFAULT_EMBEDDER` of `cacheblend_rag.config`.
    top_k : int
        Chunks retrieved for a question, by L2 distance.
    max_new_tokens : int
        Most tokens of an answer.
    data_dir : path, optional
        Where index and KV store are kept; by default a folder in the user's cache.
    shared_store : str, optional
        Address of a KV store that machines share, below the one in the data folder: ``"s3://bucket/kv"`` or
        ``"valkey://host:6379/0"``.
    device, dtype : str
        See `BlendEngine.from_pretrained`.
    config : BlendConfig
        Options of the engine.

    Raises
    ------
    ConfigError
        If a value is none that can be used.
    """

    docs: str | os.PathLike[str] = ARTICLES_PATH
    model: str | os.PathLike[str] = DEFAULT_MODEL
    embedder: str | os.PathLike[str] = DEFAULT_EMBEDDER
    top_k: int = 6
    max_new_tokens: int = 64
    data_dir: str | os.PathLike[str] | None = None
    shared_store: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    config: BlendConfig

    def __post_init__(self) -> None:
        check_whole("top_k", self.top_k, 1)
        check_whole("max_new_tokens", self.max_new_tokens, 1)
        check_choice("dtype", self.dtype, DTYPES)
        for name in ("docs", "data_dir"):
            if getattr(self, name) == "":  # not the folder the program happens to run in
                raise ConfigError(name, "", "name a folder")
        if self.shared_store is not None:
            from cacheblend_rag.store.factory import check_remote

            check_remote(self.shared_store, "shared_store")
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError("device", self.device, 'use "auto", "cpu", "cuda" or "cuda:0"')

    def check_paths(self) -> None:
        """Look whether folders and models are where they are said to be, without loading any.

        Raises
        ------
        DocumentError
            If the folder of documents is missing, is no folder or holds no file that can be read.
        ConfigError
            If the data folder cannot be written and holds nothing to read, or a model is not there.
        ModelLoadError
            If a starter model is named for what the other one does.
        """
        from cacheblend_rag.retrieval.documents import list_files

        list_files(self.docs)
        self._check_data_folder()
        check_model("model", self.model)
        _check_model("embedder", self.embedder, DEFAULT_EMBEDDER, "embedder")

    def _check_data_folder(self) -> None:
        folder = self.data_path
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            # One that cannot be written serves what is in it.
            if not (folder / "indexes").is_dir():
                why = error.strerror or str(error)
                raise ConfigError("data_dir", str(folder), f"{why}; name a folder that can be written") from error

    @property
    def data_path(self) -> Path:
        """Folder of index and KV store."""
        return Path(self.data_dir) if self.data_dir is not None else default_data_path()

    @property
    def store_locations(self) -> list[str]:
        """Where KV is kept, the nearest first."""
        return [str(self.data_path / "kv"), *filter(None, [self.shared_store])]

    @property
    def blending(self) -> BlendConfig:
        """Options of the engine; copies of what was read last stay in memory, unless something else was chosen."""
        config = self.config
        if config.memory_limit == "auto" and not self.on_gpu:
            config = replace(config, memory_limit=_MEMORY_LIMIT)
        return config

    @property
    def on_gpu(self) -> bool:
        """Whether the model will be on a GPU."""
        import torch

        return torch.cuda.is_available() if self.device == "auto" else self.device.startswith("cuda")


def check_model(field: str, given: str | os.PathLike[str]) -> None:
    """Refuse what is certainly no language model.

    Raises
    ------
    ConfigError
        If it is a path where nothing is, or a starter's name misspelt.
    ModelLoadError
        If it is the starter embedder.
    """
    _check_model(field, given, DEFAULT_MODEL, "language model")


def _check_model(field: str, given: str | os.PathLike[str], starter: str, kind: str) -> None:
    """Refuse what is certainly no model: a path where nothing is, or a starter's name misspelt."""
    from cacheblend_rag.models.starters import starter_named

    name = os.fspath(given)
    path = Path(name).expanduser()
    kinds = "a folder of a saved model" + (", a GGUF file" if kind == "language model" else "")
    other = f"name {kinds}, a hub id or the starter model {starter!r}"
    if not name.strip():
        raise ConfigError(field, name, other)
    if starter_named(given, kind):
        return
    if path.exists():
        if path.is_dir() and not any((path / one).is_file() for one in ("config.json", "modules.json")):
            raise ConfigError(field, name, f"the folder holds no config.json; {other}")
        return
    if path.is_absolute() or name.startswith((".", "~")) or name.lower().endswith(".gguf"):
        raise ConfigError(field, name, f"there is no such file or folder; {other}")
    if "/" not in name and get_close_matches(name.lower(), [starter], cutoff=_ALIKE):
        raise ConfigError(field, name, f"there is no such folder; did you mean the starter model {starter!r}?")
