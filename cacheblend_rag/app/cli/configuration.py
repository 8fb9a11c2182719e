"""The configuration of ``serve``: its flags, above the environment, above a TOML file, above the defaults."""

from __future__ import annotations

import argparse
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from cacheblend_rag.app.options import FolderRAGOptions
from cacheblend_rag.app.server.settings import KEYS_VARIABLE, Limits, ServerSettings, keys_from_environment
from cacheblend_rag.config import ENV_PREFIX, BlendConfig, Option, options_of, removed_remedy
from cacheblend_rag.errors import ConfigError

SECTIONS: dict[str, tuple[Option, ...]] = {
    "rag": options_of(FolderRAGOptions),
    "server": options_of(ServerSettings),
    "limits": options_of(Limits),
    # The server says by `concurrent` how many answers are under way at once.
    "engine": tuple(option for option in options_of(BlendConfig) if option.name != "max_concurrent"),
}
"""Options by the section of the file that they stand in; every name is there once."""

# Variables that are no options: secrets, and what is read where it is needed.
_NOT_OPTIONS = ("ENCRYPTION_KEY", "ONEDNN", "VALKEY_PASSWORD", "VALKEY_USERNAME")
OTHER_VARIABLES = [KEYS_VARIABLE, *(ENV_PREFIX + name for name in _NOT_OPTIONS)]
_SECTION_OF = {option.name: section for section, options in SECTIONS.items() for option in options}
_SECRET = re.compile(r"keys?$|salt|secret|passw|credential", re.IGNORECASE)
_HIDDEN = "…"
# By the type of an option's value in the file: its types in Python, and in words.
_TYPES: dict[type, tuple[Any, str]] = {
    bool: (bool, "true or false, without quotes"),
    int: (int, "a whole number, without quotes"),
    float: ((int, float), "a number, without quotes"),
    str: (str, "a text, in quotes"),
    list: (list, "a list, such as [1]"),
    dict: (dict, "a table, such as {seed = 1}"),
    object: (object, ""),
}


@dataclass(frozen=True)
class GivenValue:
    """The value of an option that somebody gave.

    Parameters
    ----------
    value : object
    origin : str
        Its source, as an error names it: ``--port``, ``CACHEBLEND_RAG_PORT`` or ``serve.toml, [server] port``.
    """

    value: Any
    origin: str


def given_options(
    parsed: argparse.Namespace | None, file: Mapping[str, GivenValue] | None = None
) -> dict[str, GivenValue]:
    """Every option of `SECTIONS` that is given, by its name.

    Parameters
    ----------
    parsed : Namespace, optional
        Arguments of the command line.
    file : mapping of str to GivenValue, optional
        In place of the file that the arguments name.

    Raises
    ------
    ConfigError
        If a value cannot be read, or the file holds what is no option.
    """
    if file is None:
        config = getattr(parsed, "config", None)
        file = {} if config is None else _of_file(Path(config))
    found: dict[str, GivenValue] = {}
    for option in (option for options in SECTIONS.values() for option in options):
        flag = getattr(parsed, option.flag.replace("-", "_"), None) if option.flag else None
        text = os.environ.get(option.variable)
        if flag is not None:
            found[option.name] = GivenValue(option.read(flag, f"--{option.flag}"), f"--{option.flag}")
        elif text is not None:
            found[option.name] = GivenValue(option.read(text, option.variable), option.variable)
        elif option.name in file:
            found[option.name] = file[option.name]
    return found


def unused_variables() -> list[str]:
    """Warnings about variables that look like options but are unknown; without their values."""
    variables = [*OTHER_VARIABLES, *(option.variable for options in SECTIONS.values() for option in options)]
    known = {name.removeprefix(ENV_PREFIX) for name in variables}
    given = {name.removeprefix(ENV_PREFIX) for name in os.environ if name.startswith(ENV_PREFIX)}
    messages = []
    for name in sorted(given - known):
        hints = [f"; did you mean {ENV_PREFIX}{nearest}?" for nearest in get_close_matches(name, known, n=1)]
        messages.append(f"{ENV_PREFIX}{name} is not used{''.join(hints)}")
    return messages


def server_settings(given: Mapping[str, GivenValue]) -> ServerSettings:
    """The server's settings, all checked.

    Raises
    ------
    ConfigError
        If a value is not usable; it names where the value comes from.
    """

    def of(section: str) -> dict[str, Any]:
        return {option.name: given[option.name].value for option in SECTIONS[section] if option.name in given}

    with origins_named(given):
        rag = FolderRAGOptions(**of("rag"), config=BlendConfig(**of("engine")))
        return ServerSettings(rag=rag, limits=Limits(**of("limits")), **of("server"))


