"""Engines of many tenants: those that were not used for long are let go of."""

from __future__ import annotations

import gc
import weakref

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.app.server.services import served_model
from cacheblend_rag.app.server.services.served_model import ServedModel
from cacheblend_rag.app.server.settings import Limits
from tests import tiny


def test_engines_of_three_hundred_tenants_are_released_and_that_in_use_stays() -> None:
    with BlendEngine(tiny.model(num_hidden_layers=2), tiny.tokenizer(), config=BlendConfig(min_tokens=0)) as engine:
        served, made = ServedModel("tiny", engine, Limits(), starter=False), []
        first = served.engine_for("salt", None, None)
        for tenant in range(300):
            made.append(weakref.ref(served.engine_for(f"salt-{tenant}", None, None)))
            assert served.engine_for("salt", None, None) is first
        gc.collect()
        assert 0 < sum(one() is not None for one in made) <= served_model._ENGINES
        assert made[-1]() is not None, "the latest stays"
