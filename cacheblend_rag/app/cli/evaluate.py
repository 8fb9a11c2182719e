"""``cacheblend-rag eval``: whether answers stay as good, on one's own model, documents and questions."""

from __future__ import annotations

import argparse

from cacheblend_rag.app.cli.arguments import add_arguments, data_folder, rag_options
from cacheblend_rag.app.cli.calibrate import add_prompt_arguments, read_prompts


def add_eval(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "eval", help="hold answers against full prefill's, and against known ones", description=__doc__
    )
    add_arguments(parser, "model", "docs", "data-dir", "size-limit", "device", "dtype", "ratio")
    add_prompt_arguments(parser, chunks=6)
    parser.add_argument("--prompts", type=int, default=24, metavar="N", help="how many, drawn by chance (24)")
    parser.add_argument("--max-new-tokens", type=int, default=32, metavar="N", help="longest answer (32)")
    parser.set_defaults(run=_evaluate)


def _evaluate(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.calibration.prompts import frame_prompts
    from cacheblend_rag.calibration.quality import measure_quality, quality_table
    from cacheblend_rag.config import check_whole
    from cacheblend_rag.engine.engine import BlendEngine

    check_whole("prompts", parsed.prompts, 1)
    options = rag_options(parsed)
    prompts, corpus, golds = read_prompts(parsed, parsed.prompts)
    with BlendEngine.from_pretrained(
        str(options.model),
        config=options.config,
        store=data_folder(parsed) / "kv",
        device=options.device,
        dtype=options.dtype,
    ) as engine:
        rows = measure_quality(
            engine,
            frame_prompts(prompts, engine.tokenizer),
            golds,
            max_new_tokens=parsed.max_new_tokens,
            corpus=corpus,
        )
    print(quality_table(rows, len(prompts) - rows[0].prompts))
    return 0