@contextmanager
def origins_named(given: Mapping[str, GivenValue]) -> Iterator[None]:
    """Let an error about an option say where its value comes from."""
    try:
        yield
    except ConfigError as error:
        value = _HIDDEN if _SECRET.search(error.field) else error.value
        rule = given.get("selection_options")
        if error.field in given:
            raise ConfigError(given[error.field].origin, value, error.remedy) from error
        if rule is not None and error.field in rule.value:
            raise ConfigError(f"{rule.origin}, {error.field}", value, error.remedy) from error
        raise


def shown_settings(settings: ServerSettings, given: Mapping[str, GivenValue]) -> str:
    """All settings as a file of options, with where each comes from. Secrets are not in it."""
    owners = {"rag": settings.rag, "server": settings, "limits": settings.limits, "engine": settings.rag.config}
    lines = []
    for section, options in SECTIONS.items():
        lines += ["", f"[{section}]"]
        for option in options:
            value, one = getattr(owners[section], option.name), given.get(option.name)
            if _SECRET.search(option.name):
                line = f"# {option.name} is {'set, and not shown' if value else 'not set'}"
            elif value is None or (one is None and option.default is None):
                line = f"# {option.name}: {option.shown or 'none'}"
            else:
                line = f"{option.name} = {_toml(value)}"
            lines.append(f"{line:<50} # {_toml(one.origin)[1:-1] if one else 'default'}")
    secret = [f"# keys of {name} are in the environment, and not shown" for name in keys_from_environment()]
    if os.environ.get(ENV_PREFIX + "ENCRYPTION_KEY"):
        secret.append(f"# {ENV_PREFIX}ENCRYPTION_KEY is set, and not shown")
    return "\n".join([*secret, *lines]).lstrip("\n")


def _of_file(path: Path) -> dict[str, GivenValue]:
    """The options in a file."""
    try:
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError("--config", str(path), f"{why}; name a file of options in TOML") from error
    except ValueError as error:  # of tomllib it says where, and never what stands there
        raise ConfigError("--config", str(path), f"it is not valid TOML: {error}") from error
    return given_sections(sections, str(path))


def given_sections(sections: Mapping[str, Any], source: str) -> dict[str, GivenValue]:
    """The options in some sections; every key is an option in its section.

    Parameters
    ----------
    sections : mapping of str to dict
    source : str
        Where they stand, for errors.

    Raises
    ------
    ConfigError
        If a section or option is unknown, or a value has the wrong type.
    """
    found = {}
    for section, keys in sections.items():
        if section not in SECTIONS:
            raise ConfigError(f"{source}, {section}", _show(section, keys), _remedy(section, "", SECTIONS))
        if not isinstance(keys, dict):
            raise ConfigError(f"{source}, {section}", _HIDDEN, f"write it as a table, [{section}]")
        for key, value in keys.items():
            origin = f"{source}, [{section}] {key}"
            if _SECTION_OF.get(key) != section:
                names = [option.name for option in SECTIONS[section]]
                raise ConfigError(origin, _show(key, value), _remedy(key, section, names))
            option = next(one for one in SECTIONS[section] if one.name == key)
            # Text is not read as a number.
            types, words = _TYPES[option.kind.toml]
            if not isinstance(value, types) or (isinstance(value, bool) and option.kind.toml in (int, float)):
                raise ConfigError(origin, _show(key, value), f"use {words}")
            found[key] = GivenValue(value, origin)
    return found


def _show(name: str, value: object) -> object:
    return _HIDDEN if _SECRET.search(name) or isinstance(value, dict) else value


def _remedy(name: str, section: str, known: Mapping[str, Any] | list[str]) -> str:
    """The remedy for an unknown option."""
    if name in _SECTION_OF:
        return f"write it under [{_SECTION_OF[name]}]"
    if gone := removed_remedy(name):
        return gone
    if nearest := get_close_matches(name, known, n=1) or get_close_matches(name, _SECTION_OF, n=1):
        where = _SECTION_OF.get(nearest[0], section)
        return f"there is no such option; did you mean {nearest[0]!r}" + (f" under [{where}]?" if where else "?")
    return "there is no such option; use one of " + ", ".join(known)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(name)} = {_toml(one)}" for name, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    shown = json.dumps(os.fspath(value) if isinstance(value, os.PathLike) else value, ensure_ascii=False)
    return shown.replace("\x7f", "\\u007f")  # which JSON has as it is, and TOML has not
