"""``cacheblend-rag keys add``: make an API key of the server. The file of keys is edited to take one out."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cacheblend_rag.app.cli.configuration import SECTIONS, given_options
from cacheblend_rag.config import default_data_path


def add_keys(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its own command."""
    keys = commands.add_parser("keys", help="make an API key of the server")
    kinds = keys.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add = kinds.add_parser("add", help="make a key and show it, once; delete its entry in the file to revoke it")
    add.add_argument("name", metavar="NAME", help="of the key, such as who uses it")
    whose = add.add_mutually_exclusive_group()
    whose.add_argument("--tenant", metavar="T", help="whose documents it opens (default: the key's name)")
    whose.add_argument("--metrics", action="store_true", help="it reads counts of all tenants, and nothing else")
    add.add_argument("--config", metavar="FILE", help="the server's file of options, if it has one")
    for option in (*SECTIONS["server"], *SECTIONS["rag"]):
        if option.name in ("keys_file", "data_dir"):
            add.add_argument(f"--{option.flag}", metavar=option.metavar, help=option.help_line)
    add.set_defaults(run=_add)


def _add(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.app.server.keys_file import KEYS_FILE, add_key, new_key

    given = given_options(parsed)
    data = Path(given["data_dir"].value) if "data_dir" in given else default_data_path()
    path = Path(given["keys_file"].value) if "keys_file" in given else data / KEYS_FILE
    entry, key = new_key(parsed.name, None if parsed.metrics else parsed.tenant or parsed.name)
    first = not path.exists()
    add_key(path, entry)
    whose = "reads /metrics" if entry.tenant is None else f"is of the tenant {entry.tenant}"
    print(f"The key {entry.name} {whose}; it is shown this once. {path} holds its hash.", file=sys.stderr)
    if first:
        print("This is the first key of this file. Restart a server that runs without keys.", file=sys.stderr)
    print(key)
    return 0
