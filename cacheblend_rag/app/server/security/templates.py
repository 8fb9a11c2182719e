"""Chat templates within bounds: what a request may hand to one, and how long making a prompt may take."""

from __future__ import annotations

import ctypes
import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jinja2.defaults import DEFAULT_NAMESPACE

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.prompt.thoughts import template_variables

# Names that transformers gives every template, besides the arguments of `apply_chat_template`.
_GIVEN = {"messages", "raise_exception", "strftime_now", *DEFAULT_NAMESPACE}


def check_arguments(tokenizer: Any, given: Mapping[str, Any]) -> None:
    """Refuse what the template does not read. A template of the request's own would run its own program.

    Raises
    ------
    Problem
        400 that names the argument, and those there are.
    """
    if not given:
        return
    read = template_variables(str(tokenizer.chat_template or ""))
    taken = inspect.signature(tokenizer.apply_chat_template).parameters
    known = read - _GIVEN - set(taken) - set(tokenizer.special_tokens_map)
    for name in given:
        if name not in known:
            remedy = f"use {', '.join(sorted(known))}" if known else "this template takes no arguments: leave it out"
            message = f"chat_template_kwargs has {name[:64]!r}, which the model's chat template does not take; {remedy}"
            raise Problem(400, "bad_value", message, field="chat_template_kwargs")


class _OverdueError(BaseException):
    """The time is over; nothing on the way catches it."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """End what this thread does within this when the time is over.

    Python code is ended between two of its steps, also within a loop. One call of compiled code is not.

    Raises
    ------
    Problem
        400 if the time is over.
    """
    thread, lock, over = ctypes.c_ulong(threading.get_ident()), threading.Lock(), False

    def interrupt() -> None:
        with lock:
            if not over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_OverdueError))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    try:
        try:
            timer.start()
            yield
        finally:
            timer.cancel()
            with lock:
                over = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)  # one that was sent and has not come yet
    except _OverdueError:
        message = f"making the prompt took longer than {seconds:g} s; send fewer or shorter messages"
        raise Problem(400, "prompt_timeout", message) from None
