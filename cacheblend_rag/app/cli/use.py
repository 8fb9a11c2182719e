"""``cacheblend-rag keys use``: what each tenant of a running server has and uses, as a table."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import sys
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

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
    key = _checked(os.environ.get(KEY_VARIABLE, ""))
    status, answer = _asked(address, key)
    if status == 401 and not key and sys.stdin.isatty():
        status, answer = _asked(address, _checked(getpass.getpass("API key made with `keys add NAME --metrics`: ")))
    if status == 401 and key:
        raise ConfigError(KEY_VARIABLE, "(not shown)", f"{address} does not know this key, or it was revoked")
    try:
        text = _table(answer) if status == 200 else ""
        message = None if status == 200 else str(answer["error"]["message"])
    except (TypeError, KeyError, ValueError, IndexError):  # it is of another form
        text, message = "", "it is no server of this kind"
    if message is not None:
        raise CacheBlendError(f"{address} answers {status}: {_plain(message)}")
    print(text)
    return 0


def _checked(key: str) -> str:
    """A key without space around it; an error does not show it."""
    key = key.strip()
    if key and not (key.isascii() and key.isprintable()):
        raise ConfigError(KEY_VARIABLE, "(not shown)", "a key has letters, digits, _ and - alone: copy it again")
    return key


def _plain(text: str) -> str:
    """Text of a server without characters that steer a terminal."""
    return "".join(one if one.isprintable() else "?" for one in text)


class _NoRedirect(HTTPRedirectHandler):
    """Follows no redirection: the key would go along to wherever that leads."""

    def redirect_request(self, *given: Any) -> None:
        """Give none."""


def _asked(address: str, key: str) -> tuple[int, Any]:
    """Status and JSON of what a server answers."""
    request = Request(f"{address}/api/tenants", headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        try:
            with build_opener(_NoRedirect).open(request, timeout=_SECONDS) as response:
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


def _table(tenants: Any) -> str:
    if not isinstance(tenants, list):
        raise TypeError(type(tenants).__name__)
    rows = [_HEAD, *(_row(one) for one in tenants)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEAD))]
    lines = list[str]()
    for number, row in enumerate(rows):
        lines.append("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
        for key in tenants[number - 1]["keys"] if number else ():
            made = f"made {key['created']}" if key["created"] else "in the environment"
            used = f"last used {key['last_used']}" if key["last_used"] else "not used since the start"
            lines.append(f"  key {key['name']:<20}  {made:<25}  {used}")
    return "\n".join(map(_plain, lines))


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
