"""Everything that is claimed about GPUs, by one command, on a machine with one GPU and without a network.

``python -m docs.benchmarks.scripts.gpu --out FOLDER [--parts exact ttft:mistral-7b:6x512] [--seconds N]``

Each part is a process of its own with a time limit, as a fault of the GPU ends its process. A part rewrites
``FOLDER/PART.json`` after each case, so a run that is cut off still tells. A case that fails is written down with the
end of its traceback. If it took the process with it, the part goes on with the next case in a new one. The most
important parts come first, and tables of all end the output. ``--rehearse`` runs every part with tiny sizes, on
whatever device there is: a look at a machine before its time is spent.

PyTorch, Triton and transformers must be there. Of the packages that this one needs, most come with these. Those of the
files in which KV lies (diskcache, xxhash) and of LangChain's models (langchain-core with pydantic, langsmith, tenacity
and what they need) can be brought as wheels: ``python -m pip install --no-index --find-links WHEELS langchain-core
diskcache tenacity``. pytest runs the tests of kernels, where it is installed. The first lines printed name everything
that is missing. This file needs nothing but Python, so they are printed in any case.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path
from typing import IO, Any, cast

__all__ = ["PARTS", "chosen_parts", "main", "run_parts", "summary"]

ROOT = Path(__file__).parents[3]
SHAPES = ("mistral-7b", "qwen3-14b", "gemma3-12b")
PARTS: dict[str, float] = {
    "versions": 30,
    "exact": 120,
    **{f"ttft:{shape}:6x512": 45 for shape in SHAPES},
    **{f"ttft:{shape}:{size}": 25 for size in ("12x1024", "32x512") for shape in SHAPES},
    "decode:mistral-7b": 40,
    "decode:qwen3-14b": 30,
    "warm": 30,
    "memory": 20,
    "profile": 40,
}
"""Seconds that each part may take, in the order in which they run; more where more time is given than their sum."""

NEEDED = {
    "torch": "everything",
    "transformers": "everything",
    "triton": "kernels",
    "diskcache": "every engine",
    "xxhash": "every engine",
    "accelerate": "quantised weights",
    "rich": "every engine",
    "langchain_core": "the way of LangChain's users, FP8 and MXFP4",
    "pydantic": "the way of LangChain's users, FP8 and MXFP4",
    "tenacity": "the way of LangChain's users, FP8 and MXFP4",
    "pytest": "tests of kernels, FP8 and MXFP4",
    "xdist": "tests of kernels",
    "flash_attn": "transformers with its own flash attention",
    "kernels": "transformers' kernels of FP8 and MXFP4",
    "bitsandbytes": "weights of bitsandbytes",
    "torchao": "weights of torchao",
}
"""By module, what cannot run without it."""

_COMMAND = (sys.executable, "-m", "docs.benchmarks.scripts.gpu_parts")
_SCRATCH = "/dev/shm"  # files in memory
_SCRATCH_BYTES = 30 * 10**9
_STARTS = 4  # processes that a part may use up
_GRACE = 5.0  # seconds that a part gets to end by itself
_LEAST = 5.0  # seconds with which it is worth beginning a part
_LINES, _WIDTH = 60, 150  # of the summary


def chosen_parts(names: Sequence[str]) -> dict[str, float]:
    """The parts of these names and their limits; ``"ttft"`` stands for all that begin so, no name for all.

    Raises
    ------
    ValueError
        If a name stands for none.
    """
    unknown = [name for name in names if not any(_stands_for(name, part) for part in PARTS)]
    if unknown:
        raise ValueError(f"there is no part {unknown[0]!r}; parts are {', '.join(PARTS)}")
    return {part: limit for part, limit in PARTS.items() if not names or any(_stands_for(n, part) for n in names)}


def _stands_for(name: str, part: str) -> bool:
    return part == name or part.startswith(f"{name}:")


def run_parts(parts: Mapping[str, float], out: Path, seconds: float, *, rehearse: bool = False) -> dict[str, Any]:
    """Run parts one after another, each in processes of its own; what became of each, by name.

    All processes import their packages ahead of time and wait for their turn.

    Parameters
    ----------
    parts : mapping of str to float
        Limits in seconds, lengthened where there is more time than all of them.
    out : Path
        Folder of results.
    seconds : float
        For all parts.
    rehearse : bool
        Use tiny sizes.
    """
    out.mkdir(parents=True, exist_ok=True)
    ends, ended = time.monotonic() + seconds, dict[str, Any]()
    longer = max(1.0, seconds / sum(parts.values()))
    for name in parts:
        _file(out, name).unlink(missing_ok=True)
    waiting = {name: _Process(name, out, rehearse) for name in parts}
    try:
        for name, limit in parts.items():
            waiting[name].ready(ends - time.monotonic())
            began = time.monotonic()
            left = min(limit * longer, ends - began)
            state = _attend(waiting, name, left, out, rehearse) if left >= _LEAST else "no time was left"
            ended[name] = {"state": state, "seconds": round(time.monotonic() - began, 1)}
            (out / "run.json").write_text(json.dumps(ended, indent=1), encoding="utf-8")
            print(f"\n{name}: {state}, {ended[name]['seconds']} s", *_table(_read(out, name)), sep="\n", flush=True)
    finally:
        for process in waiting.values():
            process.end()
    return ended


def _attend(waiting: dict[str, _Process], name: str, seconds: float, out: Path, rehearse: bool) -> str:
    """Let a part run, in a new process for the cases behind one that ended its process; how it ended."""
    ends = time.monotonic() + seconds
    for number in range(_STARTS):
        process = waiting[name]
        code = process.run(ends - time.monotonic())
        log = process.end()
        stopped = "out of time" if code is None else f"ended its process (status {code})"
        died = _settle(out, name, stopped, log)
        if code == 0:
            return "done"
        if code is None or not died or ends - time.monotonic() < _LEAST or number == _STARTS - 1:
            break
        waiting[name] = _Process(name, out, rehearse)
        waiting[name].ready(ends - time.monotonic())
    last = log.strip().splitlines()[-1:]
    return stopped if died or code is None else ": ".join([stopped, *last])


def _settle(out: Path, name: str, stopped: str, log: str) -> bool:
    """Write down how the case ended that was running when its process did; whether there was one."""
    found = _read(out, name)
    running = [case for case in found.get("cases", {}).values() if case["state"] == "running"]
    for case in running:
        case |= {"state": stopped, "error": log[-1500:]}
    if running:
        _file(out, name).write_text(json.dumps(found, indent=1), encoding="utf-8")
    return bool(running)


class _Process:
    """A part's process, which imports its packages and then waits for a line that says how long it may run."""

    def __init__(self, name: str, out: Path, rehearse: bool) -> None:
        free = shutil.disk_usage(_SCRATCH).free if os.path.isdir(_SCRATCH) else 0
        self._scratch = tempfile.mkdtemp(dir=_SCRATCH if free > _SCRATCH_BYTES else None)
        self._log = open(_file(out, name).with_suffix(".log"), "w+", encoding="utf-8")  # noqa: SIM115
        quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TMPDIR": self._scratch}
        self._process = subprocess.Popen(
            [*_COMMAND, name, str(_file(out, name)), *(["--rehearse"] if rehearse else [])],
            cwd=ROOT,
            env=os.environ | quiet,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # with whatever it starts
        )

    def ready(self, seconds: float) -> None:
        """Wait until its packages are imported, or it ended, for so many seconds at most."""
        select.select([cast(IO[str], self._process.stdout)], [], [], max(0.0, seconds))

    def run(self, seconds: float) -> int | None:
        """Let it run; its exit status, or None if its time ran out."""
        stdin = cast(IO[str], self._process.stdin)
        with suppress(BrokenPipeError):  # it has ended already: its status and log say why
            stdin.write(f"{seconds}\n")
            stdin.flush()
        try:
            return self._process.wait(seconds + _GRACE)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> str:
        """End it and all that it started; what it printed."""
        if self._log.closed:
            return ""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                cast(IO[str], pipe).close()
        shutil.rmtree(self._scratch, ignore_errors=True)
        with self._log:
            self._log.seek(0)
            return self._log.read()


