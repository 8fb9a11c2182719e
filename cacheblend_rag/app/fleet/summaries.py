"""Which pieces of chunks a replica holds in its memory and on its disk, for the router."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from cacheblend_rag.app.fleet.pieces import piece_digests
from cacheblend_rag.app.fleet.routing import MOST_CHUNKS, HeldChunks
from cacheblend_rag.errors import StoreError
from cacheblend_rag.store.base import KVRecord, KVStore, RecordInfo, StoredKV, WrappedStore

_log = logging.getLogger(__name__)
_KINDS = ("chunk", "found", "prefix")


class SummarizedStore(WrappedStore):
    """A KV store that says which pieces of chunks lie on this machine.

    It notes what is put, read, erased and evicted. Earlier records of a folder are read, so a replica that is started
    again knows them. The token ids of a record are decoded; of a tokenizer that does not give the text back, the router
    then knows less.

    Parameters
    ----------
    inner : KVStore
        The store, with the tiers of this machine and those of others.
    """

    def __init__(self, inner: KVStore) -> None:
        super().__init__(inner)
        own = [tier for tier in inner.traits.tiers or (inner,) if not tier.traits.remote]
        self._memory = next((tier for tier in own if not tier.traits.persistent), None)
        self._kept = next((tier for tier in own if tier.traits.persistent), None)
        self._pieces = OrderedDict[str, tuple[int, ...]]()  # by key, the last used last
        self._lock = threading.Lock()
        self._decode: Callable[[Sequence[int]], str] | None = None
        self._fingerprint = self._separator = ""
        inner.on_evict = lambda key, record: self._forget(key)

    def read(self, decode: Callable[[Sequence[int]], str], fingerprint: str, separator: str) -> None:
        """Read which chunks of a model the folder holds. Later changes are tracked.

        Parameters
        ----------
        decode : callable
            Text of token ids.
        fingerprint : str
            Identity of the model.
        separator : str
            Text between chunks.
        """
        self._fingerprint, self._separator, self._decode = fingerprint, separator, decode
        try:
            for key, info in self._kept.infos("") if self._kept is not None else ():
                self._note([(key, info)], used=False)
                if len(self._pieces) >= MOST_CHUNKS:
                    break
        except StoreError as error:
            _log.warning("the router is not told of all chunks: %s", error)

    def summary(self) -> dict[str, frozenset[int]]:
        """The fields of `HeldChunks`; other processes of Ray know no class of ours."""
        with self._lock:
            held = list(reversed(self._pieces.items()))
        memory = {key for key, _ in held if self._memory is not None and self._memory.contains(key)}
        return vars(
            HeldChunks.from_digests(
                (digest for key, pieces in held if key in memory for digest in pieces),
                (digest for key, pieces in held if key not in memory for digest in pieces),
            )
        )

    def _note(self, records: Iterable[tuple[str, RecordInfo]], *, used: bool = True) -> None:
        for key, info in records:
            if self._decode is None or info.kind not in _KINDS or info.fingerprint != self._fingerprint:
                continue
            # The first tokens of a chunk may stand with the separator before it, among what it was computed behind.
            pieces = self._pieces.get(key) or piece_digests(
                self._decode((*info.context_ids, *info.token_ids)), self._separator
            )
            with self._lock:
                if used or key not in self._pieces:
                    self._pieces[key] = pieces
                    self._pieces.move_to_end(key, last=used)
                if len(self._pieces) > MOST_CHUNKS:
                    self._pieces.popitem(last=False)

    def _forget(self, key: str) -> None:
        with self._lock:
            self._pieces.pop(key, None)

    def handed_out(self, key: str, record: StoredKV) -> StoredKV:
        """See `WrappedStore.handed_out`; what is read from elsewhere is kept here, too."""
        self._note([(key, record.info)])
        return record

    def put(self, key: str, record: KVRecord) -> None:
        """See `KVStore.put`."""
        self.inner.put(key, record)
        self._note([(key, record.info)])

    def delete(self, key: str) -> bool:
        """See `KVStore.delete`."""
        self._forget(key)
        return self.inner.delete(key)
