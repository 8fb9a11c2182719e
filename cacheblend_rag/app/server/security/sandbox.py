"""Limits a process sets itself before it touches what strangers made: memory, processor time, no file written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

# How much its priority is lowered: answers go before parsing and compiling.
_BEHIND = 10


def isolated(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Arguments of `subprocess.Popen` that run ``main`` of a module in a process without environment and folder.

    Parameters
    ----------
    module : str
    arguments : sequence of str
        Of ``main``.
    """
    program = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from importlib import import_module; "
        f"sys.exit(import_module({module!r}).main(sys.argv[2:]))"
    )
    # -I: nothing of the environment or the working folder is used. What is imported comes from the same places as here.
    flags, places = ("-I", "-X", "utf8", "-W", "ignore"), json.dumps([one for one in sys.path if one])
    return {
        "args": [sys.executable, *flags, "-c", program, places, *arguments],
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
        # Without this one Windows starts nothing.
        "env": {name: os.environ[name] for name in ("SYSTEMROOT",) if name in os.environ},
        "cwd": os.path.abspath(os.sep),
    }


def confine(memory: int, seconds: float) -> None:
    """Hold this process within limits, for good; on Windows only the time limit of its parent holds.

    Parameters
    ----------
    memory : int
        Bytes of its address space.
    seconds : float
        Of processor time.
    """
    try:
        import resource
    except ImportError:
        return
    os.nice(_BEHIND)
    processor = int(seconds) + 1
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (processor, processor))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # it has nothing to write
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # no other program, unless it is root's
