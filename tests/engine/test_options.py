"""One list of options: whatever describes an option comes from its field, so that none can be forgotten."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

from cacheblend_rag import BlendConfig
from cacheblend_rag.app.cli.arguments import add_rag_arguments, rag_options
from cacheblend_rag.config import RULE_OPTIONS, BlendOptions, check_names
from cacheblend_rag.engine.decode import DecodeArguments, DecodeOptions
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.selection import RULES
from cacheblend_rag.langchain.base import AllFields
from cacheblend_rag.loading.profile import BlendSettings
from tests.engine.test_config import FROM_ENVIRONMENT

OPTIONS = [option.name for option in fields(BlendConfig)]
# Another value than the default for each option.
OTHERS: dict[str, Any] = {name: value for name, (_, value) in FROM_ENVIRONMENT.items()}


def test_what_is_known_of_options_is_known_of_all() -> None:
    known = {option.name: option for option in BlendConfig.options()}
    assert list(known) == OPTIONS
    assert get_type_hints(BlendOptions) == {name: get_type_hints(BlendConfig)[name] for name in OPTIONS}
    for option in known.values():
        assert option.default == BlendConfig.default(option.name) == getattr(BlendConfig(), option.name)
        assert bool(option.flag) == bool(option.help)
    assert set(RULE_OPTIONS) < set(OPTIONS)


def test_decoding_arguments_are_those_of_the_options() -> None:
    assert get_type_hints(DecodeArguments) == get_type_hints(DecodeOptions)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_survives_json_and_says_when_it_was_changed(name: str) -> None:
    config = BlendConfig(**{name: OTHERS[name]})
    assert BlendConfig(**json.loads(json.dumps(config.asdict()))) == config
    assert config.changed() == {name: OTHERS[name]}


def test_an_option_has_one_default() -> None:
    for kind in (BlendSettings, *RULES.values()):
        for option in fields(kind):  # type: ignore[arg-type]
            if option.name == "check_layers" and option.default is not dataclasses.MISSING:
                assert option.default == BlendConfig.default(option.name), (kind, option.name)


def test_command_line_flags_are_those_of_the_fields() -> None:
    import argparse

    from cacheblend_rag.app.cli.arguments import add_arguments

    parser = argparse.ArgumentParser()
    add_rag_arguments(parser)
    add_arguments(parser, "ratio")
    config = rag_options(parser.parse_args(["--ratio", "0.3", "--size-limit", "3GB"])).config
    assert (config.recompute_ratio, config.size_limit) == (0.3, 3 * 10**9)
    assert rag_options(parser.parse_args([])).config == BlendConfig()
    assert rag_options(parser.parse_args(["--ratio", "auto"])).config.recompute_ratio == "auto"
    with pytest.raises(ConfigError, match=r"recompute_ratio='much' is not usable: use a value like 0\.15"):
        rag_options(parser.parse_args(["--ratio", "much"]))


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"max_new_token=3 is not usable.*did you mean 'max_new_tokens'"):
        check_names([("max_new_token", 3)], list(get_type_hints(AllFields)))
    with pytest.raises(ConfigError, match="use one of a, b"):
        check_names([("quite_something_else", 3)], ["b", "a"])
