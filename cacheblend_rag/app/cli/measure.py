"""``cacheblend-rag profile``, ``calibrate`` and ``eval``: what this machine and a model are measured for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.app.cli.arguments import add_arguments, data_folder, rag_options
from cacheblend_rag.app.startup import leave_out_triton
from cacheblend_rag.models.loading_bars import bars_hidden

if TYPE_CHECKING:
    from cacheblend_rag.prompt import Prompt

_EVAL = "Whether answers stay as good, on one's own model, documents and questions."


def add_profile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    profile = commands.add_parser("profile", help="measure prefill and storage, so that the ratio can be chosen")
    add_arguments(profile, "model", "data-dir", "shared-store", "device", "dtype")
    profile.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[256, 512, 1024, 2048],
        metavar="TOKENS",
        help="prompt lengths to time (default 256 512 1024 2048)",
    )
    profile.add_argument(
        "--file-size", default="256MB", metavar="SIZE", help="of what is read from each store (default 256 MB)"
    )
    profile.set_defaults(run=_profile)


def _profile(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.calibration.profiler import profile_machine
    from cacheblend_rag.config import DEFAULT_MODEL, parse_bytes
    from cacheblend_rag.engine.engine import BlendEngine
    from cacheblend_rag.errors import ConfigError

    leave_out_triton()
    if min(parsed.lengths) < 1:
        raise ConfigError("lengths", parsed.lengths, "use numbers of tokens, 1 or more")
    size = parse_bytes(parsed.file_size, "file_size")
    model = parsed.model or DEFAULT_MODEL
    store = [str(data_folder(parsed) / "kv"), *filter(None, [parsed.shared_store])]
    with BlendEngine.from_pretrained(model, store=store, device=parsed.device, dtype=parsed.dtype) as engine:
        found, path = profile_machine(engine.store, engine.turns.segments.model, lengths=parsed.lengths, size=size)
        prefill = found.prefill[engine.fingerprint]
    for tokens in parsed.lengths:
        print(f"prefill of {tokens:>6} tokens  {prefill.seconds(tokens):>9.3f} s")
    for name, device in found.devices.items():
        print(f"{name:<8} {device.throughput / 1e6:>10,.0f} MB/s {device.latency * 1e6:>10,.1f} µs a read")
    print(f"kept in {path}")
    return 0


def add_calibrate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("calibrate", help="find how little recompute your model tolerates on your documents")
    add_arguments(parser, "model", "docs", "data-dir", "device", "dtype")
    _add_prompt_arguments(parser)
    parser.add_argument("--tolerance", type=float, default=0.02, metavar="NATS", help="mean divergence a token (0.02)")
    parser.add_argument("--prompts", type=int, default=72, metavar="N", help="two thirds only check the result (72)")
    parser.add_argument("--answer-tokens", type=int, default=32, metavar="N", help="tokens of each answer compared")
    parser.set_defaults(run=_calibrate)


def _add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments for the prompts of `calibrate` and `eval`."""
    parser.add_argument("--questions", metavar="FILE", help="your questions, one a line; by default made from names")
    parser.add_argument("--data", metavar="FILE", help="questions with passages, as JSON lines, instead of --docs")
    parser.add_argument("--chunks", type=int, default=6, metavar="N", help="chunks in a prompt (6)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn by chance (default 0)")


def _calibrate(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.calibration.calibrate import Calibration, report
    from cacheblend_rag.calibration.profiler import keep_profile
    from cacheblend_rag.calibration.prompts import frame_prompts
    from cacheblend_rag.config import DEFAULT_MODEL, BlendConfig, check_whole
    from cacheblend_rag.engine.engine import BlendEngine
    from cacheblend_rag.loading import MachineProfile

    leave_out_triton()
    calibration = Calibration(tolerance=parsed.tolerance, answer_tokens=parsed.answer_tokens)
    check_whole("prompts", parsed.prompts, 6)
    prompts, corpus, _ = _read_prompts(parsed, parsed.prompts)
    where = {"store": data_folder(parsed) / "kv", "device": parsed.device, "dtype": parsed.dtype}
    model, config = parsed.model or DEFAULT_MODEL, BlendConfig(recompute_ratio=0.15)
    with bars_hidden(), BlendEngine.from_pretrained(model, config=config, **where) as engine:
        prompts = frame_prompts(prompts, engine.tokenizer)
        settings, found = calibration.run(engine, prompts, corpus=corpus)
        _, path = keep_profile(engine.store, MachineProfile(blends={engine.fingerprint: settings}))
    print(report(settings, found))
    print(f"kept in {path}")
    return 0


def _read_prompts(parsed: argparse.Namespace, count: int) -> tuple[list[Prompt], list[str], list[tuple[str, ...]]]:
    """So many prompts of the arguments of `_add_prompt_arguments`, all chunks in the order of their documents, and the
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


def add_eval(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    what = "compare answers with full prefill's, and with known answers"
    parser = commands.add_parser("eval", help=what, description=_EVAL)
    add_arguments(parser, "model", "docs", "data-dir", "size-limit", "device", "dtype", "ratio")
    _add_prompt_arguments(parser)
    parser.add_argument("--prompts", type=int, default=24, metavar="N", help="how many, drawn by chance (24)")
    parser.add_argument("--max-new-tokens", type=int, default=32, metavar="N", help="longest answer (32)")
    parser.set_defaults(run=_evaluate)


def _evaluate(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.calibration.prompts import frame_prompts
    from cacheblend_rag.calibration.quality import measure_quality, quality_table
    from cacheblend_rag.config import check_whole
    from cacheblend_rag.engine.engine import BlendEngine

    leave_out_triton()
    check_whole("prompts", parsed.prompts, 1)
    options = rag_options(parsed)
    prompts, corpus, golds = _read_prompts(parsed, parsed.prompts)
    where: dict[str, Any] = {"store": data_folder(parsed) / "kv", "device": options.device, "dtype": options.dtype}
    with BlendEngine.from_pretrained(str(options.model), config=options.config, **where) as engine:
        framed, most = frame_prompts(prompts, engine.tokenizer), parsed.max_new_tokens
        rows = measure_quality(engine, framed, golds, max_new_tokens=most, corpus=corpus)
    print(quality_table(rows, len(prompts) - rows[0].prompts))
    return 0
