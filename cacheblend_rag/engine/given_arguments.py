"""Arguments that users of other packages give, taken as they hold here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import GenerationConfig

from cacheblend_rag.config import check_config, check_mapping, check_names
from cacheblend_rag.engine.decode import MORE_OPTIONS, DecodeFields
from cacheblend_rag.engine.other_arguments import OTHERS
from cacheblend_rag.errors import ConfigError

# Dicts in which other packages take options of generation.
_NESTED = ("pipeline_kwargs", "generate_kwargs", "additional_kwargs")
# Options of transformers' generation that are no fields here, whose None says nothing.
_UNSET = {*vars(GenerationConfig()), "prefix_allowed_tokens_fn", "stopping_criteria", "handle_long_generation"} - {
    *DecodeFields.model_fields
}
# Both names of the length of an answer.
_LENGTHS = ("max_tokens", "max_new_tokens")


def settle(given: Mapping[str, Any], known: Sequence[str], model_name: str = "") -> dict[str, Any]:
    """The given options as one flat dict, without options that only repeat the default.

    Options of transformers' generation that are no fields are kept in ``additional_kwargs``.

    Raises
    ------
    ConfigError
        If an option is unknown, is given twice, has the wrong type, or asks for something that is not supported.
    """
    # Named but not set, as whole configs of generation have them.
    settled = {name: value for name, value in given.items() if value is not None or name not in _UNSET}
    check_config(given.get("config"))
    check_mapping("blend", given.get("blend"), "options of BlendConfig")
    more = {name: settled.pop(name) for name in MORE_OPTIONS if name in settled and name not in known}
    for outer in _NESTED:
        check_mapping(outer, settled.get(outer), "options of decoding")
        for name, value in one_length(settled.pop(outer, None) or {}).items():
            if value is None and name in _UNSET:
                continue
            own = more if name in MORE_OPTIONS else settled
            for twice in _LENGTHS if name in _LENGTHS else (name,):
                if twice in own:
                    remedy = f"leave {name!r} out; {twice!r} is given beside {outer}, too"
                    raise ConfigError(outer, {name: value}, remedy)
            if name not in OTHERS:
                check_names([(name, value)], (*known, *MORE_OPTIONS))
            own[name] = value
    if more:
        settled["additional_kwargs"] = more
    for name in [name for name in settled if name not in known]:
        fits, remedy = OTHERS.get(name, ((), ""))
        if name == "model" and model_name:
            fits, remedy = (model_name,), f"this model is what it was loaded as, {model_name!r}"
        if name.startswith("ls_"):  # LangChain's notes for tracing
            del settled[name]
        elif remedy:
            value = settled.pop(name)
            if value is not None and value not in fits:
                raise ConfigError(name, value, remedy)
    check_names(settled.items(), known)
    return one_length(settled)


def one_length(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options with one name for the length of an answer.

    Of two lengths the last one counts. LangChain puts the options of a call behind those that `bind` has bound, so
    that the call's win whatever their names are.
    """
    settled = {name: value for name, value in given.items() if name not in _LENGTHS}
    lengths = [given[name] for name in given if name in _LENGTHS]
    if lengths:
        settled["max_new_tokens"] = next((one for one in reversed(lengths) if one is not None), None)
    return settled


def named_model(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a model with the name that other packages give it as its ``model_id``, where that is missing.

    Raises
    ------
    ConfigError
        If the model is named twice, or with another model's tokenizer.
    """
    fields, name = dict(given), given.get("model_id")
    for other in ("model", "model_name"):
        if other == "model" and isinstance(given.get(other), (str, os.PathLike)):
            called = os.fspath(fields.pop(other))
            if name is not None and called != os.fspath(name):
                raise ConfigError(other, called, f"leave it out; model_id={name!r} is given, too")
            name = called
        name = name or fields.get(other)
    if name is None:
        return fields
    if fields.get("tokenizer_name") == name:
        del fields["tokenizer_name"]
    return {**fields, "model_id": name}
