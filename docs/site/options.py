"""The tables of options in the documentation, from the fields that declare them and the parser of the command line.

``python -m docs.site.options`` writes both pages. A test fails while they say something else.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cacheblend_rag.app.cli import _parser
from cacheblend_rag.app.cli.configuration import SECTIONS
from cacheblend_rag.config import BlendConfig, Option, options_of
from cacheblend_rag.engine.decode import DecodeOptions

PAGE = Path(__file__).parents[1] / "reference" / "options.md"
COMMANDS = PAGE.with_name("command-line.md")
_HEAD = "| option | default | values | meaning, and when to change it |\n|---|---|---|---|\n"
_LINK = re.compile(r"docs/([\w/-]+)\.md(?:#([\w-]+))?")


def row_of(option: Option) -> str:
    """The row of an option."""
    value = option.shown or _shown(option.default)
    cells = (f"`{option.name}`", value, option.kind.words, linked(option.about))
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


def _arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    left_out = (argparse._HelpAction, argparse._SubParsersAction)
    return [one for one in parser._actions if not isinstance(one, left_out)]


def _shared(parsers: Iterable[argparse.ArgumentParser]) -> dict[str, str]:
    """Options that three commands or more take with one text, by their flags."""
    rows = Counter((_cell(one), one.help or "") for parser in parsers for one in _arguments(parser))
    return dict(row for row, count in rows.items() if count > 2 and row[0].startswith("`--"))


def commands_page(text: str) -> str:
    """The page of commands; the tables as they are now stand after a mark in each command's section."""
    parsers = {name: parser for name, parser in _commands(_parser()) if name}
    shared = _shared(parsers.values())
    parts = re.split(r"^(##+ .+\n)", text, flags=re.MULTILINE)
    for at in range(1, len(parts), 2):
        name, (before, mark, _) = parts[at].lstrip("# ").strip(), parts[at + 1].partition("<!-- options -->\n")
        actions = _arguments(parsers[name]) if name in parsers else []
        rows = {_cell(one): one.help or "" for one in actions if shared.get(_cell(one)) != one.help}
        if name == "Options of several commands":
            rows = shared
        also = [f"`{one.option_strings[0]}`" for one in actions if _cell(one) not in rows]
        if mark:
            parts[at + 1] = f"{before}{mark}\n{_table(rows)}" + (f"Also: {', '.join(also)}.\n\n" if also else "")
    return "".join(parts).rstrip("\n") + "\n"


def _table(rows: Mapping[str, str]) -> str:
    if not rows:
        return ""
    lines = (f"| {cell} | {text.replace('|', chr(92) + '|').replace('%%', '%')} |\n" for cell, text in rows.items())
    return "| option | meaning |\n|---|---|\n" + "".join(lines) + "\n"


if __name__ == "__main__":
    for path, page in ((PAGE, options_page), (COMMANDS, commands_page)):
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
