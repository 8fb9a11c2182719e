"""GGUF files, the form in which most people have their local models, as transformers reads them.

transformers does not take all settings from a file, and takes seconds for those it does. So config, tokenizer and chat
template are completed once and kept in the user's cache. llama.cpp needs no more; for PyTorch, transformers dequantises
the weights at each load.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from cacheblend_rag.errors import CacheBlendError, ModelLoadError, UnsupportedModelError
from cacheblend_rag.models.families import FAMILIES
from cacheblend_rag.models.identity import known_fingerprint, remember_fingerprint
from cacheblend_rag.models.model_folders import made_once, models_path, sha256_of
from cacheblend_rag.models.ollama import local_path
from cacheblend_rag.models.shape import head_width

# Raise when other settings would be read from the same file.
_READER = 3
ARCHITECTURES = {
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "llama": "llama",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}
"""Architectures that both transformers' reader and the blended pass know: the file's name, and the family."""
_ARCHITECTURE = "general.architecture"
_reading = threading.Lock()
_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Splits every digit from the rest before merging; transformers knows these names not.
_DIGITS_APART = ("smollm", "starcoder", "refact")
# Tokens that end a turn in a chat, where a file names the end of a text only.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")
# Of Llama 3.1 and all that follow it.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def is_gguf(model: str | os.PathLike[str]) -> bool:
    """Whether a model's name is a file: an existing file, or a path that ends in ``.gguf``."""
    path = local_path(model)
    return os.path.isfile(path) or (path.suffix.lower() == ".gguf" and not path.is_dir())


def settings_folder(file: str | os.PathLike[str]) -> Path:
    """The folder with config, tokenizer and chat template of a GGUF file; read from the file on first use.

    Raises
    ------
    ModelLoadError
        If the file is missing or damaged.
    UnsupportedModelError
        If its architecture is not supported.
    """
    path = local_path(file)
    check_start(path)  # a large file that is none is not hashed
    sha256, blob = content_sha256(path), path.resolve().name.removeprefix("sha256-")
    if blob != sha256 and len(blob) == 64 and blob != path.resolve().name:
        raise ModelLoadError(f"{str(path)!r} is damaged: Ollama named it by other content; fetch it again")
    folder = models_path() / "gguf" / f"{path.stem}-{sha256[:12]}-settings"
    return made_once(folder, {"weights": sha256, "reader": str(_READER)}, lambda part: _write_settings(path, part))


def gguf_config(file: str | os.PathLike[str]) -> Any:
    """The config of the model in a GGUF file; its weights are not read.

    Raises
    ------
    ModelLoadError
        If the file is damaged, or no GGUF file.
    UnsupportedModelError
        If its architecture is not supported.
    """
    path = local_path(file)
    reader, fields = _header(path)
    with tempfile.TemporaryDirectory() as folder, _damage_told(path), _read_by(reader), _without_advice():
        return _config(reader, fields, _names(path, Path(folder)))


def read_weights(file: Path, config: Any, dtype: torch.dtype, **arguments: Any) -> Any:
    """The model of a GGUF file in PyTorch, its weights dequantised.

    Parameters
    ----------
    file : Path
    config : transformers PreTrainedConfig
        From `settings_folder`.
    dtype : torch.dtype
    **arguments
        More for ``from_pretrained``.

    Raises
    ------
    ModelLoadError
        If the file does not hold all weights.
    """
    reader, fields = _header(file)
    with tempfile.TemporaryDirectory() as folder, _read_by(reader), _without_advice():
        names = _names(file, Path(folder))
        model, info = AutoModelForCausalLM.from_pretrained(
            **names, config=config, dtype=dtype, output_loading_info=True, **arguments
        )
    missing = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if missing:
        raise ModelLoadError(
            f"{file} does not hold all weights of a model of the architecture {fields[_ARCHITECTURE]!r}; "
            f"{len(missing)} are missing, such as {missing[0]}"
        )
    # The weights are ordinary ones now.
    del model.config.quantization_config
    del model.quantization_method
    model.hf_quantizer, model.is_quantized = None, False
    return model


def _write_settings(file: Path, folder: Path) -> None:
    """Write what a GGUF file says of a model, weights apart, into an empty folder: config, tokenizer, chat template.

    Raises
    ------
    ModelLoadError
        If the file is damaged.
    UnsupportedModelError
        If its architecture is not supported.
    """
    reader, fields = _header(file)
    names = _names(file, folder)
    with _damage_told(file), _read_by(reader), _without_advice():
        config, tokenizer = _config(reader, fields, names), _tokenizer(reader, fields, names)
        generation = _generation(config, fields, tokenizer)
    # Not marked as that of quantised weights.
    config = type(config)(**{key: value for key, value in config.to_dict().items() if key != "quantization_config"})
    config.dtype = _element_type(reader)
    config.has_q4_0 = any(tensor.tensor_type.name == "Q4_0" for tensor in reader.tensors)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    generation.save_pretrained(folder)


