"""Keys, and what belongs to the tenant of each: a salt, known texts, a folder of collections."""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cacheblend_rag.app.server.keys_file import KeysFile, secret_kept
from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.app.server.settings import ServerSettings
from cacheblend_rag.prompt.matching import ChunkRegistry

# Characters of chunk texts that are remembered of one tenant.
_KNOWN = 16_000_000


class Tenant:
    """Whoever holds a key.

    Parameters
    ----------
    name : str
        As in the settings; only its letters, digits, _ and - are ever part of a path.
    folder : path
        Where all that is the tenant's alone is kept.
    salt : str, optional
        By default one of its own is drawn and kept in the folder.

    """

    def __init__(self, name: str, folder: Path, salt: str | None = None) -> None:
        self.name, self.folder = name, folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.salt = secret_kept(folder / "salt", 16) if salt is None else salt
        self._known: ChunkRegistry | None = None
        self._texts: Callable[[int], Iterable[str] | None] = lambda characters: ()
        self._lock = threading.Lock()

    def remembers(self, texts: Callable[[int], Iterable[str] | None]) -> None:
        """Where the latest texts of its documents come from, so many characters of them; None if not now."""
        self._texts = texts

    def forget(self) -> None:
        """Read the texts of its documents anew when they are wanted."""
        with self._lock:
            self._known = None

    @property
    def known(self) -> ChunkRegistry:
        """Texts of its documents, read when they are first wanted.

        Those of another tenant must not show in how a prompt is split.
        """
        with self._lock:
            if self._known is None:
                texts = self._texts(_KNOWN)
                if texts is None:
                    return ChunkRegistry(_KNOWN)
                self._known = ChunkRegistry(_KNOWN, texts)
            return self._known


@dataclass(frozen=True)
class Caller:
    """Who sent a request.

    Parameters
    ----------
    key : str
        Name of the key.
    tenant : str or None
        None for a key that only reads ``/metrics``.
    """

    key: str
    tenant: str | None


class Keys:
    """Tells who sent a request by its key.

    Parameters
    ----------
    settings : ServerSettings
        If it has neither keys nor a file of them, everyone is the tenant ``"local"``.
    """

    LOCAL = "local"

    def __init__(self, settings: ServerSettings) -> None:
        self._guarded = settings.guarded
        self._keys = {name: key.encode() for name, key in settings.api_keys.items()}
        self._file = None if settings.keys_file is None else KeysFile(Path(settings.keys_file))

    @property
    def tenants(self) -> tuple[str, ...]:
        """All tenants that have a key now."""
        if not self._guarded:
            return (self.LOCAL,)
        return tuple(dict.fromkeys([*self._keys, *(self._file.tenants if self._file else ())]))

    def caller_of(self, authorization: str | None) -> Caller:
        """Who sent a request, by its ``Authorization`` header.

        Raises
        ------
        Problem
            401 if a key is needed and this is none.
        """
        if not self._guarded:
            return Caller(self.LOCAL, self.LOCAL)
        scheme, _, given = (authorization or "").partition(" ")
        given, found = given.strip(), ""
        for name, key in self._keys.items():  # all are compared, so that time tells nothing
            if hmac.compare_digest(key, given.encode("utf-8", "replace")):
                found = name
        if scheme.lower() == "bearer" and found:
            return Caller(found, found)
        if scheme.lower() == "bearer" and self._file is not None and (entry := self._file.find(given)) is not None:
            return Caller(entry.name, entry.tenant)
        raise Problem(401, "unauthorized", "give an API key: Authorization: Bearer …")
