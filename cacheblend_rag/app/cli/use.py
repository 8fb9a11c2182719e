"""``cacheblend-rag keys use``: what each tenant of a running server has and uses, as a table."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import sys
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from rich.filesize import decimal

from cacheblend_rag.config import ENV_PREFIX
from cacheblend_rag.errors import CacheBlendError, ConfigError

KEY_VARIABLE = ENV_PREFIX + "METRICS_KEY"
_SECONDS = 60.0
_HEAD = (
    "TENANT",
    "DOCUMENTS",
    "DISK",
    "CONVERSATIONS",
    "REQUESTS",
    "PROMPT TOKENS",
    "ANSWER TOKENS",
    "LEFT OF THE MINUTE",
    "WAITING",
    "LAST ASKED",
)


def add_use(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    use = kinds.add_parser(
        "use", help="what each tenant of a running server has and uses, for a key made with --metrics"
    )
    default = "http://127.0.0.1:8000"
    use.add_argument("--url", default=default, metavar="ADDRESS", help=f"where the server listens (default: {default})")
    use.epilog = f"The key is read from {KEY_VARIABLE}, or asked for."
    use.set_defaults(run=_use)


def _use(parsed: argparse.Namespace) -> int:
    address = str(parsed.url).rstrip("/")
    if not address.startswith(("http://", "https://")):
        raise ConfigError("url", parsed.url, "use http:// or https:// and where the server listens")
    key = os.environ.get(KEY_VARIABLE, "")
    status, answer = _asked(address, key)
    if status == 401 and not key and sys.stdin.isatty():
        status, answer = _asked(address, getpass.getpass("API key made with `keys add NAME --metrics`: "))
    if status != 200:
        message = answer.get("error", {}).get("message") if isinstance(answer, dict) else None
        raise CacheBlendError(f"{address} answers {status}: {message or 'it is no server of this kind'}")
    _show(answer)
    return 0


def _asked(address: str, key: str) -> tuple[int, Any]:
    """Status and JSON of what a server answers."""
    request = Request(f"{address}/api/tenants", headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        try:
            with urlopen(request, timeout=_SECONDS) as response:
                status, text = response.status, response.read()
        except HTTPError as refused:
            with refused:
                status, text = refused.code, refused.read()
    except (OSError, HTTPException, ValueError) as error:
        remedy = "start it, or say by --url where it listens"
        raise CacheBlendError(f"no server answers at {address} ({error}): {remedy}") from error
    try:
        return status, json.loads(text)
    except ValueError:
        return status, None


def _show(tenants: Sequence[dict[str, Any]]) -> None:
    rows = [_HEAD, *(_row(one) for one in tenants)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEAD))]
    for number, row in enumerate(rows):
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
        for key in tenants[number - 1]["keys"] if number else ():
            made = f"made {key['created']}" if key["created"] else "in the environment"
            used = f"last used {key['last_used']}" if key["last_used"] else "not used since the start"
            print(f"  key {key['name']:<20}  {made:<25}  {used}")


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    left = f"{one['tokens_left']:,} of {one['tokens_per_minute']:,}" if one["tokens_per_minute"] else "no limit"
    return (
        one["tenant"],
        _shown(one["documents"]),
        "?" if one["bytes"] is None else f"{decimal(one['bytes'])} of {decimal(one['limit_bytes'])}",
        *(_shown(one[name]) for name in ("conversations", "requests", "prompt_tokens", "answer_tokens")),
        left,
        _shown(one["waiting"]),
        one["last_asked"] or "-",
    )


def _shown(count: int | None) -> str:
    return "?" if count is None else f"{count:,}"
