"""What is lost of a file is said by a command, which silences what it lists itself."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cacheblend_rag.app.cli.arguments import SILENT, only_from
from cacheblend_rag.retrieval.documents import read_folder


def test_command_names_a_file_with_damaged_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "bad.txt").write_bytes("The café of Norling opened in 1911 by Måns. ".encode() + b"Bad \xff byte here.")
    with only_from(logging.CRITICAL, *SILENT):
        read_folder(tmp_path)
    assert "bad.txt is UTF-8 but for damage in 1 places" in caplog.text
