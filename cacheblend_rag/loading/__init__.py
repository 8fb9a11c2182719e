"""LOAD: stored KV, layer by layer, and how much of it to recompute meanwhile."""

from cacheblend_rag.loading.controller import ChunkKV, LoadingController, LoadingPlan, RatioBounds
from cacheblend_rag.loading.loader import LayerReader, Placement, Prefetcher, load_ahead, load_as_it_pays, load_plainly
from cacheblend_rag.loading.profile import BlendSettings, Device, MachineProfile, PrefillProfile, load_devices

__all__ = [
    "BlendSettings",
    "ChunkKV",
    "Device",
    "LayerReader",
    "LoadingController",
    "LoadingPlan",
    "MachineProfile",
    "Placement",
    "Prefetcher",
    "PrefillProfile",
    "RatioBounds",
    "load_ahead",
    "load_as_it_pays",
    "load_devices",
    "load_plainly",
]
