"""Vector stores that pass for another, whatever its class, and see some of the calls of it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Collection
from functools import partial, wraps
from typing import Any, TypeVar

from wrapt import ObjectProxy

from cacheblend_rag.errors import ForgetError

R = TypeVar("R")
T = TypeVar("T")
Forget = Callable[[list[str]], object]


class StoreProxy(ObjectProxy[Any]):
    """Passes for the vector store within, also to ``isinstance``; a subclass sees some calls.

    Parameters
    ----------
    store : object
        Not changed. Attributes that are set go into it.
    *more : object
        Everything else that a subclass needs.
    """

    def __init__(self, store: Any, *more: Any) -> None:
        super().__init__(store)
        self._self_more = more

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), (self.__wrapped__, *self._self_more)

    def __copy__(self) -> Any:
        return type(self)(self.__wrapped__, *self._self_more)

    def __deepcopy__(self, memo: Any) -> Any:
        return type(self)(*copy.deepcopy((self.__wrapped__, *self._self_more), memo))


class Leaving:
    """A method of a `StoreProxy` that forgets the texts which have left the store by it.

    The second thing that the proxy is made of erases the KV of texts (`Forget`).

    Parameters
    ----------
    reading : callable
        Takes the store and the method's arguments, and gives what reads the store before and after it (``before`` and
        ``left``, or ``abefore`` and ``aleft``); None if nothing can leave the store by this call.
    asynchronous : bool
        Whether the method is.
    """

    def __init__(self, reading: Callable[..., Any], *, asynchronous: bool = False) -> None:
        self._reading, self._asynchronous, self._name = reading, asynchronous, ""

    def __set_name__(self, owner: type[StoreProxy], name: str) -> None:
        self._name = name

    def __get__(self, proxy: StoreProxy | None, owner: type[StoreProxy]) -> Any:
        if proxy is None:
            return self
        inner, (forget, *_) = proxy.__wrapped__, proxy._self_more
        found = getattr(inner, self._name)

        @wraps(found)
        def call(*args: Any, **kwargs: Any) -> Any:
            read, again = self._reading(inner, *args, **kwargs), partial(found, *args, **kwargs)
            if read is None:
                return again()
            if self._asynchronous:
                return _calling_async(again, read.alist_present, read.afind_gone, forget)
            return _calling(again, read.list_present, read.find_gone, forget)

        return call


def _calling(
    call: Callable[[], R],
    list_present: Callable[[], T],
    find_gone: Callable[[T, bool], Collection[str]],
    forget: Forget,
) -> R:
    """Call a method of a store, and forget the texts that have left it then.

    A call that fails may have done a part of its work: what has left by then is forgotten, no more.
    """
    there, done = list_present(), False
    try:
        result = call()
        done = True
        return result
    finally:
        _forget(forget, find_gone(there, done))


async def _calling_async(
    call: Callable[[], Awaitable[R]],
    list_present: Callable[[], Awaitable[T]],
    find_gone: Callable[[T, bool], Awaitable[Collection[str]]],
    forget: Forget,
) -> R:
    """`_calling` of an asynchronous method."""
    there, done = await list_present(), False
    try:
        result = await call()
        done = True
        return result
    finally:
        await asyncio.to_thread(_forget, forget, await find_gone(there, done))


def _forget(forget: Forget, texts: Collection[str]) -> None:
    if not texts:
        return
    try:
        forget(list(texts))
    except Exception as error:
        raise ForgetError(list(texts), error) from error
