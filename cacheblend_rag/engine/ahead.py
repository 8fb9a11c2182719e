"""KV that is stored for all tenants, whoever asks: which it is, and the engine of a tenant that reads it.

A tenant's engine has a salt of its own. What its questions leave behind has that salt, and nobody else finds it. KV
that was stored ahead of any question has the salt that all have in common, and a hit on it tells of no question.
"""

from __future__ import annotations

from collections.abc import Iterable

from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.engine.segments import StoredAhead


def keys_ahead(engine: BlendEngine, texts: Iterable[str]) -> set[str]:
    """Keys under which `BlendEngine.warm` stores chunks; of those that can have KV."""
    segments = engine.chunks.pipeline.segments
    segments.model.look()
    found = (segments.chunk(text) for text in texts)
    return {one.key for one in found if one is not None}


def engine_of_tenant(engine: BlendEngine, salt: str, ahead: StoredAhead | None) -> BlendEngine:
    """A view of an engine that has nothing in common with those of other tenants but model, store and turns.

    Its verifications are counted alone, so that no other tenant's corrections raise its recompute ratio, and the texts
    that it remembers are its own. It ends with the engine.

    It can be let go of, and made again when the tenant asks again. Prompts of the tenant that lie in memory stay: all
    views share them, by salt. So does a ratio that corrections have raised. Token ids of texts are made anew.

    Parameters
    ----------
    engine : BlendEngine
    salt : str
        Of the tenant.
    ahead : StoredAhead or None
        KV that is read beside its own.
    """
    minimum = engine.verifications.minimum_of(salt)
    pipeline = engine.chunks.pipeline.of_tenant(salt, ahead, minimum)
    verifications = engine.verifications.of_tenant(pipeline)
    return engine._changed(pipeline=pipeline, verifications=verifications)
