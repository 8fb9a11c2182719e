"""Debian's Firefox for playwright, which drives a stock Firefox by WebDriver BiDi.

Playwright sets colour scheme and the like of each visitor. Firefox ESR 153 does not know that command, and playwright
gives up. So playwright starts this file in the place of Firefox. It starts Firefox, and passes every message on both
ways. Only where Firefox does not know a command of emulation, playwright is told that it was done.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from asyncio.subprocess import PIPE
from contextlib import suppress
from pathlib import Path

from websockets.asyncio.client import connect
from websockets.asyncio.connection import Connection
from websockets.asyncio.server import ServerConnection, serve

FIREFOX = Path("/usr/bin/firefox-esr")
LISTENS = "WebDriver BiDi listening on "  # what Firefox prints, and playwright waits for


def executable(folder: Path) -> Path:
    """A file in a folder for playwright to start."""
    made = folder / "firefox"
    made.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n', encoding="utf-8")
    made.chmod(0o755)
    return made


def told(message: str | bytes) -> str | bytes:
    """A message of Firefox as playwright is given it."""
    answer = json.loads(message)
    if answer.get("error") == "unknown command" and answer["message"].startswith("emulation."):
        return json.dumps({"type": "success", "id": answer["id"], "result": {}})
    return message


async def _serve(arguments: list[str]) -> None:
    firefox = await asyncio.create_subprocess_exec(str(FIREFOX), *arguments, stderr=PIPE)
    assert firefox.stderr is not None
    address = None
    while address is None:
        line = (await firefox.stderr.readline()).decode()
        if not line:
            sys.exit(f"{FIREFOX} ended before it could be driven")
        address = re.search(rf"{LISTENS}(ws://\S+)", line)

    async def relay(playwright: ServerConnection) -> None:
        assert playwright.request is not None
        async with connect(address[1] + playwright.request.path, max_size=None) as browser:
            await asyncio.gather(_pass_on(playwright, browser), _pass_on(browser, playwright))

    async with serve(relay, "127.0.0.1", 0, max_size=None) as server:
        port = server.sockets[0].getsockname()[1]
        print(f"{LISTENS}ws://127.0.0.1:{port}", file=sys.stderr, flush=True)
        while await firefox.stderr.readline():
            pass  # its log; unread, it would stop Firefox
        await firefox.wait()


async def _pass_on(origin: Connection, target: Connection) -> None:
    async for message in origin:
        await target.send(told(message))
    await target.close()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(sys.argv[1:]))
