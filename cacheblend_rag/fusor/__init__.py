"""FUSE: the layerwise blended pass."""

from cacheblend_rag.fusor.fusor import Fusion, FusionPlan, fuse

__all__ = ["Fusion", "FusionPlan", "fuse"]
