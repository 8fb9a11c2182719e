"""Small files beside records: the profile of a machine, results of trials."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file that its owner alone can read. Whoever reads it meanwhile sees the old one or the new one.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    draft = path.with_suffix(f".{os.getpid()}.draft")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.writelines(pieces)
    os.replace(draft, path)
