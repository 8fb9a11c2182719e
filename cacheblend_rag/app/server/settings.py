"""Settings of the server: its address, its users and its limits."""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.app.server.keys_file import KEYS_FILE, NAME, read_keys
from cacheblend_rag.config import (
    BYTES,
    ENV_PREFIX,
    FLAG,
    Kind,
    check_options,
    choice,
    declared,
    kind_of,
    number,
    option,
    path,
    text,
    whole,
)
from cacheblend_rag.errors import ConfigError

if TYPE_CHECKING:
    from cacheblend_rag.app.options import FolderRAGOptions

KEYS_VARIABLE = ENV_PREFIX + "API_KEYS"
MOST_PASSAGES = 50
"""Passages that a question may ask for."""

_MODEL_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,200}")
_NAME_WORDS = "1 to 200 letters, digits and the signs . _ - : /"
_SHORTEST_KEY = 16


def keys_from_environment() -> dict[str, str]:
    """API keys by tenant, from ``CACHEBLEND_RAG_API_KEYS``: ``name=key,name=key``.

    Raises
    ------
    ConfigError
        If an entry is no name and key, or a name comes twice.
    """
    found: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in os.environ.get(KEYS_VARIABLE, "").split(","))):
        name, _, key = entry.partition("=")
        if not NAME.fullmatch(name) or not key:
            raise ConfigError(KEYS_VARIABLE, "…", "use name=key,name=key; names are letters, digits, _ and -")
        if name in found:
            raise ConfigError(KEYS_VARIABLE, "…", f"give {name!r} one key")
        found[name] = key
    return found


_COUNT = whole(1)
_SECONDS = number("above 0 that is not infinite", lambda value: 0 < value < math.inf)
_limit = partial(option, prefix="LIMITS_")


@declared
@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much one request, one tenant and the whole server may take."""

    body_bytes: int = _limit(4_000_000, BYTES, "Of a request's body, uploads apart.")
    upload_bytes: int = _limit(
        20_000_000,
        BYTES,
        "Of one uploaded file. A body of several may have four times as much.",
        flag="upload-limit",
        metavar="SIZE",
        shown="20 MB",
    )
    upload_files: int = _limit(50, _COUNT, "Files of one upload.")
    uploading: int = _limit(8, _COUNT, "Uploads of one tenant that may be sent at once.")
    document_chars: int = _limit(5_000_000, _COUNT, "Characters of text in one document.")
    parse_seconds: float = _limit(60.0, _SECONDS, "Time that reading one file may take.")
    parse_bytes: int = _limit(2_000_000_000, BYTES, "Memory that reading one file may take.")
    question_chars: int = _limit(4_000, _COUNT, "Of a question.")
    prompt_chars: int = _limit(1_000_000, _COUNT, "Of all text of a request to the model.")
    prompt_tokens: int = _limit(131_072, _COUNT, "Tokens the model is fed, at most what it can take.")
    schema_chars: int = _limit(64_000, _COUNT, "Length of the JSON schemas of a request.")
    schema_bytes: int = _limit(1_000_000_000, BYTES, "Memory that compiling them may take.")
    schema_seconds: float = _limit(2.0, _SECONDS, "Time that compiling them may take.")
    answer_tokens: int = _limit(4_096, _COUNT, "Most tokens of an answer.")
    answer_seconds: float = _limit(300.0, _SECONDS, "Time an answer may take.")
    requests_per_minute: int = _limit(
        1_200,
        _COUNT,
        "Of one tenant that has a key. Requests of any kind count.",
        flag="requests-per-minute",
        metavar="N",
    )
    tokens_per_minute: int | None = _limit(
        None, _COUNT, "Of prompts and answers of one tenant.", flag="tokens-per-minute", metavar="N", shown="no limit"
    )
    queue: int = _limit(64, _COUNT, "Requests of one tenant that may wait.", flag="queue", metavar="N")
    queue_seconds: float = _limit(120.0, _SECONDS, "Time a request may wait.")
    connections: int = _limit(1_000, _COUNT, "Connections open at once, of all addresses.")
    address_connections: int = _limit(
        250,
        _COUNT,
        "Open at once from one address, a proxy too; of IPv6 from one network of 64 bits.",
        flag="connections",
        metavar="N",
    )
    head_seconds: float = _limit(10.0, _SECONDS, "Time in which the head of a request must come.")
    body_seconds: float = _limit(30.0, _SECONDS, "Longest gap in a request's body.")
    unread_seconds: float = _limit(30.0, _SECONDS, "Longest time in which a client takes nothing of its answer.")
    at_once: int = _limit(250, _COUNT, "Requests of one tenant under way at once, events that are followed too.")
    disk_bytes: int = _limit(
        5_000_000_000,
        BYTES,
        "Of the uploads of one tenant that has a key.",
        flag="disk-limit",
        metavar="SIZE",
        shown="5 GB",
    )
    documents: int = _limit(10_000, _COUNT, "Documents that one tenant that has a key may upload.")

    def __post_init__(self) -> None:
        check_options(self)

    def body_of(self, upload: bool) -> int:
        """Most bytes of a request's body."""
        return 4 * self.upload_bytes + 1_000_000 if upload else self.body_bytes


def _check_name(field: str, value: Any, name: Any = None) -> Any:
    """A public name of a model, or a value that holds one."""
    name = value if name is None else name
    if not isinstance(name, str) or not _MODEL_NAME.fullmatch(name):
        raise ConfigError(field, value, f"use {_NAME_WORDS}")
    return value


