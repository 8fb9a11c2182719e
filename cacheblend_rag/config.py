"""Options of the engine: frozen, validated once, each also settable by environment variable.

An option is declared once, by its field: `option` says its values, its text, its flag and its part in caches. From that
follow the check, the environment variable, the flag, the key in a file of options, and the row of the documentation.
"""

from __future__ import annotations

import json
import math
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache, partial, wraps
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from cacheblend_rag.errors import ConfigError


@dataclass(frozen=True)
class Kind:
    """A kind of option: which values it accepts, and how text is read as a value.

    Parameters
    ----------
    words : str
        The values in words, as an error's remedy and the documentation say it: ``"a number from 0 to 1"``.
    check : callable
        Takes the option's name and a value. Gives the value in the form in which it is kept, or raises `ConfigError`.
    parse : callable
        Reads a value from text. It raises `ValueError` for a text that is none.
    toml : type
        Type of its value in a file of options; ``object`` for one that has several.
    written : str
        The values in words as text has them, where these are others.
    """

    words: str
    check: Callable[[str, Any], Any]
    parse: Callable[[str], Any] = str
    toml: type = object
    written: str = ""


def kind_of(
    words: str,
    fits: Callable[[Any], bool],
    parse: Callable[[str], Any] = str,
    toml: type = object,
    keep: Callable[[Any], Any] | None = None,
) -> Kind:
    """Make a kind that accepts the values for which `fits` is true; `keep` converts an accepted value."""

    def check(name: str, value: Any) -> Any:
        if not fits(value):
            raise ConfigError(name, value, f"use {words}")
        return value if keep is None else keep(value)

    return Kind(words, check, parse, toml)


