"""Identity of a model: what a KV record must have been computed with."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import cached_file

from cacheblend_rag.config import default_data_path
from cacheblend_rag.models.lora import AdaptedLayer, adapted_layers, own_weights

# Raise when the same weights would no longer give the same stored KV.
_ADAPTER_VERSION = 1
_SAMPLE_BYTES = 16_384
# Elements of each adapter's tensor that are looked at for every request, and states whose identity is kept.
_SAMPLES = 8
_STATES = 64
# Entries of a config that do not change what the model computes.
_VOLATILE = (
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "_attn_implementation",
    "use_cache",
    "architectures",
)


def fingerprint(model: Any) -> str:
    """Hash of a model's config, element type and weights; adapters count only if they are merged into the weights.

    Each tensor goes in by name, shape, its first and last bytes, and an integer sum over each of
    its rows, so that a fine-tune under the same name differs however few weights it moved.

    Parameters
    ----------
    model : transformers PreTrainedModel

    Returns
    -------
    str
        64 hexadecimal digits.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE}
    digest = hashlib.sha256(json.dumps([_ADAPTER_VERSION, config], sort_keys=True, default=str).encode())
    with torch.no_grad():
        for name, weight in sorted(own_weights(model)):
            for path, tensor in _tensors(name, weight):
                digest.update(f"{path}{tuple(tensor.shape)}{tensor.dtype}".encode())
                digest.update(content_of(tensor))
    return digest.hexdigest()


class FileIdentity:
    """Identity of a model whose weights are a file's: they never change.

    Parameters
    ----------
    value : str
        Identity when it was last looked at.
    """

    changes = 0
    """How often it was seen to change."""

    def __init__(self, value: str) -> None:
        self.value = value

    def refresh(self) -> bool:
        """Whether the weights are others now."""
        return False

    def glancing(self, ask: Callable[[], bool]) -> Callable[[], bool]:
        """A question that is asked often, and each time sees whether adapters were switched."""
        return ask


class ModelIdentity(FileIdentity):
    """Identity of a model whose LoRA adapters may be switched between two requests.

    It says what the model computes with: its own weights, merged adapters in them, and the active adapters, whatever
    their names. Without an active adapter it is that of the model's own weights.

    Parameters
    ----------
    model : transformers PreTrainedModel
    own : str, optional
        `fingerprint` of the model, where it is known already.
    """

    def __init__(self, model: Any, own: str | None = None) -> None:
        self._model = model
        layers = adapted_layers(model)
        self._own = own or fingerprint(model)
        self._own_state, self._paths = _merged_state(layers), {layer.path for layer in layers}
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._layers = layers
        super().__init__(self._identify(layers))

    def refresh(self) -> bool:
        """Look at the adapters again; True if the model's own weights have changed.

        Each request checks the state of the adapters, the address and version of their tensors, and a few elements of
        each tensor. The tensors are read in full only in a state that was not seen before.
        """
        layers = adapted_layers(self._model)
        merged, paths = _merged_state(layers), {layer.path for layer in layers}
        changed = merged != self._own_state or not self._paths <= paths
        if changed:
            self._own = fingerprint(self._model)
            self._known.clear()
        self._own_state, self._paths, self._layers, before = merged, paths, layers, self.value
        self.value = self._identify(layers)
        if self.value != before:
            self.changes += 1
        return changed

    def glancing(self, ask: Callable[[], bool]) -> Callable[[], bool]:
        """A question that is asked often, and each time sees whether adapters were switched, even if not for long."""

        def asked() -> bool:
            if any(layer.switched for layer in self._layers):
                self.changes += 1
            return ask()

        return asked

    def _identify(self, layers: Sequence[AdaptedLayer]) -> str:
        active = [layer for layer in layers if layer.tensors and not layer.merged]
        if not active:
            return self._own
        state = _state(active)
        if state not in self._known:
            digest = hashlib.sha256(self._own.encode())
            for layer in active:
                digest.update(repr(layer.facts).encode())
                for name, tensor in layer.tensors:
                    digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
                    digest.update(content_of(tensor))
            self._known[state] = digest.hexdigest()
            if len(self._known) > _STATES:
                self._known.popitem(last=False)
        return self._known[state]


def _merged_state(layers: Sequence[AdaptedLayer]) -> bytes:
    """State on which the model's own weights depend, as far as adapters change them."""
    return _state([layer for layer in layers if layer.merged])


