"""Answers that follow a JSON schema by construction: what may come next is known token by token (llguidance)."""

from __future__ import annotations

import copy
import json
import re
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tokenizers import decoders, models

from cacheblend_rag.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# As `json.dumps` writes it. Free white space would let a small model write nothing else.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": False}
# States of the lexer take memory; a schema that needs more of them ends its answer.
_LEXER_STATES = 20_000
# Surroundings of llguidance's messages: places in the grammar, and its lines.
_AROUND = re.compile(
    r"^at \d+\(\d+\): |failed to compile JSON schema: |^ *\d+ \|.*$|^ *\^.*$|<non-verbose/>", re.MULTILINE
)
# Where a schema holds others: by name, in a list, or one.
_NAMED, _LISTED, _SINGLE = ("properties", "$defs", "definitions"), ("anyOf", "oneOf", "prefixItems"), ("items",)

_tokenizers: weakref.WeakKeyDictionary[Any, LLTokenizer] = weakref.WeakKeyDictionary()
_making = threading.Lock()


@dataclass(frozen=True)
class Form:
    """One form that an answer may have: JSON that follows a schema, between two texts.

    Parameters
    ----------
    schema : dict
        A JSON schema.
    before, after : str
        Text around the JSON.
    lenient : bool
        Leave out keywords that answers cannot be held to. Otherwise they are an error.
    """

    schema: Mapping[str, Any]
    before: str = ""
    after: str = ""
    lenient: bool = False


@dataclass(frozen=True)
class InText:
    """Forms that an answer may have among free text, or not at all: tool calls that the model decides on.

    Parameters
    ----------
    begin, end : str
        Marks around each form. Without ``end``, an answer that begins with a brace, a bracket or ``begin`` is a form,
        or a list of them, and any other is text.
    otherwise : Form, optional
        Form of an answer that holds none of the others. There is no free text then.
    """

    begin: str
    end: str = ""
    otherwise: Form | None = None


class Grammar:
    """A grammar for answers, compiled for one tokenizer; any number of answers may use it at once.

    Parameters
    ----------
    tokenizer : transformers tokenizer
        A fast one.
    forms : sequence of Form
        The answer has one of them.
    field : str
        Name of the schema in errors.
    in_text : InText, optional
        Where the forms may stand; by default the answer is one of them.

    Raises
    ------
    ConfigError
        If answers cannot be held to the schema, or the tokenizer is not of a kind that can be used.
    MissingExtraError
        If llguidance is not installed.
    """

    def __init__(
        self, tokenizer: Any, forms: Sequence[Form], *, field: str = "schema", in_text: InText | None = None
    ) -> None:
        self.field = field
        matcher_class, known = _library().LLMatcher, _tokenizer(tokenizer)
        grammar = write_grammar(forms) if in_text is None else _among_text(forms, in_text, tokenizer, known)
        self._compiled: LLMatcher = matcher_class(known, grammar, log_level=0, limits=_limits())
        first = self._compiled.deep_copy()
        if not first.is_error():
            first.compute_bitmask()  # some schemas turn out to have no answer only here
        if first.is_error():
            raise schema_error(field, first.get_error())

    def matcher(self) -> LLMatcher:
        """Follows one answer, from its first token on."""
        return self._compiled.deep_copy()


def can_follow(tokenizer: Any) -> bool:
    """Whether answers can be held to a grammar: llguidance is installed and reads tokenizers of this kind."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    readable = backend is not None and not isinstance(backend.model, models.WordPiece)
    return readable and tokenizer.eos_token_id is not None and find_spec("llguidance") is not None


def form_of(response_format: Any) -> Form | None:
    """The form that OpenAI's ``response_format`` asks for; None for text.

    With ``strict``, objects have only the properties that their schema names, unless it says otherwise.

    Raises
    ------
    ConfigError
        If the format is not valid.
    """
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Form({"type": "object"})
    if kind != "json_schema":
        remedy = "use {'type': 'text'}, {'type': 'json_object'} or {'type': 'json_schema', 'json_schema': …}"
        raise ConfigError("response_format", response_format, remedy)
    given = response_format.get("json_schema")
    schema = given.get("schema") if isinstance(given, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ConfigError("response_format.json_schema.schema", schema, "give a JSON schema as a dict")
    return Form(close_objects(schema) if given.get("strict") else schema)


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with ``additionalProperties`` set to false wherever it is missing."""
    new = dict(schema)
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, Mapping):
            new[name] = {key: _close_each(one) for key, one in value.items()}
        elif name in _LISTED and isinstance(value, list):
            new[name] = [_close_each(one) for one in value]
        elif name in _SINGLE:
            new[name] = _close_each(value)
    if isinstance(schema.get("properties"), Mapping):
        new.setdefault("additionalProperties", False)
    return new


def _close_each(schema: Any) -> Any:
    return close_objects(schema) if isinstance(schema, Mapping) else schema


