"""``cacheblend-rag calibrate``: the least recompute that a model tolerates, without labels."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.app.cli.arguments import add_arguments, data_folder
from cacheblend_rag.models.loading_bars import bars_hidden

if TYPE_CHECKING:
    from cacheblend_rag.engine.engine import BlendEngine
    from cacheblend_rag.prompt import Prompt


def add_calibrate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("calibrate", help="find how little recompute your model tolerates on your documents")
    add_arguments(parser, "model", "docs", "data-dir", "device", "dtype")
    add_prompt_arguments(parser, chunks=6)
    parser.add_argument("--tolerance", type=float, default=0.02, metavar="NATS", help="mean divergence a token (0.02)")
    parser.add_argument("--prompts", type=int, default=72, metavar="N", help="two thirds only check the result (72)")
    parser.add_argument("--answer-tokens", type=int, default=32, metavar="N", help="tokens of each answer compared")
    parser.set_defaults(run=_calibrate)


def add_prompt_arguments(parser: argparse.ArgumentParser, chunks: int) -> None:
    """Arguments for the prompts, with so many chunks in each by default."""
    parser.add_argument(
        "--questions", metavar="FILE", help="your own questions, one a line; by default made from names"
    )
    parser.add_argument("--data", metavar="FILE", help="questions with passages, as JSON lines, instead of --docs")
    parser.add_argument("--chunks", type=int, default=chunks, metavar="N", help=f"chunks in a prompt ({chunks})")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn by chance (default 0)")


def _calibrate(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.calibration.calibrate import CalibrationOptions, calibrate, keep_settings, report
    from cacheblend_rag.calibration.prompts import frame_prompts
    from cacheblend_rag.config import check_whole

    options = CalibrationOptions(tolerance=parsed.tolerance, answer_tokens=parsed.answer_tokens)
    check_whole("prompts", parsed.prompts, 6)
    prompts, corpus, _ = read_prompts(parsed, parsed.prompts)
    with _opened(parsed, recompute_ratio=0.15) as engine:
        prompts = frame_prompts(prompts, engine.tokenizer)
        settings, found = calibrate(engine, prompts, options, corpus=corpus)
        path = keep_settings(engine, settings)
    print(report(settings, found))
    print(f"kept in {path}")
    return 0


@contextmanager
def _opened(parsed: argparse.Namespace, **options: Any) -> Iterator[BlendEngine]:
    """The engine that the arguments name, with options of `BlendConfig`."""
    from cacheblend_rag.config import DEFAULT_MODEL, BlendConfig
    from cacheblend_rag.engine.engine import BlendEngine

    where = {"store": data_folder(parsed) / "kv", "device": parsed.device, "dtype": parsed.dtype}
    config = BlendConfig(**options)
    with (
        bars_hidden(),
        BlendEngine.from_pretrained(parsed.model or DEFAULT_MODEL, config=config, **where) as engine,
    ):
        yield engine


def read_prompts(parsed: argparse.Namespace, count: int) -> tuple[list[Prompt], list[str], list[tuple[str, ...]]]:
    """So many prompts of the arguments of `add_prompt_arguments`, all chunks in the order of their documents, and the
    right answers where a file has them.
    """
    from cacheblend_rag.app.collection import ARTICLES_PATH
    from cacheblend_rag.calibration.prompts import chunk_prompts, file_prompts, question_prompts
    from cacheblend_rag.config import check_whole
    from cacheblend_rag.errors import ConfigError, DatasetError
    from cacheblend_rag.retrieval.documents import read_folder
    from cacheblend_rag.retrieval.splitting import split

    check_whole("chunks", parsed.chunks, 2)
    if parsed.data:
        if parsed.docs or parsed.questions:
            raise ConfigError("data", parsed.data, "use it without --docs and --questions")
        prompts, answers = file_prompts(parsed.data, count, parsed.chunks, parsed.seed)
        return prompts, [], answers
    chunks = split(read_folder(parsed.docs or ARTICLES_PATH))
    corpus = [chunk.page_content for chunk in chunks]
    if not parsed.questions:
        return chunk_prompts(chunks, count, parsed.chunks, parsed.seed), corpus, []
    try:
        lines = Path(parsed.questions).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{parsed.questions!r} cannot be read: {error}") from error
    return question_prompts(chunks, lines, parsed.chunks)[:count], corpus, []
