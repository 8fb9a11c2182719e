"""The trial of a learned context: it begins as the package's own context, and training brings answers nearer."""

from __future__ import annotations

import torch

from cacheblend_rag.models.contexts import ContextKV
from docs.benchmarks.scripts.learned_context import LearnedContext, held_out, lesson_of, train
from docs.benchmarks.scripts.yardstick import Yardstick, in_prompt
from tests import tiny
from tests.calibration.test_yardstick import cases
from tests.probes import engine_of
from tests.tolerance import assert_close


def test_an_untrained_one_is_the_context_itself() -> None:
    with engine_of(tiny.model(num_hidden_layers=3)) as engine:
        ids = engine.tokenizer.encode(tiny.text(40, 7), add_special_tokens=False)
        before, chunk = (5, 6), tuple(engine.tokenizer.encode(tiny.text(20, 8), add_special_tokens=False))
        ours = LearnedContext(engine.adapter, ids).compute("", before, chunk, 0)
        (theirs,) = ContextKV(engine.adapter, [ids]).segments_kv([before + chunk], 0, [len(before)])
        for part in ("keys", "values"):
            for found, wanted in zip(getattr(ours, part), getattr(theirs, part), strict=True):
                assert_close(found, wanted, terms=len(ids) + len(chunk))


def test_training_brings_full_reuse_nearer_and_leaves_the_model_as_it_is() -> None:
    with engine_of(tiny.model(num_hidden_layers=3)) as engine:
        yardstick = Yardstick(engine, cases(), [], chunks=3)
        prompts = [yardstick.prompt(in_prompt(case, 3)) for case in cases()]
        ids = engine.tokenizer.encode(tiny.text(30, 9), add_special_tokens=False)
        context, weights = LearnedContext(engine.adapter, ids), engine.model.lm_head.weight.clone()
        answers = [(prompt, yardstick.full_answer(prompt)) for prompt in prompts]
        before = held_out(yardstick, context, answers, ["learned/none", "learned/boundary@1.0"])
        lessons = [lesson_of(yardstick, prompt) for prompt in prompts]
        losses = train(context, lessons, engine.model, 24, 0.02)
        after = held_out(yardstick, context, answers, ["learned/none", "learned/boundary@1.0"])
        assert torch.equal(engine.model.lm_head.weight, weights)
    assert sum(losses[-4:]) < sum(losses[:4])
    assert after["learned/none"] < before["learned/none"]
    assert before["learned/boundary@1.0"] < 1e-3 > after["learned/boundary@1.0"], "recomputing all is full prefill"
