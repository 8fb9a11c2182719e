"""Answers that follow a JSON schema by construction, from a model that has learnt nothing."""

from __future__ import annotations

import builtins
import copy
import json
from typing import Any

import jsonschema_rs
import pytest
from tokenizers import AddedToken

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.engine.grammar import Form, Grammar, InText, close_objects, form_of, write_grammar
from cacheblend_rag.errors import ConfigError, MissingExtraError
from tests import tiny
from tests.tokenizer_kinds import MAKERS, tokenizer_of

LEAF = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["oak", "ash"]},
        "count": {"type": "integer", "minimum": 3, "maximum": 40},
        "parts": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "kind", "count", "parts"],
    "additionalProperties": False,
}
SAMPLED = {"do_sample": True, "temperature": 1.5}


KINDS = [kind for kind in MAKERS if kind != "WordPiece"]


def engine_of(kind: str) -> BlendEngine:
    return BlendEngine(tiny.model(num_hidden_layers=2), tokenizer_of(kind), config=BlendConfig(min_tokens=0))


@pytest.fixture(scope="module")
def engine() -> BlendEngine:
    return engine_of(KINDS[0])


def prompt(seed: int) -> Prompt:
    return Prompt("the", [tiny.text(24, seed), tiny.text(24, seed + 1)], "which leaf fell?")


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_follows_its_schema(kind: str) -> None:
    engine = engine_of(kind)
    grammar = engine.grammar(LEAF)
    ways: list[dict[str, Any]] = [{**SAMPLED, "top_k": 3}, {"repetition_penalty": 1.8}]
    for seed, how in enumerate(ways):
        answer = engine.generate(prompt(seed), grammar=grammar, seed=seed, max_new_tokens=100, **how)
        assert jsonschema_rs.is_valid(LEAF, json.loads(answer.text)), (how, answer.text)
        assert answer.report.finish_reason == "stop", how


def test_cut_answer_says_so(engine: BlendEngine) -> None:
    long = {"type": "string", "minLength": 400}
    answer = engine.generate(prompt(0), grammar=engine.grammar(long), max_new_tokens=9)
    assert answer.report.finish_reason == "length"
    assert answer.text.startswith('"')
    stopped = engine.generate(prompt(0), grammar=engine.grammar({"const": "oak or ash"}), stop="or", max_new_tokens=60)
    assert stopped.text == '"oak '


def test_impossible_schema_is_refused(engine: BlendEngine) -> None:
    schemas: list[dict[str, Any]] = [
        {"type": "array", "contains": {"type": "null"}},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "objekt"},
        {"type": "string", "minLength": 5, "maxLength": 3},
        {"$ref": "#"},
        {"$ref": "file:///etc/passwd"},
        {"type": "object", "not": {}, "x-guidance": {"lenient": True}},
    ]
    for schema in schemas:
        with pytest.raises(ConfigError, match="use a schema that can be enforced"):
            engine.grammar(schema)


def test_forms_of_openai() -> None:
    assert form_of({"type": "text"}) is None
    assert form_of({"type": "json_object"}) == Form({"type": "object"})
    told = {"name": "leaf", "schema": {"type": "object", "properties": {"a": {}}}}
    assert form_of({"type": "json_schema", "json_schema": told}) == Form(told["schema"])  # type: ignore[arg-type]
    strict = form_of({"type": "json_schema", "json_schema": {**told, "strict": True}})
    assert strict is not None
    assert strict.schema["additionalProperties"] is False
    for wrong in ("json", {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}):
        with pytest.raises(ConfigError, match="response_format"):
            form_of(wrong)


def test_objects_are_closed_wherever_they_stand() -> None:
    inner = {"type": "object", "properties": {"properties": {"type": "string"}}}
    schema = {"$defs": {"a": inner}, "type": "array", "items": {"anyOf": [inner, {"type": "null"}]}}
    shut = {**inner, "additionalProperties": False}
    assert close_objects(schema) == {
        "$defs": {"a": shut},
        "type": "array",
        "items": {"anyOf": [shut, {"type": "null"}]},
    }
    opened = {"properties": {}, "additionalProperties": {"type": "string"}}
    assert close_objects(opened) == opened


def test_name_cannot_leave_its_place_in_a_grammar() -> None:
    engine = BlendEngine(tiny.model(num_hidden_layers=2), tiny.tokenizer(), config=BlendConfig())
    for name in ('say "oak"', "a:", "the\nstart: x", "%json {}"):
        grammar = Grammar(engine.tokenizer, [Form({"const": 1}, name, "}")])
        assert engine.generate(prompt(0), grammar=grammar, max_new_tokens=60).text == name + "1}"
    assert write_grammar([Form({})]).count("\n") == 3


@pytest.mark.parametrize(("kind", "special"), [*((kind, True) for kind in KINDS), (KINDS[0], None), (KINDS[0], False)])
def test_forms_among_text_follow_their_schemas_and_text_is_free(kind: str, special: bool | None) -> None:
    """Also where marks are tokens of their own, and where text holds other such tokens."""
    tokenizer = copy.deepcopy(tokenizer_of(kind))
    if special is not None:
        marks = ("<tool_call>", "</tool_call>", "<think>", "[TOOL_CALLS]")
        new = [AddedToken(one, special=special, normalized=False) for one in marks]
        tokenizer.add_tokens(new, special_tokens=special)
    number = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    forms = [Form(close_objects(number), '{"a": ', "}"), Form({"type": "object"}, '{"b": ', "}")]
    tagged = Grammar(tokenizer, forms, in_text=InText("<tool_call>", "</tool_call>"))
    bare = Grammar(tokenizer, forms, in_text=InText("[TOOL_CALLS]"))

    def taken(grammar: Grammar, text: str) -> bool:
        ids, matcher = tokenizer(text, add_special_tokens=False).input_ids, grammar.matcher()
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    right, loose = '{"a": {"x": 3}}', '{"b": {"x": "3"}}'
    wrong = ['{"a": {"x": "3"}}', '{"a": {"x": 3, "y": 1}}', '{"c": {}}', '{"a": {}}']
    assert taken(tagged, "")
    assert taken(bare, "")
    assert taken(tagged, "the <think> leaf {")
    assert taken(bare, "the leaf [1] {")
    for call in (right, loose):
        assert taken(tagged, f"the leaf\n<tool_call>\n{call}\n</tool_call>\n<tool_call>{right}</tool_call> fell")
        assert taken(bare, call)
        assert taken(bare, f"[TOOL_CALLS] [{right}, {call}]")
    for call in wrong:
        assert not taken(tagged, f"<tool_call>\n{call}\n</tool_call>")
        assert not taken(tagged, f"the leaf <tool_call>{right}</tool_call> and <tool_call>{call}</tool_call>")
        assert not taken(bare, call)
        assert not taken(bare, f"[{right}, {call}]")


def test_grammar_that_the_tokens_cannot_write_is_an_error() -> None:
    tokenizer = tokenizer_of("Unigram")
    engine = BlendEngine(tiny.model(num_hidden_layers=2), tokenizer, config=BlendConfig())
    with pytest.raises(ConfigError, match="satisfy the grammar"):
        engine.generate(prompt(0), grammar=Grammar(tokenizer, [Form({}, "\u00e4")]))
    with pytest.raises(ConfigError, match="fast tokenizer"):
        Grammar(tokenizer_of("WordPiece"), [Form({})])


def test_grammar_needs_the_extra(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"cacheblend-rag\[structured\]"):
        engine.grammar({"type": "object"})
