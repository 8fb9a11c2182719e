"""The counts of the source, on a small package whose numbers are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs.benchmarks.scripts.house import ClassSize, count_checkout, large_classes, main, read_sources

LIBRARY = '''"""A module."""

# A comment.
import threading
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

_known: dict[str, int] = {}
FIXED = {"a": 1}
_lock = threading.Lock()


class Options(TypedDict):
    """An option."""

    size: int


class More(Options):
    """It has one more."""


class Reader(Protocol):
    def read(self) -> Any: ...


@dataclass(frozen=True)
class Value:
    """A value
    of two lines."""

    size: int  # as it is

    @property
    def double(self) -> int:
        return _doubled(self.size)


class Counting:
    def count(self) -> None:
        self.counted = True


class Still:
    def look(self) -> bool:
        return True


counting, still = None, None
state = Counting()
quiet = Still()


def _doubled(size: int) -> int:
    """Twice as much."""
    _known["size"] = size
    return 2 * size


def _used_twice() -> int:
    try:
        return len(FIXED)
    except Exception:
        return 0


def use() -> int:
    return _used_twice() + _used_twice()
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {"__init__": '"""A package."""\n', "store/base": LIBRARY, "app/cli": "class Value:\n    pass\n"}
    for name, text in files.items():
        path = tmp_path / "cacheblend_rag" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def test_library_and_programs_are_counted_apart(checkout: Path) -> None:
    found = count_checkout(checkout)
    every, library, app = found["all"], found["library"], found["app"]
    assert (every["lines"], library["lines"], app["lines"]) == (len(LIBRARY.splitlines()) + 3, every["lines"] - 2, 2)
    assert every["lines"] == sum(every[name] for name in ("code", "docstring", "comment", "blank"))
    assert (library["files"], app["files"], app["functions"], app["code"]) == (2, 1, 0, 2)
    assert every["class_names_in_two_files"] == ["Value"]
    assert library["class_names_in_two_files"] == []


def test_each_count_is_that_of_the_text(checkout: Path) -> None:
    library = count_checkout(checkout)["library"]
    assert (library["docstring"], library["comment"]) == (7, 1)
    assert (library["classes"], library["dataclasses"], library["protocols"], library["typed_dicts"]) == (6, 1, 1, 2)
    assert (library["functions"], library["properties"], library["median_function"]) == (7, 1, 2)
    assert (library["private_functions"], library["private_with_one_reference"]) == (2, 1)
    assert library["private_small_with_one_reference"] == 1
    assert (library["broad_excepts"], library["synchronising"], library["any"]) == (1, 1, 1)
    assert library["registries"] == ["store.base._known", "store.base.state"]


def test_class_with_too_many_methods_or_lines_is_named(checkout: Path) -> None:
    many = "class Many:\n" + "    def m{}(self): ...\n" * 26
    long = "class Long:\n" + "    x = 1\n" * 400
    just = "class Just:\n" + "    x = 1\n" * 399
    text = many.format(*range(26)) + long + just
    (checkout / "cacheblend_rag" / "store" / "large.py").write_text(text, encoding="utf-8")
    found = large_classes(read_sources(checkout))
    assert found == [ClassSize("store.large.Long", 0, 401), ClassSize("store.large.Many", 26, 27)]


def test_checkouts_stand_side_by_side_and_the_last_line_is_json(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--root", str(checkout), str(Path(__file__).parent.parent.parent)]) == 0
    head, *_, last = capsys.readouterr().out.splitlines()
    names = list(json.loads(last))
    assert (
        head == "|  | " + " | ".join(f"{name}, {half}" for name in names for half in ("all", "library", "app")) + " |"
    )


def test_folder_outside_a_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="name the root of a checkout"):
        main(["--root", str(tmp_path)])
