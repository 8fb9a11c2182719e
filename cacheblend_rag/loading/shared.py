"""KV that several prompts of a batch read: each layer is read once, while another prompt still needs it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from cacheblend_rag.store.base import RecordInfo, StoredKV


class SharedKV:
    """Layers that one prompt of a batch has read, kept in memory for the prompts after it.

    Each prompt opens its own records. A record that no other prompt needs is read straight into place, as without a
    batch, and so is one in memory. Several threads may use it.

    Parameters
    ----------
    prompts : sequence of collection of str
        The texts whose KV each prompt may read: its prefix and its chunks.
    limit : int
        Bytes kept at most. What does not fit is read again.
    """

    def __init__(self, prompts: Sequence[Collection[str]], limit: int = 10**9) -> None:
        self._needed = Counter(text for texts in prompts for text in {*texts})  # by how many prompts still
        self._limit = limit
        self.size = 0
        """Bytes kept now."""
        self._records: dict[str, tuple[str, RecordInfo]] = {}  # by key, the text and what was read first
        self._layers: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}  # by key and layer
        self._lock = threading.Lock()

    def takes(self, key: str, text: str, record: StoredKV) -> bool:
        """True if layers of this record are worth keeping, or are kept; others are read straight into place."""
        if record.tier == "memory":
            return False
        with self._lock:
            known = self._records.get(key)
            if known is None and self._needed[text] > 1:
                known = self._records[key] = (text, record.info)
            # One that was erased and stored again may stand behind other contexts.
            return known is not None and known[1] == record.info

    def holds(self, key: str, layer: int) -> bool:
        """True if a layer need not be read."""
        return (key, layer) in self._layers

    def copy_layer(self, key: str, record: StoredKV, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write one layer into place, from memory or from the record; see `StoredKV.read_into`."""
        place, text = (key, layer), self._records[key][0]
        with self._lock:
            kept = self._layers.get(place)
            if kept is not None and self._needed[text] <= 1:  # the last prompt that needs it takes it away
                self._drop(place)
        if kept is not None:
            keys.copy_(kept[0])
            values.copy_(kept[1])
            return
        record.read_into(layer, keys, values)
        size = keys.nbytes + values.nbytes
        with self._lock:
            wanted = self._needed[text] > 1 and place not in self._layers
            if wanted and self.size + size <= self._limit:
                self._layers[place] = keys.clone(), values.clone()  # [kv_heads, tokens, head_dim] each
                self.size += size

    @contextmanager
    def read_by(self, texts: Collection[str]) -> Iterator[None]:
        """A prompt with these texts is answered within; afterwards it needs them no more."""
        try:
            yield
        finally:
            with self._lock:
                self._needed.subtract({*texts})
                for place in [one for one in self._layers if not self._needed[self._records[one[0]][0]] > 0]:
                    self._drop(place)

    def close(self) -> None:
        """Release all layers, and keep no more."""
        with self._lock:
            self._needed.clear()
            self._layers.clear()
            self.size = 0

    def _drop(self, place: tuple[str, int]) -> None:
        self.size -= sum(tensor.nbytes for tensor in self._layers.pop(place))
