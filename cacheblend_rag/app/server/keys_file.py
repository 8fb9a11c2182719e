"""API keys in a file: only their hashes, and read again when the file changes."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock

from cacheblend_rag.errors import ConfigError

_log = logging.getLogger(__name__)
KEYS_FILE = "keys.json"
"""Name of the file in the data folder."""

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Allowed names of keys and tenants; tenants are names of folders."""
_VERSION = 1
LOOK_AGAIN = 1.0
"""Seconds between two looks at the file, and at the key of what is under way."""


@dataclass(frozen=True)
class KeyEntry:
    """An entry of the file: a key's digest and its tenant.

    The hash is a salted SHA-256. A slow one such as scrypt is for passwords, which can be guessed. A key is 256 random
    bits, which cannot, and a slow hash would let anybody keep the server busy with wrong keys.

    Parameters
    ----------
    name : str
        Of the key.
    tenant : str or None
        Whose requests come with it; None for a key that only reads ``/metrics``.
    id : str
        The part of the key that says which it is.
    salt, sha256 : str
        In hexadecimal digits.
    created : str
        Day and time, in UTC.
    """

    name: str
    tenant: str | None
    id: str
    salt: str
    sha256: str
    created: str

    def __post_init__(self) -> None:
        for field, value in asdict(self).items():
            if not isinstance(value, str) and not (field == "tenant" and value is None):
                raise TypeError(field)
        for field, name in (("name", self.name), ("tenant", self.tenant)):
            if name is not None and not NAME.fullmatch(name):
                raise ConfigError(field, name, "use 1 to 64 letters, digits, _ and -")
        bytes.fromhex(self.salt + self.sha256)  # ValueError if it is none

    def fits(self, key: str) -> bool:
        """Whether this is the key."""
        return hmac.compare_digest(self.sha256, _hashed(self.salt, key))


def new_key(name: str, tenant: str | None) -> tuple[KeyEntry, str]:
    """A new random key, and the entry to keep in the file."""
    id, salt = secrets.token_hex(6), secrets.token_hex(16)
    key = f"cbr_{id}_{secrets.token_urlsafe(32)}"
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return KeyEntry(name, tenant, id, salt, _hashed(salt, key), created), key


def _hashed(salt: str, key: str) -> str:
    return hashlib.sha256(salt.encode() + key.encode("utf-8", "replace")).hexdigest()


def read_keys(path: Path) -> tuple[KeyEntry, ...]:
    """The keys of a file.

    Raises
    ------
    ConfigError
        If the file cannot be read, can be read by others, or is not as it was written.
    """

    def unfit(remedy: str) -> ConfigError:
        return ConfigError("keys_file", str(path), remedy)

    try:
        with path.open(encoding="utf-8") as file:
            # A group may read it, as secrets of containers are mounted; Windows has other rights.
            if os.name != "nt" and os.fstat(file.fileno()).st_mode & 0o037:
                raise unfit(f"others can read or change it: chmod 600 {path}")
            content = json.load(file)
        if content["version"] != _VERSION:
            raise unfit(f"it is of version {content['version']}, and this program knows {_VERSION}")
        keys = tuple(KeyEntry(**one) for one in content["keys"])
    except OSError as error:
        why = error.strerror or str(error)
        raise unfit(f"{why}; make one with `cacheblend-rag keys add NAME`") from error
    except ConfigError as error:
        raise (
            error if error.field == "keys_file" else unfit(f"its {error.field} {error.value!r}: {error.remedy}")
        ) from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise unfit("it is damaged: take it from a backup, or make a new one") from error
    if len({one.name for one in keys}) < len(keys) or len({one.id for one in keys}) < len(keys):
        raise unfit("it has two keys of one name")
    return keys