def is_whole(value: object) -> bool:
    """True for an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def whole(lowest: int = 0, highest: int | None = None) -> Kind:
    """Whole numbers within bounds, both included."""
    words = f"a whole number, {lowest} or more" if highest is None else f"a whole number from {lowest} to {highest}"
    return kind_of(
        words, lambda value: is_whole(value) and lowest <= value and (highest is None or value <= highest), int, int
    )


def number(words: str, fits: Callable[[Any], bool]) -> Kind:
    """Numbers for which `fits` is true."""
    return kind_of(
        f"a number {words}",
        lambda value: isinstance(value, Real) and not isinstance(value, bool) and fits(value),
        float,
        float,
    )


def choice(names: Sequence[str]) -> Kind:
    """One of a few names."""
    return kind_of("one of " + ", ".join(map(repr, names)), lambda value: value in names, str, str)


def text(note: str = "") -> Kind:
    """Texts."""
    return kind_of("a text" + note, lambda value: isinstance(value, str), str, str)


def path(words: str) -> Kind:
    """Paths, with ``~`` for the home folder."""
    return kind_of(
        words,
        lambda value: isinstance(value, (str, os.PathLike)) and value != "",
        toml=str,
        keep=lambda value: os.path.expanduser(value) if isinstance(value, str) else value,
    )


def _flag(given: str) -> bool:
    lowered = given.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError(given)


def or_auto(kind: Kind) -> Kind:
    """Accept ``"auto"`` as well as the values of a kind."""

    def check(name: str, value: Any) -> Any:
        if isinstance(value, str) and value == "auto":
            return value
        try:
            return kind.check(name, value)
        except ConfigError as error:
            raise ConfigError(name, value, f"use {words}") from error

    def parse(given: str) -> Any:
        return "auto" if given.strip().lower() == "auto" else kind.parse(given)

    words = f"{kind.words}, or 'auto'"
    return Kind(words, check, parse, written=kind.written and f"{kind.written}, or auto")


def read_reasoning(name: str, value: Any) -> Reasoning:
    """Read from text whether a model should think before it answers.

    Raises
    ------
    ConfigError
        If it is none of the words for it.
    """
    word = value.strip().lower() if isinstance(value, str) else ""
    known = value if isinstance(value, bool) else _REASONING.get(word)
    if known is None:
        raise ConfigError(name, value, f"use {REASONING.words}")
    return known


REASONING = Kind("True or 'on', False or 'off', 'low', 'medium' or 'high'", read_reasoning)
SHARE = number("from 0 to 1", lambda value: 0 <= value <= 1)
ABOVE_ZERO = number("above 0", lambda value: value > 0)
FLAG = replace(kind_of("True or False", lambda value: isinstance(value, bool), _flag, bool), written="on or off")


def check_whole(name: str, value: object, lowest: int = 0) -> None:
    """A whole number of at least ``lowest``."""
    whole(lowest).check(name, value)


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """One of a few names."""
    choice(allowed).check(name, value)


def check_above_zero(name: str, value: object) -> None:
    """A number above 0."""
    ABOVE_ZERO.check(name, value)


def check_share(name: str, value: object) -> None:
    """A number from 0 to 1."""
    SHARE.check(name, value)


def check_shares(name: str, values: object) -> None:
    """A sequence of numbers from 0 to 1 that never rise."""
    if not isinstance(values, (tuple, list)):
        raise ConfigError(name, values, "use a tuple of numbers, such as (0.2, 0.1)")
    for value in values:
        check_share(name, value)
    if any(after > before for before, after in pairwise(values)):
        raise ConfigError(name, values, "use ratios that never rise; a row that was dropped cannot return")


def check_layer_list(name: str, layers: object, lowest: int = 1) -> None:
    """Layers in rising order, each once."""
    if not isinstance(layers, (tuple, list)):
        raise ConfigError(name, layers, "use a tuple of layers, such as (1,)")
    if not layers or not all(map(is_whole, layers)) or any(layer < lowest for layer in layers):
        reason = "; KV never deviates on layer 0, where it depends on the token alone" if lowest else ""
        raise ConfigError(name, layers, f"use layers from {lowest} on{reason}")
    if list(layers) != sorted(set(layers)):
        raise ConfigError(name, layers, "list each layer once, in rising order")


def check_names(given: Iterable[tuple[str, object]], known: Sequence[str]) -> None:
    """Refuse unknown names of options; the error suggests the nearest name."""
    for name, value in given:
        if name in known:
            continue
        if gone := removed_remedy(name):
            raise ConfigError(name, value, gone)
        nearest = get_close_matches(name, known, n=1)
        remedy = f"did you mean {nearest[0]!r}?" if nearest else "use one of " + ", ".join(sorted(known))
        raise ConfigError(name, value, f"there is no such option; {remedy}")


def removed_remedy(name: str) -> str | None:
    """The remedy for an option of an earlier version, or None if there was no such option."""
    remedy = (REMOVED | _LEFT_TO_THE_SERVER).get(name)
    return None if remedy is None else f"there is no such option any more; {remedy}"


def check_mapping(name: str, value: object, what: str = "arguments") -> None:
    """A dict of arguments, or None."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(name, value, f"use a dict of {what}")


def check_config(value: object) -> BlendConfig:
    """Options of an engine; None stands for the defaults."""
    if value is None or isinstance(value, BlendConfig):
        return value or BlendConfig()
    given = value.items() if isinstance(value, Mapping) else ()
    like = ", ".join(f"{name}={one!r}" for name, one in given if name in BlendConfig.names())
    raise ConfigError("config", value, f"give a BlendConfig, such as BlendConfig({like or 'recompute_ratio=0.2'})")


def check_model_and_tokenizer(model: object, tokenizer: object) -> None:
    """A model and its tokenizer, in this order."""
    if isinstance(model, (str, os.PathLike)):
        raise ConfigError("model", model, "use from_pretrained (or from_model_id) for a path or an id")
    if hasattr(model, "convert_tokens_to_ids"):
        raise ConfigError("model", type(model).__name__, "give the model first and its tokenizer second")
    if not callable(getattr(model, "forward", None)):
        raise ConfigError("model", type(model).__name__, "give a causal language model of transformers")
    if not hasattr(tokenizer, "convert_tokens_to_ids"):
        given = None if tokenizer is None else type(tokenizer).__name__
        remedy = "give the model's tokenizer, such as AutoTokenizer.from_pretrained(name of the model)"
        raise ConfigError("tokenizer", given, remedy)


