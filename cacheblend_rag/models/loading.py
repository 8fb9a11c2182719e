"""Loading a model and its tokenizer, in an element type the machine can compute; and what its config foretells."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as _CONTAINERS
from transformers.utils import cached_file, find_adapter_config_file

from cacheblend_rag.config import DTYPES, check_choice, removed_remedy
from cacheblend_rag.errors import ConfigError, MissingExtraError, ModelLoadError, UnsupportedModelError
from cacheblend_rag.models.families import check_runs, why_plain
from cacheblend_rag.models.gguf import gguf_config, is_gguf, read_weights, settings_folder
from cacheblend_rag.models.hub import hub_asked_once
from cacheblend_rag.models.identity import files_identity, fingerprint, known_fingerprint, remember_fingerprint
from cacheblend_rag.models.memory import total_memory
from cacheblend_rag.models.model_names import name_remedy, why_no_model
from cacheblend_rag.models.ollama import local_path
from cacheblend_rag.models.projections import latent_width
from cacheblend_rag.models.shape import context_window, head_width
from cacheblend_rag.models.starters import starter_gguf, starter_named

_IN_HARDWARE = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
# Largest share of the machine's memory that float32 weights take without being asked for; KV and passes need the rest.
_SHARE = 0.75
# Options of every method.
_INSTEAD = (
    "or load weights that are not quantised, with quantization_config=BitsAndBytesConfig(load_in_4bit=True) or "
    "TorchAoConfig(Int8WeightOnlyConfig()): both run on CPUs and GPUs"
)
# Arguments of from_pretrained that say where files are.
_WHERE = ("cache_dir", "code_revision", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")


# Arguments that transformers took once, and what does the same now.
_QUANTISE = "use quantization_config=BitsAndBytesConfig({}=True)"
_UNKNOWN = re.compile(r"unexpected keyword argument '(\w+)'")
# Those of which tiny models did not go on from a cache in slices; see `PlainAdapter.goes_on`. Loading tries it anew.
_IN_FULL = ("bamba", "falcon_mamba", "jamba", "mamba", "minimax", "recurrent_gemma", "rwkv", "xlstm", "zamba")


def loading_arguments(
    device: Any, dtype: Any, model_kwargs: Mapping[str, Any] | None
) -> tuple[str, str, dict[str, Any]]:
    """Device, element type and the other arguments that a model is loaded with, as `load_model` takes them.

    Parameters
    ----------
    device : str, int, torch.device or None
        A number is that of a GPU, and -1 the CPU, as in transformers' pipelines. None is ``"auto"``.
    dtype : str, torch.dtype or None
        None is ``"auto"``.
    model_kwargs : mapping or None
        ``device``, ``dtype`` and ``torch_dtype`` may be among them.

    Raises
    ------
    ConfigError
        If two of them contradict one another, or weights are to be quantised by an argument that is no longer there.
    """
    rest = dict(model_kwargs or {})
    for name in ("load_in_4bit", "load_in_8bit"):
        if rest.pop(name, None):
            raise ConfigError(name, True, _QUANTISE.format(name))
    device, dtype = _device_name(device), _type_name(dtype)
    for name in ("dtype", "torch_dtype"):
        if (own := _type_name(rest.pop(name, None))) != "auto":
            if dtype not in ("auto", own):
                raise ConfigError(name, own, f"leave it out; dtype={dtype!r} is given, too")
            dtype = own
    if (own := _device_name(rest.pop("device", None))) != "auto":
        if device not in ("auto", own):
            raise ConfigError("device", own, f"leave it out of model_kwargs; device={device!r} is given, too")
        device = own
    if device != "auto" and rest.get("device_map") is not None:
        raise ConfigError("device", device, "leave it out, or leave out device_map; each says where weights go")
    return device, dtype, rest


def _device_name(device: Any) -> str:
    if device is None:
        return "auto"
    if isinstance(device, int) and not isinstance(device, bool):
        return "cpu" if device < 0 else f"cuda:{device}"
    return str(device)


def _type_name(dtype: Any) -> str:
    return "auto" if dtype is None else str(dtype).removeprefix("torch.")


def type_to_load(config: Any, device: torch.device) -> str:
    """The checkpoint's type, but float32 on a CPU that has no products of that type.

    There, PyTorch multiplies many times more slowly than in float32 (docs/explanation/performance.md). The type follows
    from the processor and the checkpoint, not from what else runs: KV that was stored on one day is found on the next.

    Parameters
    ----------
    config : transformers PretrainedConfig
    device : torch.device

    Returns
    -------
    {"auto", "float32"}
        As transformers' ``from_pretrained`` takes it; ``"auto"`` is the checkpoint's.

    Raises
    ------
    ConfigError
        If float32 weights would take more than three quarters of the machine's memory.
    """
    stored = _stored_type(config)
    if device.type != "cpu" or stored not in _IN_HARDWARE or in_hardware(stored) is not False:
        return "auto"
    if getattr(config, "quantization_config", None) is not None:
        return "auto"
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    needed, total = 4 * sum(parameter.numel() for parameter in model.parameters()), total_memory()
    if total is not None and needed > _SHARE * total:
        name = str(stored).removeprefix("torch.")
        raise ConfigError(
            "dtype",
            "auto",
            f"use dtype={name!r}, several times slower here: this processor has no {name} products, and weights in "
            f"float32 take {needed:,} bytes of a memory of {total:,}",
        )
    return "float32"


def _stored_type(config: Any) -> torch.dtype | None:
    """The checkpoint's element type; a container may say it for its text model, or for all of it."""
    return getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)


