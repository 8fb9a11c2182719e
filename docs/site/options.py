"""The tables of options in the documentation, from the fields that declare them and the parser of the command line.

``python -m docs.site.options`` writes both pages. A test fails while they say something else.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cacheblend_rag.app.cli import _parser
from cacheblend_rag.app.cli.configuration import SECTIONS
from cacheblend_rag.config import BlendConfig, Option, options_of
from cacheblend_rag.engine.decode import DecodeOptions

PAGE = Path(__file__).parents[1] / "reference" / "options.md"
COMMANDS = PAGE.with_name("command-line.md")
_HEAD = "| option | environment variable | default | values | meaning, and when to change it |\n|---|---|---|---|---|\n"
_LINK = re.compile(r"docs/([\w/-]+)\.md(?:#([\w-]+))?")


def row_of(option: Option) -> str:
    """The row of an option."""
    value = option.shown or _shown(option.default)
    cells = (f"`{option.name}`", f"`{option.variable}`", value, option.kind.words, linked(option.about))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value in (None, (), {}) else f"`{json.dumps(value)}`"


def linked(text: str) -> str:
    """A text with links, seen from the page, in place of paths of pages."""

    def link(found: re.Match[str]) -> str:
        page, part = found[1], found[2]
        target = "" if page == "reference/options" else f"../{page}.md".replace("../reference/", "")
        return f"[{(part or page.rsplit('/', 1)[-1]).replace('-', ' ')}]({target}{f'#{part}' if part else ''})"

    return _LINK.sub(link, text)


def tables() -> Iterator[tuple[str, str]]:
    """The tables of the page by the marks that they stand behind."""
    for section, options in {**SECTIONS, "engine": options_of(BlendConfig)}.items():
        yield section, _HEAD + "".join(f"{row_of(one)}\n" for one in options)
    rows = (f"| `{name}` | {field.description} |\n" for name, field in DecodeOptions.model_fields.items())
    yield "decoding", "| option | meaning |\n|---|---|\n" + "".join(one.replace("\n", " ")[:-1] + "\n" for one in rows)


def options_page(text: str) -> str:
    """The page of options with its tables as they are now."""
    for name, table in tables():
        text, count = re.subn(
            rf"(<!-- options: {name} -->\n\n).*?\n(?=\n)",
            lambda found, table=table: found[1] + table,
            text,
            flags=re.DOTALL,
        )
        if count != 1:
            raise ValueError(f"{PAGE} has {count} marks of {name!r}")
    return text


def _commands(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part, below in action.choices.items():
                yield from _commands(below, f"{name} {part}".strip())


def _cell(action: argparse.Action) -> str:
    flag = action.option_strings[0] if action.option_strings else ""
    value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
    return f"`{f'{flag} {value}'.strip()}{' …' if action.nargs in ('+', '*') else ''}`".replace("|", "\\|")


def commands_page(text: str) -> str:
    """The page of commands with the rows of options as they are now; those of other arguments stay."""
    parts = re.split(r"^(##+ .+\n)", text, flags=re.MULTILINE)
    parsers, of_options = (
        dict(_commands(_parser())),
        {one.help_line for options in SECTIONS.values() for one in options},
    )
    for at in range(1, len(parts), 2):
        for action in parsers[parts[at].lstrip("# ").strip()]._actions:
            if action.help in of_options:
                row = f"| {_cell(action)} | {action.help} |\n"
                known = re.compile(rf"^\| {re.escape(_cell(action))} \|.*\n", re.MULTILINE)
                if known.search(parts[at + 1]):
                    parts[at + 1] = known.sub(lambda _, row=row: row, parts[at + 1])
                else:
                    parts[at + 1] = parts[at + 1].rstrip("\n") + f"\n{row}\n"
    return "".join(parts)


if __name__ == "__main__":
    for path, page in ((PAGE, options_page), (COMMANDS, commands_page)):
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