def check_fit(name: str, wanted: Sequence[int], layers: int) -> None:
    """Refuse options that name layers which the model does not have."""
    if wanted and wanted[-1] >= layers:
        raise ConfigError(name, tuple(wanted), f"this model has layers 0 to {layers - 1}")


ENV_PREFIX = "CACHEBLEND_RAG_"
# Names of the starter models, which commands use unless another model is named.
DEFAULT_NEW_TOKENS = 512
"""Most tokens of an answer where nothing says how long it may be: some 380 words, which a full answer seldom has."""
DEFAULT_MODEL = "smollm2"
DEFAULT_EMBEDDER = "minilm"
CONDITIONS = ("auto", "context", "sink", "prefix")
LEAST_RATIO = 0.15
"""r* of the paper: no recompute ratio that a controller chooses is smaller, unless calibration found one."""
# Element types that a model can be loaded in.
DTYPES = ("auto", "float32", "bfloat16", "float16")
CODEC_NAMES = ("raw", "int8")
Verify = Literal["off", "idle", "always", "held"]
"""Names of `BlendConfig.verify`."""
VERIFY: tuple[str, ...] = get_args(Verify)
Reasoning = bool | Literal["low", "medium", "high"]
"""Whether a model shall think before it answers, and how much."""
# Other words for it, as requests and commands have them.
_REASONING: dict[str, Reasoning] = {
    **{"none": False, "off": False, "false": False, "on": True, "true": True},
    **{"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"},
}
REMOVED = {
    "check_layers": 'give it to the rule that takes it: selection_options={"check_layers": [1]}',
    "recompute_ratios": 'give it to the rule that takes it: selection_options={"recompute_ratios": [0.3, 0.05]}',
    "guard_share": 'use verify="idle" with verify_share, which checks answers word for word',
    "guard_bound": "leave it out; run `cacheblend-rag calibrate` where too many answers are corrected",
    "verify_bound": "leave it out; run `cacheblend-rag calibrate` where too many answers are corrected",
    "try_blending": "leave it out; `cacheblend-rag calibrate` tries blending on your documents",
    "int8_prefill": "leave it out; prompts are multiplied as the weights are",
    "like": "call cacheblend_rag.models.families.register_family for a family that is not known",
    "check_model": "leave it out; models are always checked at load",
    "prompt_lookup": "leave it out; tokens are tried where that is faster",
    "keep_converted": "leave it out; GGUF files are not converted",
    "prefetch": "leave it out; layers are read ahead wherever that is faster",
    "contexts": "leave it out; each chunk is computed after text of two other chunks",
    "variants": "leave it out; up to eight variants of a chunk are kept of verified answers",
    "session_cache": "leave it out; prompt_cache keeps the last prompts in memory",
    "keep_alive": "leave it out; a GGUF file is mapped, and the system takes its memory back",
    "keep_conversations": "leave it out; the browser keeps conversations",
    **dict.fromkeys(("conversations", "conversation_bytes"), "leave it out; the browser keeps conversations"),
    **dict.fromkeys(("collections", "jobs"), "leave it out; the folder of --docs is the collection"),
    **dict.fromkeys(("images", "image_pixels"), "leave it out; prompts are text"),
    "prompt_seconds": "leave it out; prompt_chars and prompt_tokens bound a prompt",
    "database": "leave it out; replicas serve one folder, which several machines can mount",
}
"""Options of earlier versions, and what to do instead."""
_LEFT_TO_THE_SERVER = {"find_repeated": "leave it out; the server finds text that repeats"}

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(value: int | str, field_name: str = "size_limit") -> int:
    """Read a size in bytes from a number or from text such as ``"20GB"`` or ``"512 MiB"``.

    Raises
    ------
    ConfigError
        If the value is not a positive size.
    """
    size = value if isinstance(value, int) and not isinstance(value, bool) else 0
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*((?:[kmgt]i?)?)b?\s*", value, re.IGNORECASE)
        given = float(match[1]) * _UNITS.get(match[2].lower(), 0) if match else 0
        size = int(given) if math.isfinite(given) else 0
    if size <= 0:
        raise ConfigError(field_name, value, f"use {BYTES.words}")
    return size


