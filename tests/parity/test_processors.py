"""The same tests with the paths that other processors take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
# Variables of PyTorch, oneDNN and MKL; of the last two, one multiplies float32 (`PRODUCTS`).
PROCESSORS = {
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "SSE": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}
PRODUCTS = {"AVX2": "on", "SSE": "off"}
# Products, attention, and whole passes of some families against the model's own. Few: each path starts a process.
TESTS = (
    "tests/parity/test_onednn_linear.py::test_results_are_the_models_own[phi3]",
    "tests/parity/test_onednn_attention.py::test_blended_prompt_is_the_same",
    "tests/parity/test_attention.py::test_blocks_of_rows_give_what_the_whole_gives",
    "tests/parity/test_exactness.py::test_equals_full_prefill",
)


def _can(name: str) -> bool:
    """Whether this processor has the instructions."""
    able = torch.backends.cpu.get_cpu_capability()
    return able in ("AVX2", "AVX512") or (name == "SSE" and able == "DEFAULT")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AVX2", "SSE"])
def test_other_processors_paths_give_the_same(name: str) -> None:
    if not _can(name):
        pytest.skip("this processor has no such path")
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    quick = {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins take half of the start
    given = {**own, **PROCESSORS[name], **quick, "CACHEBLEND_RAG_ONEDNN": PRODUCTS[name]}
    options = ["-o", "addopts=", "-p", "pytest_asyncio.plugin", "-p", "no:cacheprovider", "-q", "-x"]
    command = [sys.executable, "-m", "pytest", *options, *TESTS]
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