def in_hardware(dtype: torch.dtype) -> bool | None:
    """Whether the processor has products of a half-wide type; None where PyTorch does not say."""
    try:
        return bool(getattr(torch.ops.mkldnn, _IN_HARDWARE[dtype])())
    except (AttributeError, RuntimeError):
        return None


def auto_class(config: Any) -> Any:
    """Transformers' class that loads a model: a container is loaded whole, and needs no image processor for text."""
    return AutoModelForImageTextToText if config.model_type in _CONTAINERS else AutoModelForCausalLM


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer.

    Parameters
    ----------
    model, tokenizer
    name : str
        The id or path that it was loaded by.
    identity : str or None
        Of the files of its own weights, if these are nothing but what is in them; see `files_identity`.
    """

    model: Any
    tokenizer: Any
    name: str
    identity: str | None

    def fingerprint(self) -> str:
        """Identity of the model's own weights, adapters aside; they are read only if their files are not known."""
        known = known_fingerprint(self.identity)
        if known is None:
            known = fingerprint(self.model)
            if self.identity is not None:
                remember_fingerprint(self.identity, known, self.name)
        return known


def load_model(
    model: str | os.PathLike[str],
    *,
    device: str | int | torch.device | None = "auto",
    dtype: str | torch.dtype | None = "auto",
    **model_kwargs: Any,
) -> LoadedModel:
    """Load through transformers' auto classes.

    Parameters
    ----------
    model : str or path
        A folder, a GGUF file, an id that transformers can resolve, or the name of a starter model (``"smollm2"``,
        which is fetched on first use). A folder that has a starter's name is ``"./smollm2"``. A LoRA adapter's folder
        or id loads the model that it was trained on, and activates the adapter.
    device : str, int or torch.device
        ``"auto"`` (a GPU if there is one), or a torch device; see `loading_arguments`.
    dtype : str or torch.dtype
        ``"auto"`` (see `type_to_load`), ``"float32"``, ``"bfloat16"`` or ``"float16"``.
    **model_kwargs
        Passed on to ``from_pretrained``; with any, ``"auto"`` is the checkpoint's element type.

    Raises
    ------
    ModelLoadError
        If the model or the tokenizer cannot be loaded.
    UnsupportedModelError
        If the model does not go on from a prompt, as its config says; weights are not fetched then.
    ConfigError
        If the device or the element type is not known, or memory is too small for the type that ``"auto"`` means.
    """
    device, dtype, model_kwargs = loading_arguments(device, dtype, model_kwargs)
    check_choice("dtype", dtype, DTYPES)
    target = _device(device)
    with found_model(model, model_kwargs):
        if (base := _base_of(model)) is not None:
            under = load_model(base, device=device, dtype=dtype, **model_kwargs)
            return _with_adapter(under, _expanded(model))
        loaded, tokenizer, identity = _load(os.fspath(model), *_located(model), target, dtype, model_kwargs)
    return LoadedModel(loaded, tokenizer, os.fspath(model), identity)


