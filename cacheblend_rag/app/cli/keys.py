"""``cacheblend-rag keys``: make, list and revoke API keys of the server, and see what is used with them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cacheblend_rag.app.cli.configuration import SECTIONS, given_options
from cacheblend_rag.app.cli.use import add_use
from cacheblend_rag.config import default_data_path
from cacheblend_rag.errors import ConfigError

if TYPE_CHECKING:
    from cacheblend_rag.app.server.keys_file import KeyEntry


def add_keys(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its own commands."""
    keys = commands.add_parser("keys", help="make, list and revoke API keys of the server, and see their use")
    kinds = keys.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add = kinds.add_parser("add", help="make a key and show it, once")
    add.add_argument("name", metavar="NAME", help="of the key, such as who uses it")
    whose = add.add_mutually_exclusive_group()
    whose.add_argument(
        "--tenant", metavar="T", help="whose documents and conversations it opens (default: the key's name)"
    )
    whose.add_argument("--metrics", action="store_true", help="it reads counts of all tenants, and nothing else")
    listing = kinds.add_parser("list", help="names, tenants and when they were made; keys themselves are not kept")
    add_use(kinds)
    revoke = kinds.add_parser("revoke", help="let a key open nothing any more")
    revoke.add_argument("name", metavar="NAME", help="of the key")
    kept = "with the last key of a tenant its conversations are erased; keep them"
    revoke.add_argument("--keep-conversations", action="store_true", dest="keep", help=kept)
    for parser, run in ((add, _add), (listing, _list), (revoke, _revoke)):
        parser.add_argument("--config", metavar="FILE", help="the server's file of options, if it has one")
        for option in (*SECTIONS["server"], *SECTIONS["rag"]):
            if option.name in ("keys_file", "data_dir") or (parser is revoke and option.name == "database"):
                parser.add_argument(f"--{option.flag}", metavar=option.metavar, help=option.help_line)
        parser.set_defaults(run=run)


def _path(parsed: argparse.Namespace) -> Path:
    """The file that a server with the same options reads."""
    from cacheblend_rag.app.server.keys_file import KEYS_FILE

    given = given_options(parsed)
    if "keys_file" in given:
        return Path(given["keys_file"].value)
    return (Path(given["data_dir"].value) if "data_dir" in given else default_data_path()) / KEYS_FILE


def _add(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.app.server.keys_file import change_keys, new_key

    path = _path(parsed)
    entry, key = new_key(parsed.name, None if parsed.metrics else parsed.tenant or parsed.name)

    def added(keys: Sequence[KeyEntry]) -> Sequence[KeyEntry]:
        if any(one.name == entry.name for one in keys):
            raise ConfigError("name", entry.name, "there is a key of this name: use another, or revoke that one first")
        return [*keys, entry]

    first = not path.exists()
    change_keys(path, added)
    whose = "reads /metrics" if entry.tenant is None else f"is of the tenant {entry.tenant}"
    print(f"The key {entry.name} {whose}; it is shown this once. {path} holds its hash.", file=sys.stderr)
    if first:
        print("This is the first key of this file. Restart a server that runs without keys.", file=sys.stderr)
    print(key)
    return 0


def _list(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.app.server.keys_file import read_keys

    for one in read_keys(_path(parsed)):
        print(f"{one.name:<20} {one.tenant or '(metrics)':<20} {one.created}")
    return 0


def _revoke(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.app.server.keys_file import change_keys, read_keys

    path = _path(parsed)
    read_keys(path)  # a file that is not there is named

    def left(keys: Sequence[KeyEntry]) -> Sequence[KeyEntry]:
        if all(one.name != parsed.name for one in keys):
            known = ", ".join(one.name for one in keys) or "none"
            raise ConfigError("name", parsed.name, f"there is no such key; there are: {known}")
        return [one for one in keys if one.name != parsed.name]

    revoked = next((one for one in read_keys(path) if one.name == parsed.name), None)
    change_keys(path, left)
    print(f"The key {parsed.name} is revoked. A running server refuses it from its next look on, in a second.")
    if revoked is not None and revoked.tenant is not None and not parsed.keep:
        _erase(parsed, revoked.tenant, read_keys(path))
    return 0


def _erase(parsed: argparse.Namespace, tenant: str, keys: Sequence[KeyEntry]) -> None:
    """Erase the conversations of a tenant that has no key any more."""
    from cacheblend_rag.app.server.settings import keys_from_environment

    if tenant in keys_from_environment() or any(one.tenant == tenant for one in keys):
        return
    from cacheblend_rag.app.server.keys_file import wait_for_servers
    from cacheblend_rag.app.server.storage.departed import erase_conversations

    wait_for_servers()  # what one writes down until then is erased, too
    given = given_options(parsed)
    data = Path(given["data_dir"].value) if "data_dir" in given else default_data_path()
    done = erase_conversations(data, tenant, given["database"].value if "database" in given else None)
    print(f"It was the last key of {tenant}: {done} conversations are erased, and saved prompts. Documents stay.")
