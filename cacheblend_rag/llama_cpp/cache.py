"""The KV of a prompt and its answer, as a sequence within llama.cpp's context."""

from __future__ import annotations

import copy
import weakref
from typing import Any

from transformers import Cache

from cacheblend_rag.llama_cpp.runtime import Runtime
from cacheblend_rag.models.cache import PreallocatedLayer


class SequenceCache(Cache):  # type: ignore[misc]
    """A cache whose rows lie in llama.cpp. Its sequence is given back once nobody holds the cache.

    Parameters
    ----------
    runtime : Runtime
    sequence : int
    length : int
        Positions that it holds.
    """

    def __init__(self, runtime: Runtime, sequence: int, length: int) -> None:
        self.runtime, self.sequence, self.length = runtime, sequence, length
        super().__init__(layers=[_AllLayers(self)])
        weakref.finalize(self, runtime.leave, sequence)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions that it holds."""
        return self.length

    def __copy__(self) -> SequenceCache:
        """Another cache of the same positions; what each adds is its own."""
        runtime = self.runtime
        if not runtime.is_alone:
            other = SequenceCache(runtime, runtime.take(), self.length)
            runtime.copy(self.sequence, other.sequence, 0, self.length)
            return other
        alone = runtime.alone(self.length)
        other = SequenceCache(alone, alone.take(), self.length)
        if self.length:
            alone.place(runtime.state(self.sequence), other.sequence)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceCache:
        return copy.copy(self)

    def take_back(self, rows: int) -> None:
        """Forget the newest positions."""
        self.length -= rows
        self.runtime.cut(self.sequence, self.length)


class _AllLayers(PreallocatedLayer):
    """Stands for all layers of a sequence, which grow and are taken back together."""

    is_initialized = True

    def __init__(self, cache: SequenceCache) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)

    def get_seq_length(self, *args: Any) -> int:
        """Positions that the sequence holds."""
        cache = self._cache()
        return 0 if cache is None else cache.length

    def take_back(self, rows: int) -> None:
        """Forget the newest positions."""
        cache = self._cache()
        if cache is not None:
            cache.take_back(rows)
