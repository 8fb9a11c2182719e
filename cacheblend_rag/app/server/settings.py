"""Settings of the server: its address, its users and its limits."""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.app.server.keys_file import KEYS_FILE, NAME, read_keys
from cacheblend_rag.config import ENV_PREFIX, Option, check_above_zero, check_choice, check_whole, parse_bytes
from cacheblend_rag.errors import ConfigError

if TYPE_CHECKING:
    from cacheblend_rag.app.options import FolderRAGOptions

KEYS_VARIABLE = ENV_PREFIX + "API_KEYS"
MOST_PASSAGES = 50
"""Passages that a question may ask for."""

ACCESS_LOGS = ("json", "text", "off")
_MODEL_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,200}")
_SHORTEST_KEY = 16
_CREDENTIALS = "PGUSER, PGPASSWORD and the other variables and files of libpq"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much one request, one tenant and the whole server may take.

    Parameters
    ----------
    body_bytes : int
        Of a request's body, uploads apart.
    upload_bytes : int
        Of one uploaded file; a body of several may have four times as much.
    upload_files : int
        Files of one upload.
    uploading : int
        Uploads of one tenant that may be sent at once.
    document_chars : int
        Characters of text in one document.
    parse_seconds : float
        Time that reading one file may take.
    parse_bytes : int
        Memory that reading one file may take.
    question_chars, prompt_chars : int
        Of a question, and of all text of a request to the model.
    prompt_tokens : int
        Tokens the model is fed, at most what it can take.
    prompt_seconds : float
        Time that making a prompt of a request may take.
    images, image_pixels : int
        Images of one conversation, and pixels of all of them together.
    schema_chars, schema_bytes, schema_seconds : int, int, float
        Length of the JSON schemas of a request, and memory and time that compiling them may take.
    answer_tokens : int
        Most tokens of an answer.
    answer_seconds : float
        Time an answer may take.
    requests_per_minute : int
        Requests of any kind that one tenant may send in a minute, where requests need a key.
    tokens_per_minute : int, optional
        Tokens of prompts and answers that one tenant may use in a minute; None for no such limit.
    queue : int
        Requests of one tenant that may wait.
    queue_seconds : float
        Time a request may wait.
    connections, address_connections : int
        Open at once, of all and of one address. A proxy before the server is one address.
    head_seconds, body_seconds : float
        Time in which the head of a request must come, and the longest gap in its body.
    jobs : int
        Uploads of one tenant that may wait.
    disk_bytes : int
        Bytes that one tenant's uploads, passages and vectors may take.
    collections, documents : int
        Collections of a tenant, and documents in one.
    """

    body_bytes: int = 4_000_000
    upload_bytes: int = 20_000_000
    upload_files: int = 50
    uploading: int = 8
    document_chars: int = 5_000_000
    parse_seconds: float = 60.0
    parse_bytes: int = 2_000_000_000
    question_chars: int = 4_000
    prompt_chars: int = 1_000_000
    prompt_tokens: int = 131_072
    prompt_seconds: float = 20.0
    images: int = 8
    image_pixels: int = 20_000_000
    schema_chars: int = 64_000
    schema_bytes: int = 1_000_000_000
    schema_seconds: float = 2.0
    answer_tokens: int = 4_096
    answer_seconds: float = 300.0
    requests_per_minute: int = 1_200
    tokens_per_minute: int | None = None
    queue: int = 64
    queue_seconds: float = 120.0
    connections: int = 1_000
    address_connections: int = 250
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    jobs: int = 32
    disk_bytes: int = 5_000_000_000
    collections: int = 200
    documents: int = 10_000

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.default is None and value is None:
                continue
            if isinstance(one.default, int | None):
                check_whole(one.name, value, 1)
            check_above_zero(one.name, value)
            if not math.isfinite(value):
                raise ConfigError(one.name, value, "use a number that is not infinite")

    def body_of(self, upload: bool) -> int:
        """Most bytes of a request's body."""
        return 4 * self.upload_bytes + 1_000_000 if upload else self.body_bytes


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


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of ``cacheblend-rag serve``.

    Parameters
    ----------
    rag : FolderRAGOptions
        Model, embedder, base documents and data folder.
    host, port
        Where to listen; port 0 takes a free one.
    api_keys : mapping of str to str
        Key of each tenant, by its name.
    keys_file : path, optional
        More keys, as `cacheblend-rag keys` writes them; by default ``keys.json`` in the data folder, if it is there.
        Without any keys, all who reach the server are one tenant.
    limits : Limits
    concurrent : int, optional
        Answers that may be under way at once (`BlendConfig.max_concurrent`); by default 4 on a CPU, else 1.
    served_model_name : str, optional
        Public name of the model; by default its id, or the last part of its path.
    also_models : sequence of str
        Further models that requests can name, each as ``"PATH_OR_ID"`` or ``"NAME=PATH_OR_ID"``, where clients call it
        NAME. A path with ``=`` in it needs a name before it.
    access_log : {"json", "text", "off"}
        Form of the line that is logged of each request.
    database : str, optional
        Address of a PostgreSQL database that several servers share; by default collections lie in the data folder.

    Raises
    ------
    ConfigError
        If the host is not of this machine alone and there is no key, or a key is unfit.
    """

    rag: FolderRAGOptions
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Mapping[str, str] = field(default_factory=keys_from_environment, repr=False)
    keys_file: str | os.PathLike[str] | None = None
    limits: Limits = field(default_factory=Limits)
    concurrent: int | None = None
    served_model_name: str | None = None
    also_models: Sequence[str] = ()
    access_log: str = "json"
    database: str | None = None

    def __post_init__(self) -> None:
        if self.served_model_name is not None:
            _check_name("served_model_name", self.served_model_name, self.served_model_name)
        self._check_also_models()
        if self.rag.top_k > MOST_PASSAGES:
            raise ConfigError("top_k", self.rag.top_k, f"use a whole number from 1 to {MOST_PASSAGES}")
        check_choice("access_log", self.access_log, ACCESS_LOGS)
        if self.database is not None:
            from cacheblend_rag.store.remote import check_address

            check_address(self.database, ("postgresql", "postgres"), _CREDENTIALS, "database")
        if self.concurrent is not None:
            check_whole("concurrent", self.concurrent, 1)
        keys = list(self.api_keys.values())
        if len(set(keys)) < len(keys) or any(len(key) < _SHORTEST_KEY or not key.isascii() for key in keys):
            raise ConfigError(
                KEYS_VARIABLE, "…", f"give each tenant a key of its own, of {_SHORTEST_KEY} plain characters or more"
            )
        if not isinstance(self.port, int) or not 0 <= self.port <= 65_535:
            raise ConfigError("port", self.port, "use a number from 0 to 65535")
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

    def _check_also_models(self) -> None:
        if isinstance(self.also_models, str) or not all(isinstance(one, str) for one in self.also_models):
            raise ConfigError("also_models", self.also_models, 'use a list of texts, such as ["small=smollm2"]')
        object.__setattr__(self, "also_models", tuple(self.also_models))
        names = {self._first_name}
        for one in self.also_models:
            name, _ = _named(one)
            if "=" in one:
                _check_name("also_models", one, name)
            if name in names:
                remedy = f"two models would be called {name!r}: give this one a name of its own, as NAME=PATH_OR_ID"
                raise ConfigError("also_models", one, remedy)
            names.add(name)

    def check_paths(self) -> None:
        """`FolderRAGOptions.check_paths`, and whether the further models are where they are said to be.

        Raises
        ------
        CacheBlendError
            If something is not there.
        """
        from cacheblend_rag.app.options import check_model

        self.rag.check_paths()
        for one in self.also_models:
            check_model("also_models", _named(one)[1])

    @property
    def models(self) -> dict[str, str]:
        """Paths or ids of all models by what clients call them; the first answers where a request names none."""
        return {self._first_name: os.fspath(self.rag.model), **dict(map(_named, self.also_models))}

    @property
    def _first_name(self) -> str:
        return self.served_model_name or without_folders(os.fspath(self.rag.model))

    @property
    def guarded(self) -> bool:
        """Whether requests need a key."""
        return bool(self.api_keys) or self.keys_file is not None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
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


def _check_name(field: str, value: str, name: str) -> None:
    if not _MODEL_NAME.fullmatch(name):
        raise ConfigError(field, value, "as a name, use 1 to 200 letters, digits and the signs . _ - : /")


def _listed(given: str | Sequence[str]) -> tuple[str, ...]:
    """Texts between commas, or a list of texts as it is."""
    return tuple(filter(None, (one.strip() for one in given.split(",")))) if isinstance(given, str) else tuple(given)


SERVER_OPTIONS = (
    Option("host", "127.0.0.1", str, flag="host", help="where to listen", shown="127.0.0.1, this machine alone"),
    Option("port", 8000, int, flag="port", help="port; 0 for a free one"),
    Option(
        "concurrent",
        None,
        int,
        flag="concurrent",
        metavar="N",
        help="answers under way at once",
        shown="4; 1 on a GPU",
    ),
    Option(
        "served_model_name",
        None,
        str,
        flag="served-model-name",
        metavar="NAME",
        help="what clients call the model",
        shown="its id, or its folder's name",
    ),
    Option(
        "also_models",
        (),
        _listed,
        flag="also-model",
        metavar="[NAME=]PATH_OR_ID",
        help="another model, picked by name; can be given again",
        shown="none",
        repeats=True,
    ),
    Option(
        "keys_file",
        None,
        expanduser,
        flag="keys-file",
        metavar="FILE",
        help="API keys, as `cacheblend-rag keys` writes them",
        shown="keys.json in the data folder, if it is there",
    ),
    Option("access_log", "json", str, flag="access-log", metavar="FORM", help="a line a request: json, text or off"),
    Option(
        "database",
        None,
        str,
        flag="database",
        metavar="ADDRESS",
        help="collections that servers share: postgresql://host/name",
        shown="in the data folder",
    ),
)
"""Options of `ServerSettings`, those of its parts apart."""

# Those that the command line has, too.
_FLAGS: dict[str, dict[str, Any]] = {
    "upload_bytes": {"flag": "upload-limit", "metavar": "SIZE", "help": "of one uploaded file", "shown": "20 MB"},
    "disk_bytes": {"flag": "disk-limit", "metavar": "SIZE", "help": "of the documents of one tenant", "shown": "5 GB"},
    "requests_per_minute": {"flag": "requests-per-minute", "metavar": "N", "help": "of one tenant that has a key"},
    "tokens_per_minute": {
        "flag": "tokens-per-minute",
        "metavar": "N",
        "help": "of prompts and answers of one tenant",
        "shown": "no limit",
    },
    "queue": {"flag": "queue", "metavar": "N", "help": "requests of one tenant that may wait"},
    "address_connections": {
        "flag": "connections",
        "metavar": "N",
        "help": "open at once from one address, a proxy too",
    },
}


def _limit(name: str, default: Any) -> Option:
    parse = parse_bytes if name.endswith("_bytes") else float if isinstance(default, float) else int
    return Option(name, default, parse, prefix="LIMITS_", **_FLAGS.get(name, {}))


LIMIT_OPTIONS = tuple(_limit(one.name, one.default) for one in fields(Limits))
"""Options of `Limits`."""