def _file(out: Path, name: str) -> Path:
    return out.resolve() / f"{name.replace(':', '-')}.json"


def _read(out: Path, name: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(_file(out, name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


# Tables -------------------------------------------------------------------------------------


def columns(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines whose cells stand under one another; a cell by itself is a line as it is."""
    wide = max(map(len, lines), default=0)
    several = [line for line in lines if len(line) > 1]
    widths = [max(len(line[at]) for line in several if at < len(line)) for at in range(wide if several else 0)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths or map(len, line), strict=False)).rstrip()
        if len(line) > 1
        else line[0]
        for line in lines
    ]


def _table(found: Mapping[str, Any]) -> list[str]:
    """A part's own table, and the cases that failed."""
    cases = found.get("cases", {})
    rows = [row for case in cases.values() for row in case.get("rows", ())]
    return columns([found["head"], *rows] if rows else []) + list(_failed(cases))


def _failed(cases: Mapping[str, Any]) -> Iterator[str]:
    for name, case in cases.items():
        if case["state"] != "done":
            last = case.get("error", "").strip().splitlines()[-1:]
            yield ": ".join([f"  {name}", case["state"], *last])[:_WIDTH]


def summary(out: Path, ended: Mapping[str, Any]) -> list[str]:
    """All parts in few lines."""
    found = {name: _read(out, name) for name in ended}
    lines = ["", "SUMMARY: " + ", ".join(f"{name} {at['seconds']} s" for name, at in ended.items())]
    lines += [f"{name}: {at['state']}" for name, at in ended.items() if at["state"] != "done"]
    for kind, most in {
        "versions": 9,
        "exact": 9,
        "ttft": 14,
        "decode": 8,
        "warm": 6,
        "memory": 6,
        "profile": 13,
    }.items():
        parts = {name: one for name, one in found.items() if name.split(":")[0] == kind and one}
        told = _times(parts) if kind == "ttft" else _short(kind, parts)
        lines += told[:most] if parts else []
    return [line[:_WIDTH] for line in lines[:_LINES]]


def _short(kind: str, parts: Mapping[str, Any]) -> list[str]:
    """The short rows of parts of a kind; failures come first, as there may be too many rows."""
    cases = [case for found in parts.values() for case in found["cases"].values()]
    failed = [line for found in parts.values() for line in _failed(found["cases"])]
    done = sum(case["state"] == "done" for case in cases)
    head: list[str] = next((found["head"] for found in parts.values()), [])
    rows = [row for case in cases for row in case.get("short", case.get("rows", ()))]
    if kind == "exact":  # those that are as they should be are not named
        wrong = [row for row in rows if "WRONG" in row]
        told = [f"exact: {len(rows) - len(wrong)} as they should be, {len(wrong)} not, {len(failed)} failed"]
        return told + failed[:4] + columns(wrong)
    told = [f"{kind}: {done} of {len(cases)} cases", *failed[:3]] if failed else []
    return told + (columns([head, *rows]) if rows else [])


def _times(parts: Mapping[str, Any]) -> list[str]:
    """Times to first token of all prompts: one line each, and how many times sooner the ways are."""
    told = {
        "default gpu": "query 15%, gpu",
        "pinned": "query 15%, pinned",
        "files": "query 15%, files",
        "hkvd 15%": "hkvd 15%, pinned",
        "30,3%": "gradual 30, 3%, pinned",
        "query 5%": "query 5%, pinned",
        "3%": "query 3%, pinned",
        "prefix": "prefix caching",
        "cold": "cold",
        "generate": "generate",
        "invoke": "ChatCacheBlend.invoke",
    }
    lines, failed = [["ttft, times faster", "full", *told]], list[str]()
    for name, found in parts.items():
        ways = {way: at for case in found["cases"].values() for way, at in case.get("ways", {}).items()}
        full = ways.get("full recompute", {}).get("seconds")
        cells = [f"{ways[way]['faster']:.2f}" if "faster" in ways.get(way, {}) else "-" for way in told.values()]
        lines.append([name.removeprefix("ttft:"), f"{1e3 * full:.1f} ms" if full else "-", *cells])
        failed += _failed(found["cases"])
    return columns(lines) + failed


def _versions() -> list[str]:
    """Python's and packages' versions, and the packages that are missing."""
    there = [module for module in NEEDED if util.find_spec(module)]
    names = metadata.packages_distributions()
    shown = [f"{module} {metadata.version(names.get(module, [module])[0])}" for module in there]
    missing = [f"missing: {module} (for {use})" for module, use in NEEDED.items() if module not in there]
    return [f"python {sys.version.split()[0]}, " + ", ".join(shown), *missing]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run parts, print their tables and a summary; the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m docs.benchmarks.scripts.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="of results")
    parser.add_argument("--parts", nargs="+", default=[], metavar="PART", help=f"of {', '.join(PARTS)}; default all")
    parser.add_argument("--seconds", type=float, default=570, help="for all parts (default 570)")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on whatever device there is")
    parsed = parser.parse_args(arguments)
    try:
        parts = chosen_parts(parsed.parts)
    except ValueError as error:
        parser.error(str(error))
    before = signal.signal(signal.SIGTERM, lambda *given: sys.exit(143))  # ends the parts, too
    try:
        print(*_versions(), sep="\n", flush=True)
        ended = run_parts(parts, parsed.out, parsed.seconds, rehearse=parsed.rehearse)
    finally:
        signal.signal(signal.SIGTERM, before)
    text = "\n".join(summary(parsed.out, ended))
    (parsed.out / "summary.txt").write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
