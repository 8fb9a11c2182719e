"""Every error this package raises on purpose.

::

    CacheBlendError
    ├── ConfigError (ValueError)            an option is out of range or unknown
    ├── PromptError (ValueError)            a prompt cannot be used as given
    │   ├── ContextLengthError              it is longer than the model's context window
    ├── UnsupportedModelError               this model cannot be answered, or not in this way
    ├── ModelLoadError                      a model or tokenizer could not be loaded
    ├── StoreError                          the KV store cannot be opened or used
    │   ├── RecordError                     one record is damaged, foreign or of another version
    │   └── StoreUnreachableError           a store on another machine does not answer now
    ├── DocumentError                       a document or folder cannot be read
    ├── DatasetError (ValueError)           a file of questions has lines that cannot be used
    ├── EmbedderError                       an embedding model cannot be loaded or used
    ├── GenerationError                     generation ended before its answer was complete
    │   └── GenerationTimeoutError (TimeoutError)   it took longer than the caller allowed
    └── MissingExtraError (ImportError)     an optional package is not installed
"""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec


class CacheBlendError(Exception):
    """Base class of all errors of this package."""


class ConfigError(CacheBlendError, ValueError):
    """An option has a value it cannot take.

    Parameters
    ----------
    field : str
        Name of the option.
    value : object
        The value that was given.
    remedy : str
        An accepted value, as a phrase: "use a number from 0 to 1".
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field = field
        self.value = value
        self.remedy = remedy
        super().__init__(f"{field}={value!r} is not usable: {remedy}")


class PromptError(CacheBlendError, ValueError):
    """A prompt cannot be used as given."""


class ContextLengthError(PromptError):
    """A prompt with its answer, or a chunk, is longer than the model's context window.

    Parameters
    ----------
    tokens : int
        Tokens of the prompt, or of the chunk with what it is computed behind.
    new_tokens : int
        Tokens of the answer that must fit behind them.
    window : int
        Most tokens there may be.
    remedy : str
        The remedy, as a phrase: "retrieve fewer chunks".
    what : str
        The noun in the message.
    """

    def __init__(self, tokens: int, new_tokens: int, window: int, remedy: str, what: str = "the prompt") -> None:
        self.tokens, self.new_tokens, self.window = tokens, new_tokens, window
        self.remedy, self.what = remedy, what
        answer = f", {new_tokens:,} more are for the answer" if new_tokens else ""
        super().__init__(
            f"{what} has {tokens:,} tokens{answer}, and the model's context window is {window:,}: {remedy}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.tokens, self.new_tokens, self.window, self.remedy, self.what)


class UnsupportedModelError(CacheBlendError):
    """The blended pass does not know this kind of model, or transformers cannot go on from a prompt with it.

    Parameters
    ----------
    message : str
    reason : str
        The reason alone; by default the message.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        self.message, self.reason = message, reason or message
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.reason)


class ModelLoadError(CacheBlendError):
    """A model or its tokenizer could not be loaded."""


class StoreError(CacheBlendError):
    """The KV store cannot be opened or used."""


class RecordError(StoreError):
    """One stored record is damaged, foreign or of an unknown version; callers treat it as a miss."""


class StoreUnreachableError(StoreError):
    """A store on another machine does not answer now; what it holds may be whole, and counts as a miss."""


class DocumentError(CacheBlendError):
    """A document or a folder of documents cannot be read."""


class DatasetError(CacheBlendError, ValueError):
    """A file of questions cannot be read, or has lines that cannot be used; the message names them."""


class EmbedderError(CacheBlendError):
    """An embedding model cannot be loaded or used."""


class GenerationError(CacheBlendError):
    """Generation ended before its answer was complete."""


class GenerationTimeoutError(GenerationError, TimeoutError):
    """An answer was not complete in the time the caller allowed.

    Parameters
    ----------
    seconds : float
        That time.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(
            f"the answer was not complete after {seconds:g} s; allow more time, ask for fewer tokens, "
            "or use a smaller model"
        )


class MissingExtraError(CacheBlendError, ImportError):
    """An optional package is not installed.

    Parameters
    ----------
    package : str
        Name of the missing package.
    extra : str
        The extra of this project that installs it.
    """

    def __init__(self, package: str, extra: str) -> None:
        self.package = package
        self.extra = extra
        super().__init__(
            f"the package {package!r} is not installed; install it with: pip install 'cacheblend-rag[{extra}]'"
        )


def require(extra: str, *modules: str) -> None:
    """Raise a `MissingExtraError` for the first module of an extra that is not installed."""
    for name in modules:
        with suppress(ModuleNotFoundError):  # of a package around it
            if find_spec(name) is not None:
                continue
        raise MissingExtraError(name, extra)