@contextmanager
def found_model(model: str | os.PathLike[str], model_kwargs: Mapping[str, Any], weights: bool = True) -> Iterator[None]:
    """Within this, a model is loaded that there may be; a hub that does not answer is asked once.

    Raises
    ------
    ModelLoadError
        If the model certainly does not exist.
    """
    elsewhere = any(name in model_kwargs for name in ("subfolder", "gguf_file", "config", "variant"))
    if fault := why_no_model(model, weights=weights, elsewhere=elsewhere):
        raise ModelLoadError(f"model {os.fspath(model)!r} could not be loaded: {fault}")
    if starter_named(model, "language model") is not None:
        yield
        return
    with hub_asked_once(model, model_kwargs):
        yield


def _expanded(model: str | os.PathLike[str]) -> str:
    """A model's name with the user's home in place of ``~``."""
    return os.path.expanduser(os.fspath(model))


def _base_of(model: str | os.PathLike[str]) -> str | None:
    """The model that an adapter was trained on, by what its config calls it; None for what is no adapter.

    Raises
    ------
    MissingExtraError
        If it is an adapter and ``peft`` is not installed.
    ModelLoadError
        If the adapter does not say it.
    """
    name = _expanded(model)
    if (
        local_path(model).is_file() or starter_named(model, "language model") is not None
    ):  # neither asks a hub for anything
        return None
    try:
        found = find_adapter_config_file(name)
    except (OSError, ValueError):  # whatever that is, loading it says more
        found = None
    if found is None:
        return None
    if find_spec("peft") is None:
        raise MissingExtraError("peft", "lora")
    try:
        base = json.loads(Path(found).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelLoadError(f"{found} cannot be read: {error}; save the adapter again") from error
    if not base:
        raise ModelLoadError(f"{found} has no base_model_name_or_path: write there what the adapter was trained on")
    return str(base)


def _with_adapter(under: LoadedModel, adapter: str) -> LoadedModel:
    """A model with an adapter on it, and the adapter's tokenizer if it has one of its own."""
    try:
        under.model.load_adapter(adapter)
        own = os.path.isfile(os.path.join(adapter, "tokenizer_config.json"))
        tokenizer = AutoTokenizer.from_pretrained(adapter) if own else under.tokenizer
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        raise ModelLoadError(f"adapter {adapter!r} could not be loaded onto {under.name!r}: {error}") from error
    return LoadedModel(under.model.eval(), tokenizer, adapter, under.identity)


def _where(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: model_kwargs[key] for key in _WHERE if key in model_kwargs}


def one_line(error: Exception) -> str:
    """The words of transformers, which writes several lines."""
    return " ".join(str(error).split()).rstrip(".")


def _template_of_processor(name: str) -> str | None:
    """The chat template of a container that older checkpoints keep for their processor alone."""
    found = cached_file(
        name,
        "chat_template.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else str(json.loads(Path(found).read_text(encoding="utf-8"))["chat_template"])


def _load(
    said: str, name: str, file: Path | None, target: torch.device, dtype: str, model_kwargs: dict[str, Any]
) -> tuple[Any, Any, str | None]:
    """Model, tokenizer and identity of what lies in a folder or is known by an id; weights may be a GGUF file's."""
    try:
        config = model_kwargs.get("config", name)
        if isinstance(config, str | os.PathLike):
            config = AutoConfig.from_pretrained(config, **_where(model_kwargs))
        check_runs(config)  # before weights are fetched
        method = _quantised_by(config, model_kwargs)
        if dtype == "auto" and not model_kwargs:
            dtype = type_to_load(config, target)
        # The form of quantised weights also depends on the devices and packages that are there.
        before = None if model_kwargs or method else files_identity(name, dtype)
        with _refused(method):
            if file is None:
                loaded = _weights(config, name, target, dtype, method, model_kwargs)
            else:
                own = config.dtype if dtype == "auto" else getattr(torch, dtype)
                loaded = read_weights(file, config, own, **model_kwargs).to(target)
                loaded.generation_config = GenerationConfig.from_pretrained(name)
        where = _where(model_kwargs)
        where.pop("subfolder", None)  # of the weights; tokenizers lie beside it
        tokenizer = AutoTokenizer.from_pretrained(name, **where)
        if config.model_type in _CONTAINERS and not tokenizer.chat_template:
            tokenizer.chat_template = _template_of_processor(name)
    except (ConfigError, UnsupportedModelError):
        raise
    except TypeError as error:
        if (unknown := _UNKNOWN.search(str(error))) is None or unknown[1] not in model_kwargs:
            raise
        own = f"leave it out; transformers' from_pretrained does not take it for this model ({error})"
        remedy = removed_remedy(unknown[1]) or own
        raise ConfigError(unknown[1], model_kwargs[unknown[1]], remedy) from error
    except SafetensorError as error:
        again = "download or save them again; a file that git has fetched needs git-lfs"
        raise ModelLoadError(
            f"model {said!r} could not be loaded: its weights are damaged or cut off ({error}); {again}"
        ) from error
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelLoadError(
            f"model {said!r} could not be loaded: {one_line(error)}; {name_remedy(said=said)}"
        ) from error
    # Files that were downloaded just now, or changed meanwhile, are known from the next load on.
    unchanged = before is not None and before == files_identity(name, dtype)
    return loaded.eval(), tokenizer, before if unchanged else None


def _quantised_by(config: Any, model_kwargs: dict[str, Any]) -> str | None:
    """The method by which weights are quantised, or will be; None if they are not.

    Raises
    ------
    ConfigError
        If transformers does not know it, and so would fill the layers at random.
    """
    said = getattr(config, "quantization_config", None) or model_kwargs.get("quantization_config")
    if said is None:
        return None
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING  # it imports what it may quantise with

    if not isinstance(said, Mapping) and not hasattr(said, "to_dict"):
        raise ConfigError("quantization_config", said, f"this names no method; {_INSTEAD}")
    said = said if isinstance(said, Mapping) else said.to_dict()
    method = getattr(said.get("quant_method"), "value", said.get("quant_method"))
    if said.get("load_in_4bit") or said.get("load_in_8bit"):
        method = "bitsandbytes"
    if method is None:
        raise ConfigError("quantization_config", dict(said), f"name its method as quant_method; {_INSTEAD}")
    if method not in (*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes"):
        raise ConfigError("quantization_config", method, f"this transformers does not know the method; {_INSTEAD}")
    return str(method)


@contextmanager
def _refused(method: str | None) -> Iterator[None]:
    """Within this, what goes wrong with quantised weights is told by their method."""
    try:
        yield
    except (ImportError, RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        if method is None:
            raise
        said = str(error).strip().rstrip(".")
        raise ConfigError(
            "quantization_config", method, f"its weights cannot be loaded here ({said}); {_INSTEAD}"
        ) from error


def _weights(
    config: Any, name: str, target: torch.device, dtype: str, method: str | None, model_kwargs: dict[str, Any]
) -> Any:
    """The model on its device."""
    kind = auto_class(config)
    if "device_map" in model_kwargs:
        return kind.from_pretrained(name, dtype=dtype, **model_kwargs)
    if method is None:
        return kind.from_pretrained(name, dtype=dtype, **model_kwargs).to(target)
    # Weights are quantised where they are loaded, and some cannot be moved.
    loaded = kind.from_pretrained(name, dtype=dtype, device_map={"": target}, **model_kwargs)
    if getattr(loaded.config, "quantization_config", None) is not None:
        return loaded
    # transformers has made ordinary weights of them, not all of the type that was asked for.
    if dtype == "auto" and not model_kwargs:
        dtype = type_to_load(loaded.config, target)
    return loaded.to(_stored_type(loaded.config) if dtype == "auto" else getattr(torch, dtype))


def _located(model: str | os.PathLike[str]) -> tuple[str, Path | None]:
    """Folder or id that transformers loads a model from, and the GGUF file of its weights if they are in one."""
    starter = starter_named(model, "language model")
    if starter is None and not is_gguf(model):
        return _expanded(model), None
    file = local_path(model) if starter is None else starter_gguf(starter)
    return str(settings_folder(file)), file


@dataclass(frozen=True)
class KVGeometry:
    """Shape of a model's KV, as its config says.

    Parameters
    ----------
    layers, kv_heads, head_dim : int
    dtype : str
        Element type that it is loaded in.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str


def load_geometry(model: str | os.PathLike[str], dtype: str = "auto") -> tuple[KVGeometry, Any]:
    """Shape of a model's KV, and its tokenizer; weights are not read.

    Raises
    ------
    ModelLoadError
        If the config or the tokenizer cannot be loaded.
    ConfigError
        If the element type is not known.
    """
    check_choice("dtype", dtype, DTYPES)
    with found_model(model, {}, weights=False):
        if (base := _base_of(model)) is not None:
            return load_geometry(base, dtype)
        return _geometry(os.fspath(model), _located(model)[0], dtype)


def _geometry(said: str, name: str, dtype: str) -> tuple[KVGeometry, Any]:
    try:
        config = AutoConfig.from_pretrained(name)
        if (reason := why_plain(config)) is not None:
            raise UnsupportedModelError(f"KV of chunks is not stored for model {said!r}: {reason}", reason)
        tokenizer = AutoTokenizer.from_pretrained(name)
        if dtype == "auto":
            with suppress(ConfigError):  # memory is too small for it: then the checkpoint's
                dtype = type_to_load(config, _device("auto"))
        text = config.get_text_config()
        heads, latent = int(text.num_attention_heads), bool(getattr(text, "kv_lora_rank", None))
        geometry = KVGeometry(
            layers=int(text.num_hidden_layers),
            kv_heads=1 if latent else int(getattr(text, "num_key_value_heads", None) or heads),
            head_dim=latent_width(text) if latent else head_width(text),
            dtype=str(_stored_type(config) or torch.float32).removeprefix("torch.") if dtype == "auto" else dtype,
        )
    except (OSError, ValueError, ImportError, KeyError, AttributeError) as error:
        raise ModelLoadError(
            f"config and tokenizer of model {said!r} could not be loaded: {one_line(error)}; {name_remedy(said=said)}"
        ) from error
    return geometry, tokenizer


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ConfigError("device", device, 'use "auto", "cpu", "cuda" or "cuda:0"') from error
    try:
        torch.empty(0, device=target)
    except (AssertionError, RuntimeError, NotImplementedError) as error:  # a build without it raises what it likes
        raise ConfigError("device", device, 'PyTorch cannot use such a device; use "auto" or "cpu"') from error
    return target


@dataclass(frozen=True)
class Treatment:
    """How prompts of a model are answered.

    Parameters
    ----------
    how : str
        ``"blended"``; ``"plain, beginnings reused"``: by its own prefill, which goes on from a kept beginning;
        ``"plain"``: by its own prefill of each whole prompt; ``"refused"``.
    reason : str
        Why it is not blended; empty if it is.
    window : int, optional
        Tokens that its context window holds, if it is known.
    """

    how: Literal["blended", "plain, beginnings reused", "plain", "refused"]
    reason: str = ""
    window: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return self.how + (self.reason and f": {self.reason}")


def treatment_of(config: Any) -> Treatment:
    """How prompts of a model with this config are answered.

    Parameters
    ----------
    config : transformers PretrainedConfig
    """
    try:
        reason = why_plain(config)
    except UnsupportedModelError as error:
        return Treatment("refused", error.reason)
    if type(config) not in auto_class(config)._model_mapping:
        return Treatment("refused", f"transformers has no causal language model for {config.model_type!r}")
    if reason is None:
        return Treatment("blended", window=context_window(config))
    ahead = getattr(config.get_text_config(), "use_bidirectional_attention", None) in (True, "all")
    in_full = ahead or config.get_text_config().model_type in _IN_FULL
    return Treatment("plain" if in_full else "plain, beginnings reused", reason)


def expected_treatment(model: str | os.PathLike[str]) -> Treatment:
    """How prompts of a model are answered, by its id, folder or GGUF file; only the config is read or downloaded.

    Raises
    ------
    ModelLoadError
        If its config cannot be read.
    """
    name = os.fspath(model)
    try:
        with found_model(model, {}, weights=False):
            own = gguf_config(model) if is_gguf(model) else AutoConfig.from_pretrained(os.path.expanduser(name))
        return treatment_of(own)
    except UnsupportedModelError as error:
        return Treatment("refused", error.reason or str(error))
    except (OSError, ValueError, ImportError, KeyError) as error:
        fault = f"the config of model {name!r} cannot be read: {one_line(error)}"
        raise ModelLoadError(f"{fault}; {name_remedy(said=name)}") from error
