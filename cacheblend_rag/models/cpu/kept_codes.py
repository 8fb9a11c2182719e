"""The codes of 4 bits of a converted GGUF file's weights, found once and kept beside them.

Finding them takes seconds. The kernel's order of them depends on the processor, so each kind of processor has its own
file. It is named by what the weights are, for they may have changed since they were read. A file that is damaged, of
other weights or of another PyTorch is made anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from cacheblend_rag.models.cpu.int4_linear import Codes, begins_on_steps, find_codes, fits_weight
from cacheblend_rag.models.model_folders import CODES, is_whole

_log = logging.getLogger(__name__)
# Raise when the same weights would have other codes.
_VERSION = 1
_PART = "codes-"
# Names of what this file writes.
_OURS = re.compile(rf"[0-9a-f]{{16}}\.safetensors|{_PART}.*")


def codes_of_layers(model: Any, layers: Sequence[nn.Linear]) -> dict[nn.Linear, Codes]:
    """Codes of those layers whose weights lie on steps; none for a model that was not converted from a GGUF file.

    Parameters
    ----------
    model : transformers PreTrainedModel
    layers : sequence of Linear
        Those of its layers whose weights are in bfloat16, contiguous and on a CPU.
    """
    folder = Path(str(getattr(model.config, "_name_or_path", "")))
    if not layers or not is_whole(folder):
        return {}
    names = {layer: name for name, layer in model.named_modules()}
    weights = {names[layer]: layer.weight.detach() for layer in layers if begins_on_steps(layer.weight)}
    if not weights:
        return {}
    file = folder / CODES / f"{_key(weights)}.safetensors"
    found = _read(file, weights)
    if found is None:
        _log.info("finding codes of 4 bits in the weights of %s, once", folder)
        each = ((name, find_codes(weight)) for name, weight in weights.items())
        found = {name: codes for name, codes in each if codes is not None}
        _write(file, found)
    return {layer: found[names[layer]] for layer in layers if names[layer] in found}


def _key(weights: Mapping[str, torch.Tensor]) -> str:
    """Of weights as they are now, and of the kernel."""
    kernel = torch.__version__, torch.backends.cpu.get_cpu_capability()
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        sums = list(threads.map(_checksum, weights.values()))
    facts = [(name, tuple(weight.shape), one) for (name, weight), one in zip(weights.items(), sums, strict=True)]
    return hashlib.sha256(repr((_VERSION, kernel, facts)).encode()).hexdigest()[:16]


def _checksum(weight: torch.Tensor) -> int:
    return zlib.crc32(weight.view(torch.uint8).numpy().data)


def _read(file: Path, weights: Mapping[str, torch.Tensor]) -> dict[str, Codes] | None:
    """Codes of a file by layer; None if there is none, or it does not fit the weights."""
    try:
        tensors = load_file(file)
        names = {name.rpartition(".")[0] for name in tensors}
        found = {name: Codes(tensors[f"{name}.codes"], tensors[f"{name}.steps"]) for name in names}
        fit = all(fits_weight(codes, weights[name]) for name, codes in found.items())
    except (OSError, SafetensorError, KeyError, RuntimeError):
        return None
    return found if fit else None


def _write(file: Path, found: Mapping[str, Codes]) -> None:
    """Keep codes in place of those of other processors or PyTorches; without room for them nothing is kept."""
    tensors = {f"{name}.codes": one.packed for name, one in found.items()}
    tensors |= {f"{name}.steps": one.steps for name, one in found.items()}
    try:
        file.parent.mkdir(exist_ok=True)
        for old in file.parent.iterdir():
            if _OURS.fullmatch(old.name):
                old.unlink()
        with tempfile.NamedTemporaryFile(prefix=_PART, dir=file.parent, delete=False) as part:
            pass
        try:
            save_file(tensors, part.name)
            os.replace(part.name, file)
        except BaseException:
            os.unlink(part.name)
            raise
    except (OSError, SafetensorError) as error:
        _log.debug("codes of 4 bits are not kept in %s: %s", file.parent, error)
