"""LOAD: stored KV, layer by layer."""

from cacheblend_rag.loading.loader import LayerReader, Placement, load_ahead, load_plainly

__all__ = ["LayerReader", "Placement", "load_ahead", "load_plainly"]