BYTES = Kind(
    'a positive number of bytes or text such as "20GB" or "512MiB"',
    lambda name, value: parse_bytes(value, name),
    parse_bytes,
)


@dataclass(frozen=True)
class Option:
    """Everything about an option except its type.

    Parameters
    ----------
    default : object
        Its value if none is given.
    kind : Kind
        Its values.
    about : str
        Text that says when to change it. Its first sentence is its line in the help of the command line.
    name : str
        The name of its field.
    flag : str
        Its name on the command line, without dashes; empty if it has none there.
    metavar : str
        Stands for its value in the help of the command line.
    shown : str
        Its default in words, where the value itself would say less.
    prefix : str
        Prefix of its name in the environment, after ``CACHEBLEND_RAG_``.
    repeats : bool
        Whether the command line takes it several times.
    of_kv : bool
        Whether the KV of a blended prompt depends on it.
    """

    default: Any
    kind: Kind
    about: str
    name: str = ""
    flag: str = ""
    metavar: str = ""
    shown: str = ""
    prefix: str = ""
    repeats: bool = False
    of_kv: bool = False

    @property
    def variable(self) -> str:
        """Name of the option's environment variable."""
        return ENV_PREFIX + self.prefix + self.name.upper()

    @property
    def help_line(self) -> str:
        """The option's line in the command line's help, with the default."""
        first = self.about.split(". ")[0].removesuffix(".")
        begin = first if first[1:2].isupper() else first[0].lower() + first[1:]
        return f"{begin} (default: {self.shown or self.default})"

    def from_environment(self) -> Any:
        """The option's value from the environment, or its default."""
        given = os.environ.get(self.variable)
        return self.default if given is None else self.read(given, self.variable)

    def read(self, given: str | list[str], source: str) -> Any:
        """Read the option's value from text, or from several texts if the option can be repeated.

        Raises
        ------
        ConfigError
            If the text is no such value; the message names its source.
        """
        try:
            return self.kind.check(source, self.kind.parse(given) if isinstance(given, str) else given)
        except ConfigError as error:  # a text that it shows may be without a secret
            shown = error.value if isinstance(error.value, str) else given
            raise ConfigError(source, shown, error.remedy) from error
        except ValueError as error:
            raise ConfigError(source, given, f"use {self.kind.written or self.kind.words}") from error


_NOT_GIVEN: Any = ...


def option(
    default: Any, kind: Kind, about: str, *, from_environment: bool = False, hashed: bool = True, **more: Any
) -> Any:
    """A dataclass field that is an option; see `Option`.

    Parameters
    ----------
    from_environment : bool
        Whether a value that is not given is read from the environment when the object is made.
    hashed : bool
        Whether the value can be hashed.
    """
    described = Option(default, kind, " ".join(about.split()), **more)
    shown = _NOT_GIVEN if from_environment else default
    return field(default=shown, hash=None if hashed else False, metadata={"option": described})


def options_of(kind: type) -> tuple[Option, ...]:
    """The `Option` of each field of a dataclass, in order."""
    return _options_of(kind)


@cache
def _options_of(kind: Any) -> tuple[Option, ...]:
    return tuple(replace(one.metadata["option"], name=one.name) for one in fields(kind) if "option" in one.metadata)


def check_options(options: Any) -> None:
    """Check the options of a new dataclass instance, and convert each value.

    Raises
    ------
    ConfigError
        If a value is none that the option may have; the message names the option, or its variable, and the remedy.
    """
    for one in options_of(type(options)):
        value = getattr(options, one.name)
        if value is _NOT_GIVEN:
            value = one.from_environment()
        if value is not None or one.default is not None:
            value = one.kind.check(one.name, value)
        object.__setattr__(options, one.name, value)


