"""Schemas of strangers, compiled in a process of its own before they are compiled here.

Some small schemas take hours or all memory to compile, and nothing can stop that within a process. So a schema comes
first to one that holds itself within limits (`sandbox`). A grammar that passes there passes here, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache

from cacheblend_rag.app.server.security.sandbox import confine, isolated
from cacheblend_rag.app.server.settings import Limits
from cacheblend_rag.engine.grammar import Form, fault_of, schema_error, write_grammar
from cacheblend_rag.errors import ConfigError

_PASSED = 64  # remembered of a tenant
_DEEPEST = 64


class SchemaCheck:
    """Refuses schemas that cannot be compiled within limits; remembers those of one tenant that can.

    Parameters
    ----------
    limits : Limits
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._passed = lru_cache(_PASSED)(self._compile_aside)

    def check(self, forms: Sequence[Form], field: str) -> None:
        """Compile the schemas of a request elsewhere.

        Parameters
        ----------
        forms : sequence of Form
        field : str
            Its name in the request.

        Raises
        ------
        ConfigError
            If one is too large, or does not compile within the limits.
        """
        if any(_deeper(form.schema, _DEEPEST) for form in forms):
            raise ConfigError(field, "…", f"use schemas with at most {_DEEPEST} levels")
        grammar = write_grammar(forms)
        if len(grammar) > self._limits.schema_chars:
            raise ConfigError(field, "…", f"use schemas of at most {self._limits.schema_chars:,} characters together")
        self._passed(grammar, field)

    def _compile_aside(self, grammar: str, field: str) -> None:
        """Compile a grammar in a process of its own; refuse one that is wrong or takes too much."""
        limits = self._limits
        try:
            ended = subprocess.run(
                **isolated(__name__, [str(limits.schema_bytes), str(limits.schema_seconds)]),
                input=grammar.encode(),
                # The limit of processor time ends it sooner, unless the machine is busy.
                timeout=4 * limits.schema_seconds,
                check=True,
            )
            fault = json.loads(ended.stdout)
        except (subprocess.SubprocessError, ValueError):
            took = f"{limits.schema_seconds:g} s and {limits.schema_bytes / 1e6:,.0f} MB"
            raise ConfigError(field, "…", f"use a simpler schema; compiling this one takes more than {took}") from None
        if fault:
            raise schema_error(field, str(fault))


def _deeper(value: object, levels: int) -> bool:
    """Whether objects and lists stand within each other at more levels than so many."""
    layer = [value]
    for _ in range(levels + 1):
        layer = [
            inner
            for one in layer
            for inner in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
        ]
    return bool(layer)


def main(arguments: list[str]) -> int:
    """The process that compiles: a grammar on standard input, what is wrong with it on standard output."""
    grammar = sys.stdin.buffer.read().decode()
    fault_of('start: "a"')  # all of the library is loaded before files are out of reach
    confine(int(arguments[0]), float(arguments[1]))
    sys.stdout.write(json.dumps(fault_of(grammar)))
    return 0
