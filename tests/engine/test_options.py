"""Each option is declared once: its field, and nothing else, says what is known of it anywhere."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import BlendConfig
from cacheblend_rag.app.cli import _parser, main
from cacheblend_rag.app.cli.arguments import add_arguments, add_rag_arguments, rag_options
from cacheblend_rag.app.cli.configuration import SECTIONS, given_options, given_sections, server_settings
from cacheblend_rag.app.options import FolderRAGOptions
from cacheblend_rag.app.server.settings import Limits, ServerSettings
from cacheblend_rag.config import ENV_PREFIX, REMOVED, RULE_OPTIONS, Option, options_of
from cacheblend_rag.engine.decode import DecodeArguments, DecodeFields, DecodeOptions
from cacheblend_rag.engine.llm_base import LLMBase
from cacheblend_rag.errors import ConfigError
from docs.site import options as page
from tests.engine.test_config import FROM_ENVIRONMENT

OPTIONS = BlendConfig.names()
# Another value than the default for each option of the engine.
OTHERS: dict[str, Any] = {name: value for name, (_, value) in FROM_ENVIRONMENT.items()}
KINDS: tuple[type, ...] = (FolderRAGOptions, ServerSettings, Limits, BlendConfig)
EVERY = [(kind, one) for kind in KINDS for one in options_of(kind)]
# Fields that hold other options, or secrets, which have no flag and are in no file.
PARTS = {"config", "rag", "limits", "api_keys", "data"}


def named(case: Any) -> str | None:
    return case.name if isinstance(case, Option) else case.__name__ if isinstance(case, type) else None


@pytest.fixture(scope="module")
def serve() -> argparse.ArgumentParser:
    actions = [one for one in _parser()._actions if isinstance(one, argparse._SubParsersAction)]
    return actions[0].choices["serve"]


@pytest.mark.parametrize(("kind", "one"), EVERY, ids=named)
def test_the_field_of_an_option_gives_its_variable_flag_key_row_and_check(
    kind: type, one: Option, serve: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    # text and row of the documentation
    assert one.about.endswith((".", "…", '"'))
    assert page.row_of(one) in page.PAGE.read_text(encoding="utf-8").splitlines()
    assert f"{one.name} : {one.kind.words}" in (kind.__doc__ or "")
    # flag
    flags = {text for action in serve._actions for text in action.option_strings}
    assert not one.flag or f"--{one.flag}" in flags
    # key in a file
    section = next((name for name, options in SECTIONS.items() if one in options), "")
    assert section or one.name == "max_concurrent"  # the server has `concurrent`
    bad = "2" if one.kind.toml is not str else 2
    if section and one.kind.toml is not object:
        with pytest.raises(ConfigError) as caught:
            given_sections({section: {one.name: bad}}, "serve.toml")
        assert caught.value.field == f"serve.toml, [{section}] {one.name}"
        assert caught.value.remedy.startswith("use ")
    # check of a value, in the same words
    with pytest.raises(ConfigError) as caught:
        one.kind.check(one.name, object())
    assert (caught.value.field, caught.value.remedy[:4]) == (one.name, "use ")
    # variable
    monkeypatch.setenv(one.variable, "")
    if one.kind.parse is not str and one.kind.toml is not list:
        with pytest.raises(ConfigError) as caught:
            given_options(None, {}) if section else BlendConfig()
        assert (caught.value.field, caught.value.remedy[:4]) == (one.variable, "use ")


def test_every_field_is_an_option() -> None:
    for kind in KINDS:
        names = [one.name for one in fields(kind) if one.name not in PARTS]
        assert names == [one.name for one in options_of(kind)]
    assert set(RULE_OPTIONS) < set(OPTIONS)


@pytest.mark.parametrize("name", REMOVED)
def test_option_of_earlier_versions_is_refused_with_the_remedy(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert name not in OPTIONS
    remedy = re.escape(REMOVED[name])
    with pytest.raises(ConfigError, match=f"^{name}=.*no such option any more; {remedy}"):
        BlendConfig(**{name: (1,)})
    with pytest.raises(ConfigError, match=f"{name}.*no such option any more; {remedy}"):
        given_sections({"engine": {name: [1]}}, "serve.toml")
    for variable in (f"{ENV_PREFIX}{name.upper()}", f"{ENV_PREFIX}LIMITS_{name.upper()}"):
        monkeypatch.setenv(variable, "1")
        with pytest.raises(ConfigError, match=f"^{variable}='1' .*{remedy}"):
            BlendConfig()
        assert main(["serve", "--print-config"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert REMOVED[name] in line
        monkeypatch.delenv(variable)


def test_option_that_only_the_server_has_left_is_refused_elsewhere_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"^find_repeated=True .*any more; leave it out; the server finds text"):
        BlendConfig(**{"find_repeated": True})
    with pytest.raises(ConfigError, match=r"write it under \[server\]"):
        given_sections({"engine": {"find_repeated": True}}, "serve.toml")


def test_decoding_options_are_declared_once() -> None:
    """`DecodeArguments` is for type checkers alone; nothing is read from it."""
    assert set(DecodeArguments.__annotations__) == set(DecodeOptions.model_fields)
    assert set(DecodeFields.model_fields) == set(DecodeOptions.model_fields) - {"grammar", "answer_begins"}
    own = {name for name in inspect.get_annotations(LLMBase) if not name.startswith("_")}
    assert not own & set(DecodeOptions.model_fields)
    for name, there in DecodeOptions.model_fields.items():
        assert there.description, name
        assert name in ("grammar", "answer_begins") or LLMBase.model_fields[name].description == there.description


def test_every_option_survives_json_and_says_when_it_was_changed() -> None:
    for name, value in OTHERS.items():
        config = BlendConfig(**{name: value})
        assert BlendConfig(**json.loads(json.dumps(config.asdict()))) == config
        assert config.changed() == {name: value}


def test_command_line_flags_are_those_of_the_fields() -> None:
    parser = argparse.ArgumentParser()
    add_rag_arguments(parser)
    add_arguments(parser, "ratio")
    config = rag_options(parser.parse_args(["--ratio", "0.3", "--size-limit", "3GB"])).config
    assert (config.recompute_ratio, config.size_limit) == (0.3, 3 * 10**9)
    assert rag_options(parser.parse_args([])).config == BlendConfig()
    assert rag_options(parser.parse_args(["--ratio", "auto"])).config.recompute_ratio == "auto"
    with pytest.raises(ConfigError, match=r"recompute_ratio='much' is not usable: use a number from 0 to 1, or 'auto'"):
        rag_options(parser.parse_args(["--ratio", "much"]))


def files() -> Iterator[dict[str, Any]]:
    for path in Path(__file__).parents[2].glob("docs/**/*.toml"):
        yield tomllib.loads(path.read_text(encoding="utf-8"))


def test_files_of_options_in_the_documentation_are_read() -> None:
    read = [server_settings(given_sections(one, "a file")) for one in files() if one.keys() <= SECTIONS.keys()]
    assert read


def test_secret_in_an_address_is_shown_by_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = [one for options in SECTIONS.values() for one in options if one.name == "shared_store"]
    monkeypatch.setenv(one.variable, "postgresql://me:hush@host/x")
    with pytest.raises(ConfigError) as caught:
        given_options(None, {})
    assert one.variable in str(caught.value)
    assert "hush" not in str(caught.value)
