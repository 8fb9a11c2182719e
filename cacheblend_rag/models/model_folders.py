"""Model folders in the user's cache that this package makes: each is made once, and is there whole or not at all.

A folder is filled under a temporary name beside its own, and renamed when it is complete. Its manifest, written last,
says what it was made from and how large its files are.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from cacheblend_rag.config import default_data_path
from cacheblend_rag.errors import ModelLoadError
from cacheblend_rag.models.memory import total_memory

_MANIFEST = "manifest.json"
_OTHERWISE = "or name the folder or hub id of another model (--model, --embedder)"


def models_path() -> Path:
    """Folder of fetched models, in the user's cache."""
    return default_data_path() / "models"


def made_once(folder: Path, about: Mapping[str, str], make: Callable[[Path], None]) -> Path:
    """Fill a folder, unless it is there whole; of several processes, one does and the others wait.

    Parameters
    ----------
    folder : Path
        The folder, which need not exist.
    about : mapping
        Its source. A folder that was made from something else is made anew.
    make : callable
        Writes the files into the empty folder it is given.

    Returns
    -------
    Path
        ``folder``.

    Raises
    ------
    ModelLoadError
        If the disk is full, or the folder cannot be written.
    """
    if is_whole(folder, about):  # no lock, nothing written: so it is at every start but the first
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if not is_whole(folder, about):
                with part_folder(folder) as part:
                    make(part)
                    files = {path.relative_to(part).as_posix(): path.stat().st_size for path in _files(part)}
                    manifest = json.dumps({"about": dict(about), "files": files}, indent=1)
                    (part / _MANIFEST).write_text(manifest, encoding="utf-8")
                    shutil.rmtree(folder, ignore_errors=True)
                    part.rename(folder)
    except OSError as error:
        raise _failed(folder, error) from error
    return folder


@contextmanager
def part_folder(folder: Path) -> Iterator[Path]:
    """An empty folder beside another, removed in the end unless it was renamed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", suffix=".part", dir=folder.parent))
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def fetched_folder(folder: Path) -> Path:
    """Where files are kept that were fetched for a folder, until it is complete."""
    return folder.parent / f".{folder.name}.fetched"


def is_whole(folder: Path, about: Mapping[str, str] | None = None) -> bool:
    """Whether a folder is complete, and made from what is said."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if about is not None and manifest["about"] != dict(about):
            return False
        return all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def delete_folder(folder: Path) -> bool:
    """Delete a folder, what unfinished work left of it, and what was fetched for it; whether anything was there.

    Raises
    ------
    ModelLoadError
        If it cannot be deleted.
    """
    try:
        with _locked(folder):
            there = [one for one in (folder, fetched_folder(folder)) if one.exists()]
            for one in there:
                shutil.rmtree(one)
            return bool(there)
    except OSError as error:
        raise ModelLoadError(f"{folder} cannot be deleted: {error}") from error


def check_room(what: str, disk: int, memory: int, instead: str) -> None:
    """Refuse before it is begun what cannot be made in `models_path`.

    Parameters
    ----------
    what : str
    disk, memory : int
        Bytes that it takes.
    instead : str
        Another way out, as a phrase.

    Raises
    ------
    ModelLoadError
        If disk or memory is too small.
    """
    free, there = shutil.disk_usage(models_path()).free, total_memory()
    if disk > free:
        raise ModelLoadError(
            f"{what} takes {disk:,} bytes of disk until it is ready, and that of {models_path()} has {free:,} left: "
            f"free some space, set XDG_CACHE_HOME to a folder on another disk, or {instead}"
        )
    if there is not None and memory > there:
        raise ModelLoadError(f"{what} takes some {memory:,} bytes of memory, and there are {there:,}: {instead}")


def folder_bytes(folder: Path) -> int:
    """Size of all files of a folder in bytes."""
    return sum(path.stat().st_size for path in _files(folder))


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Nobody else makes or deletes this folder meanwhile. Remains of a killed process are removed."""
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"Waiting for another process that makes {folder.name} ready.", file=sys.stderr)
        lock.acquire()
    try:
        for left in folder.parent.glob(f".{folder.name}-*.part"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        lock.release()


def _failed(folder: Path, error: OSError) -> ModelLoadError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelLoadError(
            f"the model {folder.name} could not be written, because the disk of {folder.parent} is full: free some "
            f"space, or set XDG_CACHE_HOME to a folder on another disk, {_OTHERWISE}"
        )
    return ModelLoadError(
        f"the model {folder.name} could not be written to {folder.parent}: {error}; set XDG_CACHE_HOME to a folder "
        f"that can be written, {_OTHERWISE}"
    )
