"""``cacheblend-rag profile``: measure prefill and storage on this machine, for the loading controller."""

from __future__ import annotations

import argparse

from cacheblend_rag.app.cli.arguments import add_arguments, data_folder


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

    if min(parsed.lengths) < 1:
        raise ConfigError("lengths", parsed.lengths, "use numbers of tokens, 1 or more")
    size = parse_bytes(parsed.file_size, "file_size")
    model = parsed.model or DEFAULT_MODEL
    store = [str(data_folder(parsed) / "kv"), *filter(None, [parsed.shared_store])]
    with BlendEngine.from_pretrained(model, store=store, device=parsed.device, dtype=parsed.dtype) as engine:
        found, path = profile_machine(engine, lengths=parsed.lengths, size=size)
        prefill = found.prefill[engine.fingerprint]
    for tokens in parsed.lengths:
        print(f"prefill of {tokens:>6} tokens  {prefill.seconds(tokens):>9.3f} s")
    for name, device in found.devices.items():
        print(f"{name:<8} {device.throughput / 1e6:>10,.0f} MB/s {device.latency * 1e6:>10,.1f} µs a read")
    print(f"kept in {path}")
    return 0