def _names(file: Path, folder: Path) -> dict[str, Any]:
    """Arguments by which transformers reads a file.

    Not in the file's own folder: a config or tokenizer that lies there would be mixed in.
    """
    return {"pretrained_model_name_or_path": str(folder), "gguf_file": str(file.resolve()), "local_files_only": True}


def _config(reader: Any, fields: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
    """The config of a file, completed; within `_read_by`."""
    config = AutoConfig.from_pretrained(**names)
    _settle(config, str(fields[_ARCHITECTURE]), fields, reader)
    return config


def _tokenizer(reader: Any, fields: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
    """The tokenizer of a file, as llama.cpp splits digits; within `_read_by`."""
    tokens = list(filter(None, reader.fields["tokenizer.ggml.tokens"].contents()))
    if len(set(tokens)) < len(tokens):  # llama.cpp would end the process
        raise ValueError("two of its tokens are the same")
    tokenizer = AutoTokenizer.from_pretrained(**names)
    if fields.get("tokenizer.ggml.pre") in _DIGITS_APART:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer


@contextmanager
def _read_by(reader: Any) -> Iterator[None]:
    """Within this, transformers takes this reader of a file. It would read all settings three times more."""
    import gguf

    with _reading:
        own = gguf.GGUFReader
        gguf.GGUFReader = lambda path: reader
        try:
            yield
        finally:
            gguf.GGUFReader = own


@contextmanager
def _damage_told(path: Path) -> Iterator[None]:
    """Within this, an error says that the file is damaged: it can be so anywhere, and any kind can be raised."""
    try:
        yield
    except CacheBlendError:
        raise
    except Exception as why:
        raise ModelLoadError(f"the GGUF file {str(path)!r} is damaged or incomplete: {why}; fetch it again") from why


@contextmanager
def _without_advice() -> Iterator[None]:
    """Without what transformers advises those who keep weights packed, which is not done here."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def content_sha256(path: Path) -> str:
    """SHA-256 of a file; it is read through once, as long as neither its size nor its times change."""
    state = path.resolve().stat()
    seen = [str(path.resolve()), state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]
    identity = hashlib.sha256(json.dumps(["content", *seen]).encode()).hexdigest()
    sha256 = known_fingerprint(identity)
    if sha256 is None:
        sha256 = sha256_of(path)
        remember_fingerprint(identity, sha256, str(path))
    return sha256


def check_start(path: Path) -> None:
    """Refuse what is no GGUF file by its first bytes.

    Raises
    ------
    ModelLoadError
    """
    if not os.path.isfile(path):
        raise ModelLoadError(f"the GGUF file {str(path)!r} does not exist")
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise ModelLoadError(f"the GGUF file {str(path)!r} cannot be read: {error}") from error
    if not start:
        raise ModelLoadError(f"the GGUF file {str(path)!r} is empty; fetch it again")
    if start != b"GGUF":
        raise ModelLoadError(
            f"{str(path)!r} is not a GGUF file; name a GGUF file, a folder written by save_pretrained, or a hub id"
        )


def _header(path: Path) -> tuple[Any, dict[str, Any]]:
    """The reader of a file of a supported architecture, and its settings except long lists."""
    check_start(path)
    from gguf import GGUFReader

    class ArrayReader(GGUFReader):  # type: ignore[misc]
        """Cuts the file up as a plain array, which is several times faster than as a mapped one."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

    with _damage_told(path):
        reader = ArrayReader(path)
        fields = {field.name: field.contents() for field in reader.fields.values() if len(field.data) <= 1}
    _check_supported(path, str(fields.get(_ARCHITECTURE)), fields)
    return reader, fields


def _check_supported(path: Path, architecture: str, fields: Mapping[str, Any]) -> None:
    if (parts := int(fields.get("split.count", 1))) > 1:
        raise ModelLoadError(
            f"{str(path)!r} is one of {parts} parts of a model; join them with llama.cpp's "
            '"llama-gguf-split --merge FIRST_PART JOINED.gguf", and name the joined file'
        )
    if fields.get("general.type") == "adapter":
        raise ModelLoadError(f"{str(path)!r} is a LoRA adapter: name its model, and this in model_kwargs={{'lora': …}}")
    experts = fields.get(f"{architecture}.expert_count", 0) and architecture == "llama"
    if architecture not in ARCHITECTURES or ARCHITECTURES[architecture] not in FAMILIES or experts:
        raise UnsupportedModelError(
            f"the GGUF file {str(path)!r} is of the architecture {architecture!r}{' with experts' if experts else ''}, "
            f"which is not supported; supported are {', '.join(ARCHITECTURES)}; of another, name the folder or hub id "
            "of the original weights (safetensors)"
        )


def _element_type(reader: Any) -> torch.dtype:
    """Element type to compute in: the file's, or for quantised weights bfloat16, which cannot overflow."""
    kinds = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
    whole = [_TYPES[kind] for kind in ("F32", "BF16", "F16") if kind in kinds]
    return whole[0] if kinds <= set(_TYPES) and whole else torch.bfloat16


def _settle(config: Any, architecture: str, fields: Mapping[str, Any], reader: Any) -> None:
    """Complete a config with what transformers does not take from the file."""

    def setting(name: str) -> Any:
        return fields.get(f"{architecture}.{name}")

    blocks = {tensor.name.split(".")[1] for tensor in reader.tensors if tensor.name.startswith("blk.")}
    if len(blocks) != config.num_hidden_layers:
        raise ValueError(f"it says that it has {config.num_hidden_layers} layers, and has {len(blocks)}")
    entries = {"attention.key_length": "head_dim", "attention.sliding_window": "sliding_window"}
    for name, entry in {**entries, "expert_feed_forward_length": "moe_intermediate_size"}.items():
        if setting(name) is not None and hasattr(config, entry):
            setattr(config, entry, setting(name))
    for name in ("bos", "eos"):
        setattr(config, f"{name}_token_id", fields.get(f"tokenizer.ggml.{name}_token_id"))
    config.pad_token_id = fields.get("tokenizer.ggml.padding_token_id")
    # The two largest models scale attention by the width of all heads; files do not say so.
    if (architecture, config.num_hidden_layers) in (("gemma2", 46), ("gemma3", 62)):
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if setting("rope.freq_base") is not None:
        rope["rope_theta"] = setting("rope.freq_base")
    if architecture in ("phi3", "stablelm") and setting("rope.dimension_count") is not None:
        rope["partial_rotary_factor"] = setting("rope.dimension_count") / head_width(config)
    factors = {tensor.name: tensor.data.tolist() for tensor in reader.tensors if tensor.name.startswith("rope_f")}
    kind, original = setting("rope.scaling.type"), setting("rope.scaling.original_context_length")
    if "rope_freqs.weight" in factors:
        rope |= _llama3(rope, factors["rope_freqs.weight"])
    elif "rope_factors_long.weight" in factors:
        both = {f"{length}_factor": factors[f"rope_factors_{length}.weight"] for length in ("long", "short")}
        rope |= {"rope_type": "longrope", **both}
        rope["original_max_position_embeddings"] = config.original_max_position_embeddings = original
    elif kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": setting("rope.scaling.factor")}
        if kind == "yarn":
            rope["original_max_position_embeddings"] = original
    elif kind not in (None, "none"):
        raise ModelLoadError(f"the file's RoPE scaling {kind!r} is not supported; supported are linear, yarn and none")


def _llama3(rope: Mapping[str, Any], factors: list[float]) -> dict[str, Any]:
    """RoPE settings of Llama 3, which files hold as one divisor a frequency only."""
    found = {"rope_type": "llama3", "factor": max(factors), **_LLAMA3}
    frequencies = rope["rope_theta"] ** -(torch.arange(len(factors)) / len(factors))  # [head_dim / 2]
    lengths = 2 * torch.pi / frequencies
    low, high, context = _LLAMA3.values()
    share = ((context / lengths - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - share) / found["factor"] + share)
    if not torch.allclose(torch.tensor(factors), expected, rtol=1e-3):
        raise ModelLoadError("the file scales RoPE frequencies in a way that is not Llama 3's, which is not supported")
    return found


def _generation(config: Any, fields: Mapping[str, Any], tokenizer: Any) -> GenerationConfig:
    """Ids that begin, end and pad an answer."""
    given = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    turns = [tokenizer.convert_tokens_to_ids(one) for one in _END_OF_TURN if one in (tokenizer.chat_template or "")]
    ends = sorted({int(end) for end in (*given, *turns) if end is not None})
    pad = fields.get("tokenizer.ggml.padding_token_id", ends[0] if ends else None)
    return GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
        pad_token_id=None if pad is None else int(pad),
    )
