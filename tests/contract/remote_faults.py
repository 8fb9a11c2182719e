"""Faults of stores on other machines that show whether they can be trusted: away, slow, altered, crowded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import obstore
import torch
import valkey
from obstore.store import from_url
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.report import FusedKV
from cacheblend_rag.store import MemoryStore
from cacheblend_rag.store.remote import RemoteStore
from cacheblend_rag.store.s3 import S3Store
from cacheblend_rag.store.valkey import ValkeyStore
from docs.benchmarks.scripts.servers import Proxy, make_bucket, s3_environment
from tests.contract.faults import same_result
from tests.toy import MODEL_PATH

_LAYERS = 4
Change: TypeAlias = Callable[[bytes], bytes | None]


@dataclass
class Place:
    """A store behind a proxy, and what alters what is in it.

    Parameters
    ----------
    proxy : Proxy
    make : callable
        Makes a store object, given the ``timeout`` of a call, and perhaps a ``clock``.
    alter : callable
        Changes a piece of every record: takes what gives the new bytes of the old, or None to delete them.
    timeout : float
        These seconds, where nothing else is said.
    """

    proxy: Proxy
    make: Callable[..., RemoteStore]
    alter: Callable[[Change], None]
    timeout: float = 2.0

    def opened(self, timeout: float | None = None, clock: Callable[[], float] = time.monotonic) -> RemoteStore:
        """A new store object."""
        return self.make(timeout=timeout or self.timeout, clock=clock)


@contextmanager
def s3_place(port: int, bucket: str) -> Iterator[Place]:
    """A new bucket of an S3 server."""

    def alter(change: Change) -> None:
        client = from_url(f"s3://{bucket}/kv", client_options={"allow_http": True})
        for path in [one["path"] for some in obstore.list(client) for one in some]:
            changed = change(bytes(obstore.get(client, path).bytes()))
            if changed is None:
                obstore.delete(client, path)
            else:
                obstore.put(client, path, changed)

    make_bucket(port, bucket)
    with Proxy(port) as proxy, s3_environment(proxy.port):
        yield Place(proxy, lambda **given: S3Store(f"s3://{bucket}/kv", **given), alter)


@contextmanager
def valkey_place(port: int) -> Iterator[Place]:
    """A Valkey server, emptied. What is altered is the third layer of every record."""
    with Proxy(port) as proxy, closing(valkey.Valkey(port=port)) as client:

        def alter(change: Change) -> None:
            for key in client.keys("*}:2"):
                changed = change(client.get(key))
                if changed is None:
                    client.delete(key)
                else:
                    client.set(key, changed)

        client.flushall()
        url = f"valkey://127.0.0.1:{proxy.port}/0"
        yield Place(proxy, lambda **given: ValkeyStore(url, **given), alter)


@dataclass(frozen=True)
class Answered:
    """The result of a request.

    Parameters
    ----------
    hits : int
        Chunks read from the store, of three.
    right : bool
        Whether the result is bit by bit that of a run with these chunks in memory, and without the others.
    seconds : float
    """

    hits: int
    right: bool
    seconds: float


class RemoteTrials:
    """One prompt of three chunks over a tiny model, asked over any store. A chunk's KV takes half a megabyte."""

    def __init__(self) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
        torch.manual_seed(0)
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
        config = LlamaConfig(vocab_size=len(self._tokenizer), num_hidden_layers=_LAYERS, initializer_range=0.3, **shape)
        self._model = LlamaForCausalLM(config).eval()
        self.chunks = [
            " ".join(f"The {thing} was mended in {year}." for year in range(1900, 1916))
            for thing in ("harbour", "mill", "bridge")
        ]
        self._prompt = Prompt("Read this.\n", self.chunks, "\nQuestion: When was the mill mended?\nAnswer:")
        self._expected: dict[tuple[bool, ...], FusedKV] = {}

    def engine(self, store: Any, **options: Any) -> BlendEngine:
        """An engine over a store, which stores nothing by itself unless told so."""
        given: dict[str, Any] = {"min_tokens": 0, "condition": "sink", "recompute_ratio": 0.2, "write_back": "off"}
        given |= {"memory_limit": "10MB", "codec": "raw"} | options  # bits are compared
        config = BlendConfig(**given)
        return BlendEngine(self._model, self._tokenizer, config=config, store=store, fingerprint="trials")

    def warm(self, engine: BlendEngine, chunks: Sequence[str] | None = None) -> None:
        """Store chunks, by default all; one by one, since each bit depends on what is computed in the same pass."""
        for chunk in self.chunks if chunks is None else chunks:
            engine.warm([chunk], progress=False)

    def ask(self, engine: BlendEngine) -> Answered:
        """Fuse the prompt, and compare."""
        started = time.perf_counter()
        fused = engine.fuse(self._prompt)
        seconds = time.perf_counter() - started
        hits = tuple(map(bool, fused.report.chunk_tiers))
        return Answered(sum(hits), same_result(fused, self._only(hits, fused.report.prefix_hit)), seconds)

    def _only(self, hits: tuple[bool, ...], prefix: bool) -> FusedKV:
        """The result of a run in which only these chunks, and perhaps the prefix, were ever stored, in memory."""
        known = (*hits, prefix)
        if known not in self._expected:
            with self.engine(MemoryStore()) as engine:
                if prefix:
                    engine.with_config(write_back="inline").fuse(self._prompt)
                    engine.forget(self.chunks)
                self.warm(engine, [chunk for chunk, hit in zip(self.chunks, hits, strict=True) if hit])
                self._expected[known] = engine.fuse(self._prompt)
        return self._expected[known]
