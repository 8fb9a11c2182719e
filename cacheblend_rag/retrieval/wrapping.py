"""Wrappers that pass for the vector store within, whatever its class, and see some of the calls of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from functools import partial, wraps
from types import MethodType, new_class
from typing import Any, TypeVar, cast

from cacheblend_rag.errors import ForgetError

R = TypeVar("R")
T = TypeVar("T")
Forget = Callable[[list[str]], object]

_OWN = frozenset({"__class__", "__copy__", "__deepcopy__", "__reduce_ex__"})


class Wrapper:
    """Passes everything on to the wrapped store; a subclass changes what calls of its methods do."""

    # Copying goes through __reduce_ex__, whatever the wrapped class has.
    __copy__ = __deepcopy__ = None

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__
        if name in _OWN:
            return own(self, name)
        state = own(self, "__dict__")
        found = getattr(state["inner"], name)
        if name == "as_retriever":  # the retriever searches this store, not the one within
            return MethodType(type(state["inner"]).as_retriever, self)
        return own(self, "_seen")(name, found, **state)

    @staticmethod
    def _seen(name: str, found: Any, inner: Any, **state: Any) -> Any:
        """An attribute of the wrapped store, as users of the wrapper see it."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "__dict__")["inner"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(object.__getattribute__(self, "__dict__")["inner"], name)

    def __dir__(self) -> list[str]:
        return dir(object.__getattribute__(self, "__dict__")["inner"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind = next(base for base in type(self).__mro__ if base.__base__ is Wrapper)
        return _rebuilt, (kind, object.__getattribute__(self, "__dict__"))


def wrapped(kind: type[Wrapper], store: T, **state: Any) -> T:
    """A wrapper around a store.

    Parameters
    ----------
    kind : type
        Subclass of `Wrapper`.
    store : object
        Not changed.
    **state
        Arguments of the wrapper's ``_seen``, beside the store.

    Returns
    -------
    object
        Behaves as the store, also to ``isinstance``.
    """
    return cast(T, _rebuilt(kind, {"inner": store, **state}))


def _rebuilt(kind: type[Any], state: dict[str, Any]) -> Any:
    made = object.__new__(_kind_of(kind, type(state["inner"])))
    object.__setattr__(made, "__dict__", dict(state))
    return made


_kinds: dict[Any, type[Any]] = {}


def _kind_of(kind: type[Any], inner: type[Any]) -> type[Any]:
    """A class of wrappers that pass for stores of a class."""
    while issubclass(inner, Wrapper):
        inner = inner.__bases__[1]
    if (kind, inner) not in _kinds:
        names = {name: getattr(inner, name) for name in ("__module__", "__qualname__", "__doc__")}
        _kinds[kind, inner] = new_class(inner.__name__, (kind, inner), exec_body=lambda space: space.update(names))
    return _kinds[kind, inner]


# Calls after which texts may no longer be in a store ----------------------------------------------


def forgetting_call(found: Any, reading: Callable[..., Any], forget: Forget, asynchronous: bool) -> Any:
    """A method of a store that forgets the texts which have left the store by it.

    Parameters
    ----------
    found : callable
        The method.
    reading : callable
        Takes the method's arguments, and gives what reads the store before and after it (``before`` and ``left``, or
        ``abefore`` and ``aleft``); None if nothing can leave the store by this call.
    forget : callable
        Erases the KV of texts.
    asynchronous : bool
        Whether the method is.
    """

    @wraps(found)
    def call(*args: Any, **kwargs: Any) -> Any:
        read, again = reading(*args, **kwargs), partial(found, *args, **kwargs)
        if read is None:
            return again()
        if asynchronous:
            return _calling_async(again, read.abefore, read.aleft, forget)
        return _calling(again, read.before, read.left, forget)

    return call


def _calling(
    call: Callable[[], R], before: Callable[[], T], left: Callable[[T, bool], Collection[str]], forget: Forget
) -> R:
    """Call a method of a store, and forget the texts that have left it then.

    A call that fails may have done a part of its work: what has left by then is forgotten, no more.
    """
    there, done = before(), False
    try:
        result = call()
        done = True
        return result
    finally:
        _forget(forget, left(there, done))


async def _calling_async(
    call: Callable[[], Awaitable[R]],
    before: Callable[[], Awaitable[T]],
    left: Callable[[T, bool], Awaitable[Collection[str]]],
    forget: Forget,
) -> R:
    """`_calling` of an asynchronous method."""
    there, done = await before(), False
    try:
        result = await call()
        done = True
        return result
    finally:
        await asyncio.to_thread(_forget, forget, await left(there, done))


def _forget(forget: Forget, texts: Collection[str]) -> None:
    if not texts:
        return
    try:
        forget(list(texts))
    except Exception as error:
        raise ForgetError(list(texts), error) from error
