"""Keys, and what belongs to the tenant of each: a salt, known texts, a folder of collections."""

from __future__ import annotations

import hmac
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.prompt.matching import ChunkRegistry

__all__ = ["Keys", "Tenant"]

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
        self.salt = _kept_salt(folder / "salt") if salt is None else salt
        self._known: ChunkRegistry | None = None
        self._texts: Callable[[int], Iterable[str]] = lambda characters: ()
        self._lock = threading.Lock()

    def remembers(self, texts: Callable[[int], Iterable[str]]) -> None:
        """Where the latest texts of its documents come from, so many characters of them."""
        self._texts = texts

    @property
    def known(self) -> ChunkRegistry:
        """Texts of its documents, read when they are first wanted.

        Those of another tenant must not show in how a prompt is split.
        """
        with self._lock:
            if self._known is None:
                self._known = ChunkRegistry(_KNOWN, self._texts(_KNOWN))
            return self._known


class Keys:
    """Tells tenants by the key of a request.

    Parameters
    ----------
    keys : mapping of str to str
        Key by name; if there is none, everyone is the tenant ``"local"``.
    """

    LOCAL = "local"

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._keys = {name: key.encode() for name, key in keys.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """All tenants."""
        return tuple(self._keys) or (self.LOCAL,)

    def name_of(self, authorization: str | None) -> str:
        """The tenant of a request, by its ``Authorization`` header.

        Raises
        ------
        Problem
            401 if a key is needed and this is none.
        """
        if not self._keys:
            return self.LOCAL
        scheme, _, given = (authorization or "").partition(" ")
        found = ""
        for name, key in self._keys.items():  # all are compared, so that time tells nothing
            if hmac.compare_digest(key, given.strip().encode("utf-8", "replace")):
                found = name
        if scheme.lower() != "bearer" or not found:
            raise Problem(401, "unauthorized", "give an API key: Authorization: Bearer …")
        return found


def _kept_salt(path: Path) -> str:
    try:
        salt = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        salt = ""
    if not salt:
        salt = secrets.token_hex(16)
        fresh = path.with_suffix(".new")
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
            file.write(salt)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    return salt
