"""A server in a process of its own, for scripts that try it from outside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["metric_of", "served"]

ROOT = Path(__file__).parents[3]


def metric_of(text: str, name: str) -> int | None:
    """A number of the server's ``/metrics``; None if it is not there."""
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    return int(float(found[1])) if found else None


@contextmanager
def served(folder: Path, keys: Mapping[str, str], arguments: Sequence[str] = ()) -> Iterator[str]:
    """``cacheblend-rag serve`` on a free port; where it listens.

    Parameters
    ----------
    folder : Path
        Where its data and its log go.
    keys : mapping of str to str
        Key of each tenant.
    arguments : sequence of str
        More of the command.
    """
    named = ",".join(f"{name}={key}" for name, key in keys.items())
    environment = {**os.environ, "CACHEBLEND_RAG_API_KEYS": named, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "cacheblend_rag.app.cli", "serve", "--port", "0", "--access-log", "off"]
    command += ["--data-dir", str(folder / "served"), *arguments]
    log = folder / "log"
    with log.open("w") as lines:
        process = subprocess.Popen(command, stderr=lines, env=environment)
    try:
        while not (found := re.search(r"Open (http://\S+)", log.read_text())):
            if process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.2)
        yield found[1].rstrip("/")
    finally:
        process.terminate()
        process.wait(60)
