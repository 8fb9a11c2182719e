"""Options of the engine: frozen, validated once, each also settable by environment variable."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from cacheblend_rag.errors import ConfigError


def is_whole(value: object) -> bool:
    """Whether a value is an int, which a bool is not here."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_whole(name: str, value: object, lowest: int = 0) -> None:
    """A whole number of at least ``lowest``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ConfigError(name, value, f"use a whole number, {lowest} or more")


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """One of a few names."""
    if value not in allowed:
        raise ConfigError(name, value, "use one of " + ", ".join(map(repr, allowed)))


def check_above_zero(name: str, value: object) -> None:
    """A number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(name, value, "use a number above 0")


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def check_share(name: str, value: object) -> None:
    """A number from 0 to 1."""
    if not _is_share(value):
        raise ConfigError(name, value, "use a number from 0 to 1")


def check_shares(name: str, values: object) -> None:
    """A sequence of numbers from 0 to 1."""
    if not isinstance(values, (tuple, list)):
        raise ConfigError(name, values, "use a tuple of numbers, such as (0.2, 0.1)")
    if not all(map(_is_share, values)):
        raise ConfigError(name, values, "use numbers from 0 to 1")


def flat_or_falling(name: str, ratios: Sequence[float]) -> None:
    """Ratios that never rise."""
    if any(after > before for before, after in pairwise(ratios)):
        raise ConfigError(name, ratios, "use ratios that never rise; a row that was dropped cannot return")


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
    """Names of options that there are; the error gives the nearest."""
    for name, value in given:
        if name not in known:
            nearest = get_close_matches(name, known, n=1)
            remedy = f"did you mean {nearest[0]!r}?" if nearest else "use one of " + ", ".join(sorted(known))
            raise ConfigError(name, value, f"there is no such option; {remedy}")


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
    """Layers the model has."""
    if wanted and wanted[-1] >= layers:
        raise ConfigError(name, tuple(wanted), f"this model has layers 0 to {layers - 1}")


ENV_PREFIX = "CACHEBLEND_RAG_"
# Names of the starter models, which commands use unless another model is named.
DEFAULT_MODEL = "smollm2"
DEFAULT_EMBEDDER = "minilm"
CONDITIONS = ("auto", "context", "learned", "sink", "prefix")
MOST_CONTEXTS = 4
_OVERFLOWS = ("error", "drop_chunks")
_WRITE_BACKS = ("background", "inline", "off")
LEAST_RATIO = 0.15
"""r* of the paper: no recompute ratio that a controller chooses is smaller, unless calibration found one."""
# Element types that a model can be loaded in.
DTYPES = ("auto", "float32", "bfloat16", "float16")
CODEC_NAMES = ("raw", "int8", "int4")

_T = TypeVar("_T")
_OPTIONS: dict[str, Option] = {}  # by name; not in the field's metadata, which pydantic would read
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def parse_bytes(value: int | str, field_name: str = "size_limit") -> int:
    """Read a size in bytes from a number or from text such as ``"20GB"`` or ``"512 MiB"``.

    Raises
    ------
    ConfigError
        If the value is not a positive size.
    """
    remedy = 'use a positive number of bytes or text such as "20GB" or "512MiB"'
    if isinstance(value, bool):
        raise ConfigError(field_name, value, remedy)
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", value, re.IGNORECASE)
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(field_name, value, remedy)
        size = int(float(match[1]) * _UNITS[match[2].lower()])
    elif isinstance(value, int):
        size = value
    else:
        raise ConfigError(field_name, value, remedy)
    if size <= 0:
        raise ConfigError(field_name, value, remedy)
    return size