@torch.no_grad()
def _state(layers: Sequence[AdaptedLayer]) -> bytes:
    """How adapters stand, and what their tensors are as far as every request can afford to ask."""
    tensors = [tensor.detach() for layer in layers for _, tensor in layer.tensors]
    given = [tensor for layer in layers for _, tensor in layer.tensors]
    versions = [-1 if tensor.is_inference() else tensor._version for tensor in given]
    seen = [(id(tensor), version, tensor.data_ptr()) for tensor, version in zip(given, versions, strict=True)]
    digest = hashlib.sha256(repr(([(layer.facts, layer.merged) for layer in layers], seen)).encode())
    # Writing through ``.data`` moves no version, and memory that was given back may come again.
    parts = [tensor.flatten()[:: max(1, tensor.numel() // _SAMPLES)].float() for tensor in tensors]
    if parts:
        digest.update(torch.cat(parts).cpu().numpy().tobytes())
    return digest.digest()


def fingerprint_in(model_fingerprint: str, regime: int) -> str:
    """Identity of a model within a frequency regime; KV of one regime is of no use to another."""
    if not regime:
        return model_fingerprint
    return hashlib.sha256(f"{model_fingerprint} beyond {regime} tokens".encode()).hexdigest()


def _tensors(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A weight by its name, or what a quantised weight is made of (codes, scales)."""
    take_apart = getattr(weight, "__tensor_flatten__", None)
    if take_apart is None:
        yield name, weight
        return
    for part in take_apart()[0]:
        yield from _tensors(f"{name}.{type(weight).__name__}.{part}", getattr(weight, part))


def content_of(tensor: torch.Tensor) -> bytes:
    """Contents of a fingerprint: the sum of each row's bits, and the first and last elements."""
    data = tensor.detach().contiguous()
    rows = data.shape[0] if data.dim() > 1 and data.numel() else 1
    data = data.flatten()
    if data.is_floating_point() or data.is_complex():
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
        data = data.view(whole.get(data.element_size(), torch.int64))
    sums = data.view(rows, -1).sum(dim=1, dtype=torch.int64).cpu()  # [rows]
    edge = max(1, _SAMPLE_BYTES // data.element_size())
    ends = torch.cat((data[:edge], data[-edge:])).cpu().contiguous()
    return sums.numpy().tobytes() + ends.view(torch.uint8).numpy().tobytes()


_log = logging.getLogger(__name__)
_MOST_ENTRIES = 256


def files_identity(model: str, dtype: str) -> str | None:
    """Hash of where a model's files lie, their sizes and times, and what reads them.

    Parameters
    ----------
    model : str
        Folder or id of a model; an id must be in the local cache.
    dtype : str
        Element type it is loaded in.

    Returns
    -------
    str or None
        None if its files are not known, or do not hold the whole model.
    """
    folder = _folder_of(model)
    if folder is None or (folder / "adapter_config.json").exists():  # its base model lies elsewhere
        return None
    rows = [[_ADAPTER_VERSION, torch.__version__, transformers.__version__, dtype]]
    try:
        for path in sorted(folder.iterdir()):
            real = path.resolve()
            state = real.stat()
            times = (state.st_mtime_ns, state.st_ctime_ns)
            rows.append([path.name, str(real), state.st_dev, state.st_ino, state.st_size, *times])
    except OSError:
        return None
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def known_fingerprint(identity: str | None) -> str | None:
    """The fingerprint that files of this identity gave."""
    entry = _read().get(identity or "")
    return entry[0] if entry else None


def remember_fingerprint(identity: str, fingerprint: str, name: str) -> None:
    """Keep the fingerprint of files of this identity."""
    entries = _read()
    entries.pop(identity, None)
    entries[identity] = (fingerprint, name)
    path = cache_file()
    newest = dict(list(entries.items())[-_MOST_ENTRIES:])
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(newest, file)
        os.replace(file.name, path)
    except OSError as error:
        _log.debug("the fingerprint of %s is not kept: %s", name, error)


def known_names() -> dict[str, str]:
    """Names of models by fingerprint, for models that were loaded by name in this process."""
    return dict(_read().values())


def _folder_of(model: str) -> Path | None:
    if os.path.isdir(model):
        return Path(model)
    try:
        found = cached_file(model, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError):
        return None
    return Path(found).parent if found else None


def cache_file() -> Path:
    """The file that remembers fingerprints of unchanged weight files."""
    return default_data_path() / "fingerprints.json"


def _read() -> dict[str, tuple[str, str]]:
    try:
        content: Any = json.loads(cache_file().read_text(encoding="utf-8"))
        pairs = {str(identity): (str(entry[0]), str(entry[1])) for identity, entry in content.items()}
    except (OSError, ValueError, AttributeError, IndexError, KeyError, TypeError, RecursionError):
        return {}
    return {identity: pair for identity, pair in pairs.items() if re.fullmatch("[0-9a-f]{64}", pair[0])}
