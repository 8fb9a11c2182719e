"""OpenVINO GenAI, reading GGUF files.

It needs the package openvino-genai. By default it takes activations to 8 bits where the processor multiplies them
faster, and keeps KV in 8 bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["OpenVino", "write_readable"]

_UNREAD = ("Q5_0", "Q5_1", "Q5_K")
"""Kinds of weights that it cannot read."""


class OpenVino:
    """A model in OpenVINO.

    Parameters
    ----------
    path : Path
        A GGUF file.
    threads : int
    """

    def __init__(self, path: Path, threads: int) -> None:
        import openvino_genai

        self._library = openvino_genai
        self._model = openvino_genai.LLMPipeline(str(path), "CPU", INFERENCE_NUM_THREADS=threads)

    def answer(self, ids: Sequence[int], tokens: int) -> list[float]:
        """Answer by so many tokens; seconds from the start until each was there."""
        metrics = self._generate(ids, tokens).perf_metrics.raw_metrics
        first = metrics.m_times_to_first_token[0] / 1e6
        later = list(itertools.accumulate(each / 1e6 for each in metrics.m_durations))
        self._generate([1, 2], 1)  # or it goes on from the KV of these ids when they come again
        return [first, *(first + each for each in later)][:tokens]

    def _generate(self, ids: Sequence[int], tokens: int) -> Any:
        import openvino

        config = self._library.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        given = np.array([ids], dtype=np.int64)
        inputs = self._library.TokenizedInputs(openvino.Tensor(given), openvino.Tensor(np.ones_like(given)))
        return self._model.generate(inputs, config)


def write_readable(source: Path, target: Path) -> str:
    """Write a file with the kinds of weights that cannot be read taken to 8 bits; how the weights are called then."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize, quantize

    reader = GGUFReader(source)
    changed = sum(tensor.tensor_type.name in _UNREAD for tensor in reader.tensors)
    if not changed:
        target.symlink_to(source)
        return "of the file"
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        of_array = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=of_array)
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if kind.name in _UNREAD:
            data, kind = quantize(dequantize(data, kind), GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return f"{changed} of {len(reader.tensors)} in 8 bits, else of the file"
