"""Keep alive: the memory of a model's weights is given back once no request has had the model for a while.

The weights lie in a file, in the form in which they lie in memory. On a CPU the model's tensors are then mapped from
it, and the system reads what is used. To another device they are copied when the model is wanted.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models.cpu.products import drop_copies
from cacheblend_rag.models.memory import give_back_unused
from cacheblend_rag.models.quantised import is_quantised

_log = logging.getLogger(__name__)
_PAGE = 4096


class KeepAlive:
    """Puts a model's weights away once nobody has had the model, or waited for it, for a while.

    Parameters
    ----------
    engine : BlendEngine
        The only user of its model, whose weights stay as they are.
    seconds : float
    folder : path
        Where the file lies. It has no name there, and is gone with the process.

    Raises
    ------
    ConfigError
        If the weights cannot be put away, or the file cannot be written.
    """

    def __init__(self, engine: BlendEngine, seconds: float, folder: Path) -> None:
        self._model, self._device, self.seconds = engine.model, engine.adapter.device, seconds
        self.away = False
        """Whether the memory was given back, and nobody has used the model since."""
        if is_quantised(engine.model):
            remedy = "leave it out; the model stays in memory: its weights lie in objects of another package"
            raise ConfigError("keep_alive", seconds, remedy)
        try:
            self._write(folder)
        except OSError as error:
            remedy = f"leave it out, or free some space; the weights cannot be written to {folder}: {error}"
            raise ConfigError("keep_alive", seconds, remedy) from error
        self._scheduler, self._ended = engine.turns.scheduler, threading.Event()
        self._scheduler.preparations.append(self._bring_back)
        threading.Thread(target=self._watch, name="keep-alive", daemon=True).start()

    def _write(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(prefix="weights-", dir=folder)  # noqa: SIM115
        self._places, end = list[range](), 0
        for storage in self._storages():
            # A place in a page is that in memory: products by MKL and oneDNN may depend on it in their last bits.
            start = -(-end // _PAGE) * _PAGE + storage.data_ptr() % _PAGE
            end = start + storage.nbytes()
            self._file.seek(start)
            self._file.write(_bytes(storage).cpu().numpy().data)
            self._places.append(range(start, end))
        self._file.flush()
        os.fsync(self._file.fileno())  # before the disk has them, memory is not free

    def look(self) -> None:
        """Give the memory back if it is time."""
        if self.away:
            return
        with self._scheduler.held_if_idle(self.seconds) as held:
            if held:
                self._put_away()
                _log.info("the model was not used for %g s; the memory of its weights is free", self.seconds)

    @torch.no_grad()
    def _put_away(self) -> None:
        # A map of its own each time: what frees memory is that the one before goes.
        whole = mmap.mmap(self._file.fileno(), self._places[-1].stop, access=mmap.ACCESS_COPY)
        self._lay(
            [
                torch.frombuffer(whole, dtype=torch.uint8, count=len(place), offset=place.start).untyped_storage()
                for place in self._places
            ]
        )
        drop_copies(self._model)
        give_back_unused(self._device)
        self.away = True

    @torch.no_grad()
    def _bring_back(self) -> None:
        """Let the model compute where it did; on a CPU it can at any time, and reads what it uses."""
        if self.away and self._device.type != "cpu":
            self._lay([_bytes(one).to(self._device).untyped_storage() for one in self._storages()])
        self.away = False

    def _watch(self) -> None:
        while not self._ended.wait(min(max(1.0, self.seconds / 8), threading.TIMEOUT_MAX)):
            self.look()

    def close(self) -> None:
        """Give no memory back any more."""
        self._ended.set()

    def _weights(self) -> list[nn.Parameter]:
        return [one for one in self._model.parameters() if one.layout is torch.strided and one.nbytes]

    def _storages(self) -> list[torch.UntypedStorage]:
        """The memory that weights lie in, each once however many share it."""
        return list({one.untyped_storage().data_ptr(): one.untyped_storage() for one in self._weights()}.values())

    def _lay(self, new: Sequence[torch.UntypedStorage]) -> None:
        """Let weights lie in other memory, which holds the same; those that shared it still do."""
        places = {one.data_ptr(): other for one, other in zip(self._storages(), new, strict=True)}
        for weight in self._weights():
            place = places[weight.untyped_storage().data_ptr()]
            tensor: Any = torch.empty(0, dtype=weight.dtype, device=place.device)
            weight.data = tensor.set_(place, weight.storage_offset(), weight.size(), weight.stride())


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """``[bytes]``, uint8, in that memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