_T = TypeVar("_T", bound=type[Any])


def declared(kind: _T) -> _T:
    """Decorator of a dataclass of options: unknown names are refused, and the docstring lists all options."""
    names, made = tuple(one.name for one in fields(kind)), kind.__init__

    @wraps(made)
    def init(self: Any, *args: Any, **given: Any) -> None:
        check_names(given.items(), names)
        made(self, *args, **given)

    kind.__init__ = init
    about = "".join(
        f"\n    {one.name} : {one.kind.words}\n{textwrap.indent(textwrap.fill(one.about, 112), ' ' * 8)}"
        for one in options_of(kind)
    )
    kind.__doc__ = f"{(kind.__doc__ or '').rstrip()}\n\n    Parameters\n    ----------{about}\n"
    return kind


def default_data_path() -> Path:
    """Default folder for the command line's index and KV."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "cacheblend_rag"


def plain_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a rule with tuples for lists: JSON and TOML have no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


_MEMORY = Kind(
    '0, a number of bytes or text such as "2GB"',
    lambda name, value: 0 if value in (0, "0") and value is not False else parse_bytes(value, name),
    lambda given: given,
)
_SELECTION = kind_of(
    "the name of a rule, such as 'hkvd', or a rule",
    lambda value: isinstance(value, str) or callable(getattr(value, "keep", None)),
    toml=str,
)


def _can_be_written(value: Any) -> bool:
    """Whether JSON and TOML both have such a value."""
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _can_be_written(one) for name, one in value.items())
    return all(map(_can_be_written, value)) if isinstance(value, (list, tuple)) else value is not None


_RULE_OPTIONS = kind_of(
    'a dict of options, such as {"score_layers": [28]}',
    lambda value: isinstance(value, Mapping) and _can_be_written(value),
    json.loads,
    dict,
    plain_options,
)
_engine_option = partial(option, from_environment=True)


@declared
@dataclass(frozen=True, kw_only=True)
class BlendConfig:
    """How prompts are split, which tokens are recomputed, and where KV is kept.

    An option that is not given is read from the environment variable ``CACHEBLEND_RAG_<NAME>``
    (for instance ``CACHEBLEND_RAG_RECOMPUTE_RATIO=0.2``), else it has its default.

    Raises
    ------
    ConfigError
        If a value is out of range or unknown; the message names the option and the remedy.
    """

    separator: str = _engine_option(
        "\n\n",
        kind_of("a text that is not empty", lambda value: isinstance(value, str) and value != "", toml=str),
        """
        Text between the chunks of a `Prompt` that does not set ``between``, and around a chunk that is stored ahead of
        time. Prompts of chains are read as they were written. Set it to the text that your own prompts have between
        chunks.
        """,
    )
    split_at_separator: bool = _engine_option(
        False,
        FLAG,
        """
        Split a prompt given as one text at every separator. Turn it on if your program joins chunks with the separator
        and passes one text. Leave it off where text comes from outside: a question that contains the separator would be
        split too.
        """,
    )
    recompute_ratio: float | str = _engine_option(
        "auto",
        or_auto(SHARE),
        """
        Share of the reused chunk tokens that is recomputed, 0 to 1. The paper takes 0.15 (section 4.3). 'auto' is 0.15,
        until `cacheblend-rag profile` has measured this machine: the loading controller then raises it for each request
        as far as the computation is hidden by loading. After `cacheblend-rag calibrate` it is the rule and the share
        that were found, unless you name a rule. Raise it where answers must be closer to full prefill; lower it where
        the first token must come earlier. See docs/explanation/loading.md.
        """,
        flag="ratio",
        metavar="R",
        of_kv=True,
    )
    selection: Any = _engine_option(  # noqa: RUF009
        "query",
        _SELECTION,
        """
        Rule that chooses which tokens are recomputed, by name or as an object. 'query' takes the tokens that the
        question attends to most, 'boundary' the first tokens of each chunk, 'hkvd' those of highest KV deviation, as
        the paper does. 'none' is full KV reuse, 'all' is full KV recompute. Change it to reproduce the paper, or where
        scoring by the question takes too long. See docs/reference/selection.md.
        """,
        of_kv=True,
    )
    selection_options: Mapping[str, Any] = _engine_option(
        {},
        _RULE_OPTIONS,
        """
        Options of the named rule, such as {"score_layers": [28]} for 'query'; JSON in the environment. Set them where
        the rule's defaults do not suit the model. See docs/reference/selection.md.
        """,
        shown="none",
        hashed=False,
        of_kv=True,
    )
    min_tokens: int = _engine_option(
        256,
        whole(),
        """
        Least number of chunk tokens in a blended prompt; a prompt with fewer is answered by full prefill. So is a
        prompt of which too little is stored. With 0, every prompt with a chunk is blended, even where that takes
        longer. Lower it where prefill is slow, as with a large model on a CPU; raise it where short prompts are fast
        anyway.
        """,
    )
    overflow: str = _engine_option(
        "error",
        choice(("error", "drop_chunks")),
        """
        Treatment of a prompt that is longer than the context window: it is refused, or loses whole chunks from the
        end until it fits. Change it where a shorter context is better than no answer, and retrieval returns the best
        chunks first. See docs/reference/options.md#the-context-window.
        """,
    )
    condition: str = _engine_option(
        "auto",
        choice(CONDITIONS),
        """
        Tokens that precede a chunk when it is computed for the store. 'context': text of related chunks, which are its
        neighbours if it is warmed, and otherwise the chunks retrieved with it; the chunk is reused at any position.
        'sink': only the fixed tokens at the start of every text, as in the paper; storing takes half of the time, and
        on SmolLM2-135M answers are further from full prefill. 'prefix': the prompt's prefix, after which the chunk is
        exact; each prefix has its own record. 'auto': what `cacheblend-rag calibrate` found, or 'context'. Change it
        where storing takes too long, or where every prompt has one chunk after one prefix. See
        docs/explanation/engine.md#what-is-stored.
        """,
        of_kv=True,
    )
    write_back: str = _engine_option(
        "background",
        choice(("background", "inline", "off")),
        """
        When missing chunks are stored: after the answer when no request waits, before the call returns, or never. Use
        'inline' in a program that ends after its answer, and 'off' where chunks never come back.
        """,
    )
    prompt_cache: int | str = _engine_option(
        "auto",
        or_auto(_MEMORY),
        """
        Bytes of memory for the KV of the last prompts and their answers; 0 for none. A prompt with the same beginning
        continues from there: the next step of an agent, the next turn of a chat, the same system prompt. 'auto' is 1
        GiB, or a sixteenth of the memory of the machine (of the GPU, if the model is there) if that is less. Raise it
        where several long conversations take turns; set 0 where memory is short, or where not even the rounding of an
        answer may depend on earlier prompts. See docs/explanation/engine.md#the-last-prompts.
        """,
    )
    size_limit: int | str = _engine_option(
        10 * 10**9,
        BYTES,
        """
        Bytes the KV store may take, such as "20GB". Beyond them, the least recently used records are evicted. Raise it
        where your documents need more: `cacheblend-rag cache estimate` tells how much.
        """,
        flag="size-limit",
        metavar="SIZE",
        shown="10 GB",
    )
    memory_limit: int | str = _engine_option(
        "auto",
        or_auto(_MEMORY),
        """
        Bytes of memory for copies of records from a folder or a shared store; 0 for none. 'auto' is a quarter of the
        free memory if the model is on a GPU; otherwise 256 MB in `ask` and `serve` and where there is only a shared
        store; otherwise none. Raise it where reading is slow and memory is free; set 0 where memory is short. See
        docs/how-to/shared-kv.md.
        """,
    )
    codec: str = _engine_option(
        "int8",
        choice(CODEC_NAMES),
        """
        How the KV of chunks is written to a folder or a shared store: unchanged, or in eight bits. Choose 'raw' where a
        chunk in its original position must be exact. See docs/reference/kv-record.md.
        """,
    )
    salt: str = _engine_option(
        "",
        text("; an empty salt is shared by all who set no salt"),
        """
        Text that is part of every key: tenants with different salts never share a record. Set a salt for each group of
        users that must not learn what other groups have stored.
        """,
        shown="empty",
    )
    max_concurrent: int = _engine_option(
        1,
        whole(1),
        """
        Most answers that run at the same time. With more than 1, a request can start while others are answered, if its
        KV fits into memory. They then share decoding steps, so rounding depends on the other requests. Raise it where
        several people ask at the same time. See docs/explanation/engine.md#several-at-once.
        """,
    )
    verify: str = _engine_option(
        "off",
        choice(VERIFY),
        """
        Whether answers are compared with full prefill's, and corrected where they differ. 'idle' checks them when no
        request waits. 'always' checks each answer before it is complete; its first words still come early. 'held' is
        for streams that must never be corrected: the prompt is prefilled in full, so the first word comes later. See
        docs/explanation/verification.md.
        """,
    )
    verify_share: float = _engine_option(
        1.0,
        SHARE,
        """
        Share of the answers that 'idle' verification checks. Lower it, for instance to 0.01, where checking all answers
        would keep the machine busy and a sample is enough to notice a change.
        """,
    )
    prepack_weights: bool | str = _engine_option(
        "auto",
        or_auto(FLAG),
        """
        Use rearranged copies of linear weights in bfloat16 on a CPU, which are faster for few tokens. The copies are in
        oneDNN's order and take as much memory again; 'auto' makes them if the processor has bfloat16 arithmetic and
        they take at most a quarter of the machine's memory. True refuses a model that cannot gain. Turn it off where
        memory is short. See docs/explanation/engine.md#weight-prepacking.
        """,
    )

    def __post_init__(self) -> None:
        for name in REMOVED:
            for variable in (f"{ENV_PREFIX}{name.upper()}", f"{ENV_PREFIX}LIMITS_{name.upper()}"):
                if (given := os.environ.get(variable)) is not None:
                    raise ConfigError(variable, given, str(removed_remedy(name)))
        check_options(self)

    @property
    def text_separator(self) -> str:
        """Text at which a prompt given as one string is split; empty if it is not split."""
        return self.separator if self.split_at_separator else ""

    @property
    def store_bytes(self) -> int:
        """``size_limit`` in bytes."""
        return parse_bytes(self.size_limit)

    @property
    def ratio(self) -> float:
        """The recompute ratio, or the lowest one that a controller may choose."""
        return LEAST_RATIO if isinstance(self.recompute_ratio, str) else self.recompute_ratio

    @property
    def memory_bytes(self) -> int:
        """``memory_limit`` in bytes."""
        return 0 if isinstance(self.memory_limit, str) else self.memory_limit

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of all options."""
        return tuple(one.name for one in options_of(cls))

    @classmethod
    def default(cls, name: str) -> Any:
        """Value of an option if neither the caller nor the environment sets it."""
        return next(one.default for one in options_of(cls) if one.name == name)

    def asdict(self) -> dict[str, Any]:
        """All options by name, as JSON values; ``BlendConfig(**config.asdict())`` equals this object."""
        return {name: as_json(getattr(self, name)) for name in self.names()}

    def changed(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        return {one.name: value for one in options_of(type(self)) if (value := getattr(self, one.name)) != one.default}


def as_json(value: Any) -> Any:
    """An option's value as a JSON value."""
    if isinstance(value, Mapping):
        return {name: as_json(one) for name, one in value.items()}
    return list(value) if isinstance(value, tuple) else value


RULE_OPTIONS = ("selection", "selection_options")
"""Options that say which tokens are recomputed, the ratio apart."""