def add_key(path: Path, entry: KeyEntry) -> None:
    """Rewrite the file with one more key. The change is atomic, and only one process at a time makes it.

    Raises
    ------
    ConfigError
        If there is a key of this name, or the file cannot be used.
    """
    _made(path.parent)
    lock = path.with_name(path.name + ".lock")
    with FileLock(lock, mode=0o600):
        _leave_to_owner(lock, path.parent)
        keys = read_keys(path) if path.exists() else ()
        if any(one.name == entry.name for one in keys):
            raise ConfigError("name", entry.name, "there is a key of this name: use another, or delete its entry")
        text = json.dumps({"version": _VERSION, "keys": [asdict(one) for one in (*keys, entry)]}, indent=1)
        write_private(path, text + "\n")


def secret_kept(path: Path, size: int) -> str:
    """The secret in a file, as hex. If the file is missing or empty, a secret of ``size`` random bytes is written.

    A file that holds anything else, or less, is damaged, and renamed.

    Raises
    ------
    ConfigError
        If it cannot be read, as a folder cannot.
    """
    with FileLock(path.with_name(path.name + ".lock"), mode=0o600):  # replicas share the file
        try:
            kept = path.read_text(encoding="ascii", errors="replace").strip() if path.exists() else ""
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError("data_dir", str(path), f"{why}; move it away, and another is made") from error
        if kept and not re.fullmatch(rf"(?:[0-9a-f]{{2}}){{{size},}}", kept):
            aside = path.replace(path.with_name(path.name + ".damaged"))
            _log.error("%s is damaged: it is now %s, and KV that was stored with it is not found", path, aside.name)
            kept = ""
        if not kept:
            kept = secrets.token_hex(size)
            write_private(path, kept)
    return kept


def write_private(path: Path, text: str) -> None:
    """Write a file in one step that only its owner can read; root leaves it to whom the folder belongs."""
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)  # what is there may be a link to a file of somebody else's
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _leave_to_owner(fresh, path.parent)
    fresh.replace(path)


def _made(folder: Path) -> None:
    """Make a folder and those above it, as far as they are missing."""
    if not folder.exists():
        _made(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        _leave_to_owner(folder, folder.parent)


def _leave_to_owner(path: Path, folder: Path) -> None:
    """Give what root has made to the owner of the folder, who is the server's user."""
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        owner = folder.stat()
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


class KeysFile:
    """The keys of a file as they are now; it is looked at once a second at most.

    Parameters
    ----------
    path : Path
    clock : callable
        Seconds, from any beginning.

    Raises
    ------
    ConfigError
        If it cannot be used. Later on the former keys hold while it cannot.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._seen, self._looked = self.state(), clock()
        self._keys = {one.id: one for one in read_keys(path)}
        self._unfit = ""  # why the file is not used now
        self._lock = threading.Lock()

    @property
    def tenants(self) -> list[str]:
        """All tenants that have a key now."""
        self._look()
        return list(dict.fromkeys(one.tenant for one in self._keys.values() if one.tenant is not None))

    def find(self, key: str) -> KeyEntry | None:
        """The entry of a key."""
        self._look()
        found = self._keys.get("".join(key.split("_", 2)[1:2]))
        return found if found is not None and found.fits(key) else None

    def _look(self) -> None:
        with self._lock:  # what one thread has read must not come after what another has read later
            now = self._clock()
            if now - self._looked < LOOK_AGAIN:
                return
            self._looked, state, unfit = now, self.state(), ""
            if state != self._seen:
                try:
                    self._keys = {one.id: one for one in read_keys(self._path)}
                except ConfigError as error:  # it may be readable at the next look, without a change
                    unfit = error.remedy
                else:
                    self._seen = state
                    _log.info("the file of keys was read again: %d keys", len(self._keys))
            if unfit and unfit != self._unfit:
                _log.error("the changed keys file cannot be used, so the previous keys stay valid: %s", unfit)
            self._unfit = unfit

    def state(self) -> tuple[int, ...]:
        """A value that differs once the file or its permissions were changed."""
        try:
            seen = self._path.stat()
        except OSError:
            return ()
        return seen.st_mtime_ns, seen.st_ctime_ns, seen.st_size, seen.st_ino
