"""LOOK UP: a record, its identity and its key, and how it is read layer by layer."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cacheblend_rag.models.kv import SegmentKV


@dataclass(frozen=True)
class RecordInfo:
    """Identity and shape of a record.

    Parameters
    ----------
    fingerprint : str
        Identity of the model whose KV this is.
    context_ids : tuple of int
        Ids the segment was computed behind (sink or prefix).
    token_ids : tuple of int
        Ids of the segment itself. For a hit the ids must be equal, and not only their hash.
    layers, kv_heads, head_dim : int
        Shape of the KV: each layer holds keys and values of ``[kv_heads, tokens, head_dim]``.
    dtype : str
        Name of the element type, such as ``"bfloat16"``.
    rotated : bool
        Whether the keys have the rotation of the positions at which they were computed.
    kind : str
        ``"chunk"``, ``"found"`` for a chunk that was found because its text repeats, ``"variant"`` for one behind what
        stood before it in an earlier prompt, or ``"prefix"``. One kind is never taken for another.
    contexts : int
        Over how many contexts the KV is averaged. 0 if it was computed behind ``context_ids`` alone.
    behind : tuple of int
        Ids of these contexts, one after the other. They stood before ``context_ids``, and are no part of the key.
    before : tuple of str
        Of a variant, digests of the prefix and of each chunk before it, in their order. Of a chunk behind contexts,
        nothing and digests of the chunks in these.
    """

    fingerprint: str
    context_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    rotated: bool
    kind: str = "chunk"
    contexts: int = 0
    behind: tuple[int, ...] = ()
    before: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens of the segment."""
        return len(self.token_ids)


@dataclass(frozen=True)
class KVRecord:
    """A segment's KV with its identity, ready to be stored."""

    info: RecordInfo
    kv: SegmentKV

    @classmethod
    def describe(
        cls, kv: SegmentKV, *, fingerprint: str, context_ids: tuple[int, ...], token_ids: tuple[int, ...]
    ) -> KVRecord:
        """Describe the KV of a segment."""
        kv_heads, _, head_dim = kv.keys[0].shape
        dtype = str(kv.keys[0].dtype).removeprefix("torch.")
        layers = len(kv.keys)
        return cls(RecordInfo(fingerprint, context_ids, token_ids, layers, kv_heads, head_dim, dtype, kv.rotated), kv)


class StoredKV(ABC):
    """A record opened for reading, layer by layer. A custom record implements `info` and `read_layer`.

    It stays readable if the store evicts it meanwhile. One on another machine may then be lost: reading raises
    `RecordError`.
    """

    info: RecordInfo
    """Identity and shape."""
    tier: str = ""
    """The tier that it is read from: ``"disk"``, ``"memory"``. One in memory is copied as it lies there, and never read
    ahead."""

    @abstractmethod
    def read_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each ``[kv_heads, tokens, head_dim]``.

        Raises
        ------
        RecordError
            If the layer cannot be read or fails its checksum.
        StoreUnreachableError
            If the store does not answer.
        """

    def read_into(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write one layer into place, converted to the element type and device found there.

        Parameters
        ----------
        layer : int
        keys, values : Tensor, each [kv_heads, tokens, head_dim]
            The tensors to write; may be views with strides.

        Raises
        ------
        RecordError, StoreUnreachableError
            As for `read_layer`.
        """
        stored_keys, stored_values = self.read_layer(layer)
        keys.copy_(stored_keys)
        values.copy_(stored_values)

    def read_ahead(self, layer: int) -> None:  # noqa: B027 - most records are near
        """Ask another machine for a layer, and for some that follow; does not wait. Elsewhere it does nothing."""

    @property
    def codec(self) -> str | None:
        """Codec in whose bytes `read_written` gives layers; None if they are only read decoded."""
        return None

    def read_written(self, layers: slice, pinned: bool = False) -> torch.Tensor:
        """Some layers as the codec wrote them, uint8 ``[layers, bytes]``, checked; a row may be longer than its layer.

        Several threads may call it at once. What lies in memory comes as it lies there, on whatever device. It is not
        called without a codec.

        Parameters
        ----------
        layers : slice
        pinned : bool
            Read into pinned memory, from which a GPU copies fast.

        Raises
        ------
        RecordError
            As for `read_layer`.
        """
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027 - many hold nothing open
        """Close the open file or connection."""


def record_key(
    *,
    fingerprint: str,
    salt: str,
    kind: str,
    context_ids: Sequence[int],
    token_ids: Sequence[int],
    contexts: int = 0,
) -> str:
    """Key of a record by content: the same segment has one key wherever it stands.

    Parameters
    ----------
    fingerprint : str
        Identity of the model.
    salt : str
        Tenants with different salts share nothing.
    kind : str
        As in `RecordInfo`.
    context_ids, token_ids : sequence of int
        The ids that the segment is computed behind, and its own.
    contexts : int
        Over how many contexts its KV is averaged; which ones they are is no part of the key.
    """
    digest = hashlib.sha256()
    also = [f"{contexts} contexts"] * bool(contexts)
    for part in (fingerprint, salt, kind, _join(context_ids), _join(token_ids), *also):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _join(ids: Sequence[int]) -> str:
    # In one call, and not remembered: other tenants would see by the time of a look-up which texts were asked about.
    return ("%d," * len(ids) % tuple(ids))[:-1]
