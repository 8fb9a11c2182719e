"""FUSE: the layerwise blended pass."""

from cacheblend_rag.fusor.blend import Fusion, FusionPlan, fuse

__all__ = ["Fusion", "FusionPlan", "fuse"]