def default_data_path() -> Path:
    """Where the command line keeps index and KV unless it is told otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "cacheblend_rag"


def _layers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _ratios(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(",") if part.strip())


@dataclass(frozen=True)
class Option:
    """Description of an option, of `BlendConfig` or of the server, besides its type.

    Parameters
    ----------
    name : str
    default : object
        Its value when neither the caller nor the environment says anything.
    parse : callable
        Reads it from text.
    like : str
        A value as it is written in the environment; by default the default.
    rule : bool
        Whether it says which tokens are recomputed, the ratio apart.
    flag : str
        Its name on the command line, without dashes; empty if it has none there.
    metavar, help, shown : str
        Its parts in the help of the command line: the metavar, and its default if that is shown otherwise.
    prefix : str
        Prefix of its name in the environment, behind ``CACHEBLEND_RAG_``.
    repeats : bool
        Whether the command line takes it several times; ``parse`` then gets a list of texts, too.
    """

    name: str
    default: Any
    parse: Callable[[str], object]
    like: str = ""
    rule: bool = False
    flag: str = ""
    metavar: str = ""
    help: str = ""
    shown: str = ""
    prefix: str = ""
    repeats: bool = False

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return ENV_PREFIX + self.prefix + self.name.upper()

    @property
    def help_line(self) -> str:
        """Its line in the help of the command line, with its default."""
        return f"{self.help} (default: {self.shown or self.default})"

    def from_environment(self) -> Any:
        """Its value in the environment, else its default."""
        text = os.environ.get(self.variable)
        return self.default if text is None else self.read(text, self.variable)

    def read(self, text: str, source: str) -> Any:
        """Its value from text.

        Raises
        ------
        ConfigError
            If the text is no such value; the message names its source.
        """
        try:
            return self.parse(text)
        except ConfigError as error:
            raise ConfigError(source, text, error.remedy) from error
        except ValueError as error:
            raise ConfigError(source, text, f"use a value like {self.like or repr(self.default)}") from error


def _option(
    name: str, default: _T, parse: Callable[[str], object], like: str = "", *, hashed: bool = True, **more: Any
) -> Any:
    """A dataclass field whose default is read from its environment variable when that is set; see `Option`."""
    option = _OPTIONS[name] = Option(name, default, parse, like, **more)
    return field(default_factory=option.from_environment, hash=None if hashed else False)


class BlendOptions(TypedDict, total=False):
    """The options of `BlendConfig`, for functions that take them one by one."""

    separator: str
    split_at_separator: bool
    recompute_ratio: float | str
    selection: Any
    check_layers: tuple[int, ...]
    recompute_ratios: tuple[float, ...]
    selection_options: Mapping[str, Any]
    min_tokens: int
    overflow: str
    condition: str
    contexts: int
    write_back: str
    session_cache: bool
    prefetch: bool
    size_limit: int | str
    memory_limit: int | str
    codec: str
    salt: str
    like: str
    max_concurrent: int
    prompt_lookup: int
    guard_share: float
    guard_bound: float
    prepack_weights: bool | str
    check_model: bool


@dataclass(frozen=True, kw_only=True)
class BlendConfig:
    """How prompts are split, which tokens are recomputed, and where KV is kept.

    An option that is not given is read from the environment variable ``CACHEBLEND_RAG_<NAME>``
    (for instance ``CACHEBLEND_RAG_RECOMPUTE_RATIO=0.2``), else it has the default shown.

    Parameters
    ----------
    separator : str
        Text between the segments of a `Prompt` that does not say what stands between its chunks, and around a
        chunk whose KV is computed ahead of time. Prompts of chains are read as they were written.
    split_at_separator : bool
        Split a prompt that comes as one text at every separator. Leave it off where text comes from outside: a
        question that holds the separator would be split, too.
    recompute_ratio : float or "auto"
        Share of the reused chunk tokens that is recomputed on every layer from the check layer
        on, from 0 to 1 (section 4.3 of the CacheBlend paper; 0.15 there). ``"auto"`` lets the loading
        controller choose it for each request, once ``cacheblend-rag profile`` has been run: as much as
        loading hides, but never less than 0.15. Until then it is 0.15. Once ``cacheblend-rag calibrate`` has been
        run, ``"auto"`` is the rule, check layers and schedule it found, as long as none of these options is given.
    selection : str or SelectionRule
        Which tokens are recomputed: a rule, or the name of one. ``"query"`` recomputes what the question attends to
        most, ``"boundary"`` the first tokens of each chunk, ``"hkvd"`` those of highest KV deviation, as the paper
        does; ``"none"`` is full KV reuse, ``"all"`` is full KV recompute; also ``"gradual"`` and ``"random"``.
    check_layers : tuple of int
        Layers at which KV deviation is measured; the first is 1 or higher, since the KV of
        layer 0 depends on the token alone and never deviates.
    recompute_ratios : tuple of float
        Shares that never rise, in place of ``recompute_ratio``: one for each check layer
        (``"hkvd"``), or for the first check layer and those after it (``"gradual"``).
    selection_options : dict
        Options of single rules, such as ``{"score_layers": [28]}`` for ``"query"``; in the
        environment, as JSON.
    min_tokens : int
        A prompt with fewer chunk tokens than this is answered by plain prefill.
    overflow : {"error", "drop_chunks"}
        For a prompt that the model's context window does not hold: refuse it, or leave out whole chunks from the end
        until it fits. Change it where a shorter context is better than no answer, and
        retrieval gives the best chunks first.
    condition : {"auto", "context", "learned", "sink", "prefix"}
        The tokens that a chunk is computed behind before it is stored. ``"context"``: stretches of chunks that it
        belongs with, those beside it where chunks are warmed, those retrieved with it otherwise; they are dropped
        afterwards, and the chunk hits wherever it stands. ``"learned"``: these, and one more context that
        ``cacheblend-rag adapt`` learned for this model and keeps beside the store. ``"sink"``: only the fixed tokens
        that open every text, as in the paper; chunks are stored in half of the time, and answers are further from full
        prefill. ``"prefix"``: the actual prefix, which is exact directly behind it; another prefix is another record.
        ``"auto"``: what ``cacheblend-rag calibrate`` found, else ``"learned"`` where the model was adapted, else
        ``"context"``. Change it where storing takes too long, or where every prompt has one chunk behind one prefix.
    contexts : int
        Over how many stretches of other chunks the KV of a chunk is averaged, from 1 to 4. More are a little nearer to
        full prefill, and storing takes as many times longer. Beside a learned context, which counts as one more, it
        may be 0: storing is then as fast as with ``"sink"``, and no chunk depends on another.
    write_back : {"background", "inline", "off"}
        When chunks that were missing are stored: after the answer when nothing else waits,
        before the call returns, or never.
    session_cache : bool
        Keep the KV of finished prompts and their answers, so that the next turn of a conversation,
        or the same prompt again, continues from it. It is that of a blended pass, and so
        approximate; questions and answers are then stored too.
    prefetch : bool
        Read the KV of the next layer while this one is fused, where reading is slow enough to pay
        for it.
    size_limit : int or str
        Bytes the KV store may take, as a number or as text such as ``"20GB"``.
    memory_limit : int or str
        Bytes of memory that hold copies of records above a folder; 0 for none. ``"auto"`` is a quarter of what is free
        if the model is on a GPU, else none; applications such as ``ask`` and ``serve`` then choose for themselves.
    codec : {"raw", "int8", "int4"}
        How the KV of chunks is written to a folder or a shared store: as it is, or in fewer bits
        (docs/reference/kv-record.md). Choose ``"raw"`` where a chunk that stands where it was computed must be exact.
    salt : str
        Tenants with different salts never share a record.
    like : str
        Treat a model of a family that is not known as one of this family; empty for no such try.
    max_concurrent : int
        Most answers that are under way at once. A request that comes is then let in between two tokens of the others,
        as long as memory has room for its KV, and they take their steps together: each weight is read once for all.
        Rounding then differs with the other requests. With 1, requests are answered one after another.
    prompt_lookup : int
        Most tokens of an answer that are tried at once where the prompt, or the answer so far, seems to have them
        already; 0 for none. A way that is tried and not chosen changes nothing but the time, so answers stay the same
        up to rounding. On a CPU, while one answer alone is under way.
    guard_share : float
        Share of requests that a quality guard checks: a full prefill in the background, when nothing
        else waits, and how far the blended answer was from it. 0 checks none.
    guard_bound : float
        Mean KL divergence, in nats a token, past which the guard raises the recompute ratio.
    prepack_weights : bool or "auto"
        Keep copies of linear weights in the order in which oneDNN multiplies by them: faster for few rows, on a
        CPU in bfloat16, for as much memory again. ``"auto"`` does where the processor has such arithmetic of its
        own and copies take at most a quarter of the machine's memory. True refuses a model that cannot gain. In
        float32 ``"auto"`` multiplies by oneDNN, without copies, on AMD's processors with AVX-512. With False linear
        layers multiply as PyTorch does.
    check_model : bool
        Once at load, blend a dozen tokens and compare with the model's own forward pass, so that
        a transformers version that has moved is refused instead of answering wrongly.

    Raises
    ------
    ConfigError
        If a value is out of range or unknown; the message names the option and the remedy.
    """

    separator: str = _option("separator", "\n\n", str)
    split_at_separator: bool = _option("split_at_separator", False, lambda text: _flag(text))
    recompute_ratio: float | str = _option(
        "recompute_ratio",
        "auto",
        lambda text: _ratio(text),
        like="0.15 or auto",
        flag="ratio",
        metavar="R",
        help="recompute ratio, 0 to 1",
    )
    selection: Any = _option("selection", "query", str, rule=True)  # noqa: RUF009
    check_layers: tuple[int, ...] = _option("check_layers", (1,), _layers, rule=True)
    recompute_ratios: tuple[float, ...] = _option("recompute_ratios", (), _ratios, like="'0.2,0.1'", rule=True)
    selection_options: Mapping[str, Any] = _option(
        "selection_options", {}, json.loads, like="""'{"seed": 1}'""", hashed=False, rule=True
    )
    min_tokens: int = _option("min_tokens", 256, int)
    overflow: str = _option("overflow", "error", str)
    condition: str = _option("condition", "auto", str)
    contexts: int = _option("contexts", 2, int)
    write_back: str = _option("write_back", "background", str)
    session_cache: bool = _option("session_cache", False, lambda text: _flag(text))
    prefetch: bool = _option("prefetch", True, lambda text: _flag(text))
    size_limit: int | str = _option(
        "size_limit",
        10 * 10**9,
        lambda text: parse_bytes(text),
        flag="size-limit",
        metavar="SIZE",
        shown="10 GB",
        help='bytes the KV store may take, such as "20GB"',
    )
    memory_limit: int | str = _option("memory_limit", "auto", lambda text: _memory_limit(text))
    codec: str = _option("codec", "int8", str)
    salt: str = _option("salt", "", str)
    like: str = _option("like", "", str)
    max_concurrent: int = _option("max_concurrent", 1, int)
    prompt_lookup: int = _option("prompt_lookup", 6, int)
    guard_share: float = _option("guard_share", 0.0, float)
    guard_bound: float = _option("guard_bound", 0.1, float)
    prepack_weights: bool | str = _option(
        "prepack_weights", "auto", lambda text: _flag_or_auto(text), like="auto, on or off"
    )
    check_model: bool = _option("check_model", True, lambda text: _flag(text))

    def __post_init__(self) -> None:
        object.__setattr__(self, "size_limit", parse_bytes(self.size_limit))
        object.__setattr__(self, "memory_limit", _memory_limit(self.memory_limit))
        if not isinstance(self.separator, str) or not self.separator:
            raise ConfigError("separator", self.separator, "use a text that is not empty")
        if self.recompute_ratio != "auto":
            check_share("recompute_ratio", self.recompute_ratio)
        if not isinstance(self.selection, str) and not callable(getattr(self.selection, "keep", None)):
            raise ConfigError("selection", self.selection, "use the name of a rule, such as 'hkvd', or a rule")
        check_choice("overflow", self.overflow, _OVERFLOWS)
        check_choice("condition", self.condition, CONDITIONS)
        check_choice("write_back", self.write_back, _WRITE_BACKS)
        check_choice("codec", self.codec, CODEC_NAMES)
        check_whole("min_tokens", self.min_tokens)
        check_whole("max_concurrent", self.max_concurrent, 1)
        check_whole("prompt_lookup", self.prompt_lookup)
        if not is_whole(self.contexts) or not 0 <= self.contexts <= MOST_CONTEXTS:
            raise ConfigError("contexts", self.contexts, f"use a whole number from 0 to {MOST_CONTEXTS}")
        check_share("guard_share", self.guard_share)
        check_above_zero("guard_bound", self.guard_bound)
        for name in ("split_at_separator", "session_cache", "prefetch", "check_model"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, getattr(self, name), "use True or False")
        if self.prepack_weights != "auto" and not isinstance(self.prepack_weights, bool):
            raise ConfigError("prepack_weights", self.prepack_weights, "use True, False or 'auto'")
        for name, remedy in (("salt", "an empty one is shared by all who set none"), ("like", "a family's name")):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(name, getattr(self, name), f"use a text; {remedy}")
        check_layer_list("check_layers", self.check_layers)
        object.__setattr__(self, "check_layers", tuple(self.check_layers))
        check_shares("recompute_ratios", self.recompute_ratios)
        object.__setattr__(self, "recompute_ratios", tuple(self.recompute_ratios))
        options = self.selection_options
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            raise ConfigError("selection_options", options, 'use a dict of options, such as {"seed": 1}')
        object.__setattr__(self, "selection_options", dict(options))

    @property
    def text_separator(self) -> str:
        """Where a prompt that comes as one text is split; empty for nowhere."""
        return self.separator if self.split_at_separator else ""

    @property
    def store_bytes(self) -> int:
        """``size_limit`` in bytes."""
        return parse_bytes(self.size_limit)

    @property
    def ratio(self) -> float:
        """The recompute ratio, or the least one if a controller is to choose it."""
        return LEAST_RATIO if isinstance(self.recompute_ratio, str) else self.recompute_ratio

    @property
    def memory_bytes(self) -> int:
        """``memory_limit`` in bytes."""
        return 0 if isinstance(self.memory_limit, str) else self.memory_limit

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of all options."""
        return tuple(f.name for f in fields(cls))

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        """Description of each option, in their order."""
        return tuple(_OPTIONS[name] for name in cls.names())

    @classmethod
    def default(cls, name: str) -> Any:
        """Value of an option that neither the caller nor the environment sets."""
        return _OPTIONS[name].default

    def asdict(self) -> dict[str, Any]:
        """All options by name, as JSON would have them; ``BlendConfig(**config.asdict())`` is the same again."""
        values = {name: getattr(self, name) for name in self.names()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def changed(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        return {name: value for name in self.names() if (value := getattr(self, name)) != self.default(name)}


RULE_OPTIONS = tuple(option.name for option in BlendConfig.options() if option.rule)
"""Options that say which tokens are recomputed, the ratio apart."""


def _ratio(text: str) -> float | str:
    return "auto" if text.strip().lower() == "auto" else float(text)


def _memory_limit(value: int | str) -> int | str:
    """A size in bytes, 0, or "auto"."""
    if str(value).strip().lower() == "auto":
        return "auto"
    return 0 if str(value) == "0" else parse_bytes(value, "memory_limit")


def _flag_or_auto(text: str) -> bool | str:
    return "auto" if text.strip().lower() == "auto" else _flag(text)


def flag_from_environment(name: str, default: bool) -> bool:
    """A choice of ``CACHEBLEND_RAG_<NAME>`` that is no option of the engine.

    Raises
    ------
    ConfigError
        If the variable holds something else than on or off.
    """
    variable = ENV_PREFIX + name.upper()
    text = os.environ.get(variable)
    try:
        return default if text is None else _flag(text)
    except ValueError as error:
        raise ConfigError(variable, text, "use on or off") from error


def _flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)