@declared
@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of ``cacheblend-rag serve``.

    `rag` says model, embedder, base documents and data folder. `api_keys` has the key of each tenant by its name.
    `data` is where uploads are, of several replicas one folder for all; by default the data folder.

    Raises
    ------
    ConfigError
        If the host is not of this machine alone and there is no key, or a key is unfit.
    """

    rag: FolderRAGOptions
    host: str = option("127.0.0.1", text(), "Where to listen.", flag="host", shown="127.0.0.1, this machine alone")
    port: int = option(8000, whole(0, 65_535), "Port; 0 for a free one.", flag="port")
    api_keys: Mapping[str, str] = field(default_factory=keys_from_environment, repr=False)
    concurrent: int | None = option(
        None,
        whole(1),
        "Answers under way at once. See `max_concurrent` of the engine.",
        flag="concurrent",
        metavar="N",
        shown="4; 1 on a GPU",
    )
    served_model_name: str | None = option(
        None,
        Kind(_NAME_WORDS, _check_name, toml=str),
        "What clients call the model.",
        flag="served-model-name",
        metavar="NAME",
        shown="its id, or its folder's name",
    )
    also_models: Sequence[str] = option(
        (),
        kind_of(
            'a list of texts, such as ["small=smollm2"]',
            lambda value: isinstance(value, (tuple, list)) and all(isinstance(one, str) for one in value),
            lambda given: tuple(filter(None, (one.strip() for one in given.split(",")))),
            list,
            tuple,
        ),
        "Another model, picked by name; can be given again. A path with = in it needs a name before it.",
        flag="also-model",
        metavar="[NAME=]PATH_OR_ID",
        shown="none",
        repeats=True,
    )
    keys_file: str | os.PathLike[str] | None = option(
        None,
        path("the name of a file"),
        "API keys, as `cacheblend-rag keys` writes them. Without any keys, all who reach the server are one tenant.",
        flag="keys-file",
        metavar="FILE",
        shown="keys.json in the data folder, if it is there",
    )
    access_log: str = option(
        "json", choice(("json", "off")), "A line of JSON a request, or off.", flag="access-log", metavar="FORM"
    )
    find_repeated: bool = option(
        True,
        FLAG,
        "Find text that several messages of a tenant hold, and reuse its KV; off where only documents may be stored.",
        flag="find-repeated",
        metavar="on|off",
    )
    data: Path | None = None
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_options(self)
        names = {self._first_name}
        for one in self.also_models:
            name, _ = _named(one)
            if "=" in one:
                _check_name("also_models", one, name)
            if name in names:
                remedy = f"two models would be called {name!r}: give this one a name of its own, as NAME=PATH_OR_ID"
                raise ConfigError("also_models", one, remedy)
            names.add(name)
        if self.rag.top_k > MOST_PASSAGES:
            raise ConfigError("top_k", self.rag.top_k, f"use a whole number from 1 to {MOST_PASSAGES}")
        keys = list(self.api_keys.values())
        # Each is hard to guess, and a request can carry it.
        fit = all(
            len(key) >= _SHORTEST_KEY and key.isascii() and key.isprintable() and key == key.strip() for key in keys
        )
        if len(set(keys)) < len(keys) or not fit:
            remedy = f"give each tenant a key of its own, of {_SHORTEST_KEY} printable ASCII characters or more"
            raise ConfigError(KEYS_VARIABLE, "…", remedy)
        kept = self.rag.data_path / KEYS_FILE
        if self.keys_file is not None or kept.exists():
            object.__setattr__(self, "keys_file", Path(self.keys_file or kept))
            read_keys(Path(self.keys_file or kept))
        if not self.is_loopback and not self.guarded:
            raise ConfigError(
                "host",
                self.host,
                "others could reach the server there: make a key with `cacheblend-rag keys add NAME`, set "
                f"{KEYS_VARIABLE} to name=key (such as the output of `openssl rand -hex 24`), or use 127.0.0.1",
            )

    def check_paths(self) -> None:
        """`FolderRAGOptions.check_paths`, and whether the further models are where they are said to be.

        Raises
        ------
        CacheBlendError
            If something is not there.
        """
        from cacheblend_rag.app.options import check_model

        self.rag.check_paths(may_be_empty=True)
        for one in self.also_models:
            check_model("also_models", _named(one)[1])

    @property
    def models(self) -> dict[str, str]:
        """Paths or ids of all models by their public names. The first model answers requests that name no model."""
        return {self._first_name: os.fspath(self.rag.model), **dict(map(_named, self.also_models))}

    @property
    def _first_name(self) -> str:
        return self.served_model_name or without_folders(os.fspath(self.rag.model))

    @property
    def guarded(self) -> bool:
        """Whether requests need a key."""
        return bool(self.api_keys) or self.keys_file is not None

    @property
    def documents_path(self) -> Path:
        """Folder of uploads and of what belongs to tenants."""
        return self.data or self.rag.data_path

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a name or an address of a host is that of its own machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def without_folders(model: str) -> str:
    """An id as it is; of a path its last part: where it lies is nothing for clients."""
    return Path(model).resolve().name if os.path.exists(model) else model


def _named(given: str) -> tuple[str, str]:
    """Name and path or id of one of the further models."""
    name, _, model = given.partition("=") if "=" in given else ("", "", given)
    model = expanduser(model)
    return (name if "=" in given else without_folders(model)), model