_PIECES = re.compile(r'"[^"]*"|[^"\s]+\s*|\s+|"')  # of JSON: strings, and what stands between them


def write_grammar(forms: Sequence[Form], start: Sequence[str] = ("start: form",), otherwise: Form | None = None) -> str:
    """The forms as llguidance reads them (a grammar of Lark), behind rules that say where they stand.

    One that an answer may have otherwise is no ``form`` there. Its name has the number behind theirs. The others are
    then begun by pieces as JSON has them: of texts that begin alike, llguidance's lexer lets the longest alone go on.
    """
    lines = [*start, "form: " + " | ".join(f"form_{at}" for at in range(len(forms)))]
    for at, form in enumerate([*forms, *([] if otherwise is None else [otherwise])]):
        style = {**_JSON_STYLE, "lenient": form.lenient}
        pieces = [form.before] if otherwise is None else _PIECES.findall(form.before)
        before, after = (
            " ".join(json.dumps(text, ensure_ascii=False) for text in texts if text) for texts in (pieces, [form.after])
        )
        lines.append(f"form_{at}: {before} json_{at} {after}")
        lines.append(f"json_{at}: %json {json.dumps({**form.schema, 'x-guidance': style})}")
    return "\n".join(lines)


def _among_text(forms: Sequence[Form], style: InText, tokenizer: Any, known: LLTokenizer) -> str:
    """`write_grammar`, with text around the forms, and tokens in it that stand for no text of their own."""
    added = {id: str(one) for id, one in tokenizer.added_tokens_decoder.items() if known.is_special_token(id)}
    marks = {text: f"<[{id}]>" for id, text in added.items()}
    others = [id for id, text in added.items() if text not in (style.begin, style.end) and id not in known.eos_tokens]
    other = f"<[{','.join(map(str, others))}]>" if others else '""'
    begin, end = (" | ".join([json.dumps(text), *filter(None, [marks.get(text)])]) for text in (style.begin, style.end))
    if style.otherwise is not None:
        calls = "(begin SPACE? form SPACE? end SPACE?)+" if style.end else "(begin SPACE?)? (form | list)"
        rules = [
            f"start: form_{len(forms)} | {calls}",
            f"begin: {begin}",
            *([f"end: {end}"] if style.end else ['list: "[" form ("," SPACE? form)* "]"']),
            r"SPACE: /[ \t\r\n]+/",
        ]
        return write_grammar(forms, rules, style.otherwise)
    if not style.end:
        return write_grammar(
            forms,
            [
                "start: other* (WORD (other TEXT)* | SPACE? (begin SPACE?)? (form | list))?",
                f"begin: {begin}",
                'list: "[" form ("," SPACE? form)* "]"',
                f"other: {other}",
                r"SPACE: /[ \t\r\n]+/",
                r"TEXT: /(.|\n)*/",
                r"WORD: /[ \t\r\n]*[^ \t\r\n{\[](.|\n)*/",
            ],
        )
    begun = f"begin | TEXT {marks[style.begin]}" if style.begin in marks else "begin"
    return write_grammar(
        forms,
        [
            "start: piece* TEXT",
            f"piece: ({begun}) SPACE? form SPACE? end" + (f" | TEXT {other}" if others else ""),
            f"begin[lazy]: TEXT {json.dumps(style.begin)}",
            f"end: {end}",
            r"SPACE: /[ \t\r\n]+/",
            r"TEXT: /(.|\n)*/",
        ],
    )


def fault_of(grammar: str) -> str:
    """The fault of a grammar, independent of the tokenizer; empty if it has no fault."""
    return str(_library().LLMatcher.validate_grammar(grammar, None, limits=_limits()))


def schema_error(field: str, fault: str) -> ConfigError:
    """The error for a schema that llguidance rejects."""
    reason = " ".join(_AROUND.sub("", fault).split())[:300]
    return ConfigError(field, "…", f"use a schema that can be enforced ({reason})")


def _limits() -> Any:
    return _library().LLParserLimits(max_lexer_states=_LEXER_STATES, verbose_errors=False)


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingExtraError("llguidance", "structured") from error
    return llguidance


def _tokenizer(tokenizer: Any) -> LLTokenizer:
    """A tokenizer as llguidance has it, made once: that takes up to a second."""
    made = _library().LLTokenizer
    with _making:
        if tokenizer not in _tokenizers:
            try:
                backend = copy.copy(tokenizer.backend_tokenizer)
                backend.no_padding()
                backend.no_truncation()
                if isinstance(backend.decoder, decoders.Metaspace):  # which llguidance does not know by this name
                    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
                ends = tokenizer.eos_token_id
                _tokenizers[tokenizer] = made(backend.to_str(), eos_token=ends, slices=made.json_slices())
            except (AttributeError, ValueError) as error:
                kind = type(tokenizer).__name__
                raise ConfigError("tokenizer", kind, f"use a model with a fast tokenizer ({error})") from error
        return _tokenizers[tokenizer]
