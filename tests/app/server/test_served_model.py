"""Engines of many tenants: those that were not used for long are let go of, and nothing of a tenant is lost by it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.app.server.services import served_model
from cacheblend_rag.app.server.services.served_model import ServedModel
from cacheblend_rag.app.server.settings import Limits
from tests import tiny

PROMPT = Prompt("Read this.", [tiny.text(80, 1), tiny.text(80, 2)], "Which leaf?")


@pytest.fixture
def served() -> Iterator[ServedModel]:
    config = BlendConfig(min_tokens=0, recompute_ratio=0.3, write_back="inline")
    engine = BlendEngine(tiny.model(num_hidden_layers=2), tiny.tokenizer(), config=config)
    with engine:
        yield ServedModel("tiny", engine, Limits(), starter=False)


def engine_of(served: ServedModel, tenant: int) -> BlendEngine:
    return served.engine_for(f"salt-{tenant}", None, None)


def use_others(served: ServedModel, count: int = 300) -> None:
    for tenant in range(1_000, 1_000 + count):
        engine_of(served, tenant)
    gc.collect()


def test_engines_of_three_hundred_tenants_are_released(served: ServedModel) -> None:
    engines = []
    for tenant in range(300):
        engine = engine_of(served, tenant)
        engines.append(weakref.ref(engine))
        if not tenant % 100:
            engine.generate(PROMPT, max_new_tokens=2)
    del engine
    gc.collect()
    alive = [one for one in engines if one() is not None]
    assert 0 < len(alive) <= served_model._ENGINES
    assert engines[-1]() is not None, "the latest stays"
