"""A model's weights in a file, in the form in which they lie in memory, so that memory need not hold them.

The model stays whole. On a CPU its tensors lie in the mapped file, and the system reads what is used. From another
device they come into the file, and go back when the model is wanted.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import nn

from cacheblend_rag.models.cpu.weight_prepacking import drop_copies
from cacheblend_rag.models.memory import give_back_unused
from cacheblend_rag.models.quantised import is_quantised

_PAGE = 4096
# Bytes after which the disk is waited for.
_SYNCED = 2**26


def why_kept(model: nn.Module) -> str | None:
    """Why the weights of a model cannot be put away; None if they can."""
    if is_quantised(model):
        return "its weights are quantised, and lie in objects of another package"
    devices = {weight.device for weight in model.parameters()}
    if len(devices) > 1 or "meta" in {device.type for device in devices}:
        return f"it is spread over {sorted(map(str, devices))}"
    return None


@dataclass(frozen=True)
class _Written:
    """A file of weights, and where each of them lies in it.

    A place in a page is that in memory: sums of products by MKL and oneDNN may depend on it in their last bits.
    """

    file: IO[bytes]
    places: list[range]

    def mapped(self) -> list[torch.UntypedStorage]:
        """The weights, by a map of their own: what frees memory is that the one before goes.

        Changes of them stay in memory, and out of the file: a fork of this process has it as it was.
        """
        whole = mmap.mmap(self.file.fileno(), self.places[-1].stop, access=mmap.ACCESS_COPY)
        return [
            torch.frombuffer(whole, dtype=torch.uint8, count=len(place), offset=place.start).untyped_storage()
            for place in self.places
        ]


class WeightFile:
    """Puts the weights of a model away, and brings them back; all of its tensors keep their values and stay objects.

    Both are called while nobody computes with the model.

    Parameters
    ----------
    model : Module
        Not kept alive by this.
    device : torch.device
        Where it computes.
    folder : path
        Where the file lies. It has no name there, and is gone with the last tensor in it.
    copied : bool, optional
        Whether weights are copied when they come back; by default where the device is no CPU.
    """

    def __init__(self, model: nn.Module, device: torch.device, folder: Path, *, copied: bool | None = None) -> None:
        self._model, self._device, self._folder = weakref.ref(model), device, folder
        self._copied = device.type != "cpu" if copied is None else copied
        self._written_file: _Written | None = None
        self._moving: _State | None = None  # the weights when last they changed while they were put away
        self.away = False
        """Whether they were put away, and nobody has wanted them since."""

    @torch.no_grad()
    def put_away(self, wanted: Callable[[], bool] = lambda: False) -> bool:
        """Free the memory of the weights; whether that was done.

        A file is written once. It is used again as long as it holds what the weights are.

        Parameters
        ----------
        wanted : callable
            Whether somebody wants the model now. Then nothing is changed.

        Raises
        ------
        OSError
            If the file cannot be written; nothing is changed then.
        """
        model = self._model()
        held = [] if model is None else _storages(model)
        if model is None or not held:
            return False
        state = _state(model)
        if self._moving not in (None, state):  # somebody trains them
            self._moving = state
            return False
        if not self._holds(held, wanted):
            written = self._written(held, wanted)
            if written is None:
                return False
            if self._written_file is not None:
                self._written_file.file.close()  # what is mapped of it stays
            self._written_file = written
        if wanted() or self._written_file is None:
            return False
        self._moving = None if (now := _state(model)) == state else now
        if self._moving is not None:
            return False
        _lay(model, held, self._written_file.mapped())
        self.away = True
        del held
        drop_copies(model)
        give_back_unused(self._device)
        return True

    def _holds(self, held: Sequence[torch.UntypedStorage], wanted: Callable[[], bool]) -> bool:
        """Whether the file holds these bytes already."""
        kept = [] if self._written_file is None else self._written_file.mapped()
        return len(held) == len(kept) and all(
            one.nbytes() == other.nbytes() and not wanted() and torch.equal(_bytes(one).cpu(), _bytes(other))
            for one, other in zip(held, kept, strict=True)
        )

    def _written(self, held: Sequence[torch.UntypedStorage], wanted: Callable[[], bool]) -> _Written | None:
        """A new file with these bytes; None if somebody wants the model meanwhile."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with ExitStack() as unless_whole:
            file = unless_whole.enter_context(tempfile.TemporaryFile(prefix="weights-", dir=self._folder))
            places, end, synced = list[range](), 0, 0
            for storage in held:
                if wanted():
                    return None
                start = -(-end // _PAGE) * _PAGE + storage.data_ptr() % _PAGE
                end = start + storage.nbytes()
                file.seek(start)
                file.write(_bytes(storage).cpu().numpy().data)
                places.append(range(start, end))
                if end - synced >= _SYNCED or storage is held[-1]:
                    file.flush()
                    os.fsync(file.fileno())  # before the disk has them, memory is not free
                    synced = end
            unless_whole.pop_all()
            weakref.finalize(self, file.close)
            return _Written(file, places)

    @torch.no_grad()
    def bring_back(self) -> None:
        """Let the model compute where it did; on a CPU it can at any time, and reads what it uses."""
        model = self._model()
        if self.away and self._copied and model is not None:
            held = _storages(model)
            _lay(model, held, [_bytes(one).to(self._device, copy=True).untyped_storage() for one in held])
        self.away = False


_State = list[tuple[int, int]]


def _movable(model: nn.Module) -> list[nn.Parameter]:
    """The weights that can lie in other memory."""
    return [
        weight
        for weight in model.parameters()
        if type(weight) is nn.Parameter and weight.layout is torch.strided and not weight.is_meta
    ]


def _state(model: nn.Module) -> _State:
    """Place and version of each weight."""
    return [(one.data_ptr(), 0 if one.is_inference() else one._version) for one in _movable(model)]


def _storages(model: nn.Module) -> list[torch.UntypedStorage]:
    """The memory that weights lie in, each once however many share it."""
    found = (weight.untyped_storage() for weight in _movable(model))
    return list({one.data_ptr(): one for one in found if one.nbytes()}.values())


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """``[bytes]``, uint8, in that memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _lay(model: nn.Module, old: Sequence[torch.UntypedStorage], new: Sequence[torch.UntypedStorage]) -> None:
    """Let weights lie in other memory, which holds the same; those that shared it still do."""
    places = {one.data_ptr(): other for one, other in zip(old, new, strict=True)}
    for weight in _movable(model):
        place = places.get(weight.untyped_storage().data_ptr())
        if place is not None:
            tensor = torch.empty(0, dtype=weight.dtype, device=place.device)
            weight.data = tensor.set_(place, weight.storage_offset(), weight.size(), weight.stride())
