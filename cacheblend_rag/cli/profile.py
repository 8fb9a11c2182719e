"""``cacheblend-rag profile``: measure this machine for the loading controller."""

from __future__ import annotations

import argparse

__all__ = ["add_profile"]


def add_profile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    profile = commands.add_parser("profile", help="measure prefill and storage, so that the ratio can be chosen")
    profile.add_argument("--model", metavar="PATH_OR_ID", help="a transformers model; the bundled one by default")
    profile.add_argument("--data-dir", metavar="FOLDER", help="where index and KV are kept (default: user's cache)")
    profile.add_argument("--device", default="auto", help='"auto", "cpu", "cuda", …')
    profile.add_argument("--dtype", default="auto", help='"auto", "float32", "bfloat16" or "float16"')
    profile.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048], metavar="TOKENS")
    profile.add_argument(
        "--file-size", default="256MB", metavar="SIZE", help="of the file that is read (default 256 MB)"
    )
    profile.set_defaults(run=_profile)


def _profile(parsed: argparse.Namespace) -> int:
    from pathlib import Path

    from cacheblend_rag.config import default_data_path, parse_bytes
    from cacheblend_rag.engine import BlendEngine
    from cacheblend_rag.errors import ConfigError
    from cacheblend_rag.evaluation.profiling import profile_machine
    from cacheblend_rag.reference import MODEL_PATH

    if min(parsed.lengths) < 1:
        raise ConfigError("lengths", parsed.lengths, "use numbers of tokens, 1 or more")
    folder = Path(parsed.data_dir) if parsed.data_dir else default_data_path()
    size = parse_bytes(parsed.file_size, "file_size")
    model = parsed.model or MODEL_PATH
    with BlendEngine.from_pretrained(model, store=folder / "kv", device=parsed.device, dtype=parsed.dtype) as engine:
        found, path = profile_machine(engine, lengths=parsed.lengths, size=size)
        prefill = found.prefill[engine.fingerprint]
    for tokens in parsed.lengths:
        print(f"prefill of {tokens:>6} tokens  {prefill.seconds(tokens):>9.3f} s")
    for name, device in found.devices.items():
        print(f"{name:<8} {device.throughput / 1e6:>10,.0f} MB/s {device.latency * 1e6:>10,.1f} µs a read")
    print(f"kept in {path}")
    return 0
