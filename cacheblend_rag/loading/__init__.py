"""LOAD: stored KV, layer by layer."""

from cacheblend_rag.loading.loader import LayerReader, Placement, load_ahead, load_plainly
from cacheblend_rag.loading.prefetcher import Prefetcher

__all__ = ["LayerReader", "Placement", "Prefetcher", "load_ahead", "load_plainly"]
