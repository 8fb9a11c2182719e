"""``cacheblend-rag adapt``: learn what your model's chunks are best computed behind, without labels."""

from __future__ import annotations

import argparse

from cacheblend_rag.app.cli.arguments import add_arguments, data_folder
from cacheblend_rag.app.cli.calibrate import add_prompt_arguments, prompts_of


def add_adapt(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "adapt", help="learn what chunks are best computed behind, on your documents", description=__doc__
    )
    add_arguments(parser, "model", "docs", "data-dir", "device", "dtype")
    add_prompt_arguments(parser, chunks=3)
    parser.add_argument("--steps", type=int, default=150, metavar="N", help="of training, one prompt each (150)")
    parser.set_defaults(run=_adapt)


def _adapt(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.calibration.adapt import AdaptOptions, adapt, adapt_report
    from cacheblend_rag.calibration.prompts import framed
    from cacheblend_rag.config import DEFAULT_MODEL, BlendConfig
    from cacheblend_rag.engine.engine import BlendEngine
    from cacheblend_rag.store.learned import keep_context

    options = AdaptOptions(steps=parsed.steps)
    prompts, corpus = prompts_of(parsed, options.steps + options.held_back)
    with BlendEngine.from_pretrained(
        parsed.model or DEFAULT_MODEL,
        config=BlendConfig(condition="context"),
        store=data_folder(parsed) / "kv",
        device=parsed.device,
        dtype=parsed.dtype,
    ) as engine:
        adapted = adapt(engine, framed(prompts, engine.tokenizer), options, corpus=corpus)
        print(adapt_report(adapted))
        if not adapted.nearer:
            print("nothing was kept: chunks behind their neighbours are as near; more --steps may help")
            return 0
        path = keep_context(engine.store, engine.fingerprint, adapted.context)
    print(f"kept in {path}: chunks are computed behind it from now on, and are stored anew")
    print("run `cacheblend-rag calibrate` again to let it choose the recompute ratio")
    return 0
