"""Programs in a process of their own that need not import torch and transformers first.

Importing them takes several seconds of a processor, and tests start many programs. So one process imports them, once
for each process of pytest. Every program is a fork of it. A test of an import itself starts an interpreter instead.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType

__all__ = ["run_program", "start_program"]

_IMPORTED = [
    *["cacheblend_rag.app.folder_rag", "cacheblend_rag.app.server.app", "cacheblend_rag.langchain"],
    *["cacheblend_rag.llama_index", "faiss", "langchain.agents", "langchain_classic.chains", "langchain_openai"],
    *["llama_index.core", "openai", "sentence_transformers", "transformers.models.llama.modeling_llama"],
]


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def run_program(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None, *, whole_end: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run ``python *arguments`` and wait for its end.

    Parameters
    ----------
    arguments : sequence of str
        ``-c`` and code, ``-m`` and a module, or the path of a script; then what stands in ``sys.argv``. Warnings are
        ignored.
    folder : Path
        Where it runs.
    environment : mapping, optional
        Its environment; that of this process if left out.
    whole_end : bool
        Let the interpreter end as one that is no fork does: threads that are still there may then abort it.
    """
    with tempfile.TemporaryDirectory() as kept:
        output, errors = Path(kept, "output"), Path(kept, "errors")
        process = start_program(arguments, folder, output, errors, environment, whole_end=whole_end)
        process.join()
        code = process.exitcode
        process.close()
        assert code is not None
        return subprocess.CompletedProcess(arguments, code, output.read_text("utf-8"), errors.read_text("utf-8"))


def start_program(
    arguments: Sequence[str],
    folder: Path,
    output: Path,
    errors: Path,
    environment: Mapping[str, str] | None = None,
    *,
    whole_end: bool = False,
) -> ForkServerProcess:
    """`run_program` without waiting; what it writes goes to two files."""
    given = dict(os.environ if environment is None else environment)
    process = _context().Process(target=_program, args=(list(arguments), folder, given, output, errors, whole_end))
    process.start()
    return process


def _program(
    arguments: list[str], folder: Path, environment: dict[str, str], output: Path, errors: Path, whole_end: bool
) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for stream, path in ((1, output), (2, errors)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), stream)
    warnings.simplefilter("ignore")
    kind, *given = arguments
    sys.path.insert(0, "" if kind in ("-c", "-m") else str(Path(kind).parent))
    if whole_end:
        code = 0
        try:
            _run(kind, given)
        except Exception:
            traceback.print_exc()
            code = 1
        gc.freeze()  # most of the end would be a search for garbage among all that is imported
        ctypes.pythonapi.Py_Exit(code)
    try:
        _run(kind, given)
    finally:
        atexit._run_exitfuncs()  # as at the end of an interpreter, but not of a fork


def _run(kind: str, given: list[str]) -> None:
    if kind == "-c":
        code, *sys.argv[1:] = given
        sys.argv[0] = "-c"
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        module, *sys.argv[1:] = given
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *given]
        runpy.run_path(kind, run_name="__main__")
