"""The sizes of the package, its tests and its documentation, each within the limit that `budgets.toml` sets.

``python -m tests.test_budgets`` prints all sizes as JSON.
"""

from __future__ import annotations

import ast
import json
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from cacheblend_rag.config import BlendConfig

ROOT = Path(__file__).parent.parent
RULE = "a capability enters when another leaves, or with a table that shows who gains"
LIMITS: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "tests" / "budgets.toml").read_text(encoding="utf-8"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree_of(path: Path) -> ast.Module:
    """Syntax tree of a Python file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def python_files(folder: str) -> list[Path]:
    """All Python files below a folder of the project."""
    return sorted((ROOT / folder).rglob("*.py"))


@cache
def definitions(path: Path) -> list[ast.Module | ast.ClassDef | Function]:
    """A Python file's module, classes and functions."""
    statements: list[ast.AST] = [tree_of(path)]
    for node in statements:
        inner = (ast.stmt, ast.excepthandler, ast.match_case)
        statements += [child for child in ast.iter_child_nodes(node) if isinstance(child, inner)]
    return [node for node in statements if isinstance(node, (ast.Module, ast.ClassDef, *Function.__args__))]


def code_lines(path: Path) -> int:
    """Lines of a Python file without docstrings, comments and blank lines."""
    documented = [node.body[0] for node in definitions(path) if ast.get_docstring(node, clean=False) is not None]
    described = {line for one in documented for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)}
    lines = path.read_text(encoding="utf-8").splitlines()
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in described
        for number, line in enumerate(lines, 1)
    )


def functions(folder: str) -> int:
    """Number of functions and methods below a folder."""
    return sum(isinstance(node, Function) for path in python_files(folder) for node in definitions(path))


def _first_type(function: Function) -> str:
    """Name of the class that annotates a function's first parameter; empty if there is none."""
    parameters = function.args.posonlyargs + function.args.args
    annotation = parameters[0].annotation if parameters else None
    if isinstance(annotation, ast.Constant):
        return str(annotation.value)
    return annotation.id if isinstance(annotation, ast.Name) else ""


def class_sizes() -> dict[str, tuple[int, int]]:
    """Methods and lines of each class of the package; functions whose first parameter it is count as methods."""
    paths = python_files("cacheblend_rag")
    outside = Counter(_first_type(node) for path in paths for node in tree_of(path).body if isinstance(node, Function))
    return {
        node.name: (
            sum(isinstance(one, Function) for one in node.body) + outside[node.name],
            (node.end_lineno or node.lineno) - node.lineno + 1,
        )
        for path in paths
        for node in definitions(path)
        if isinstance(node, ast.ClassDef)
    }


def words(name: str) -> int:
    """Words of a Markdown file, or of all those below a folder."""
    paths = [ROOT / name] if name.endswith(".md") else (ROOT / name).rglob("*.md")
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def lines_below(folder: str) -> int:
    """Lines of all files directly in a folder."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).iterdir())


def sizes() -> dict[str, dict[str, Any]]:
    """All sizes, in the order of the limits."""
    package = sum(map(code_lines, python_files("cacheblend_rag")))
    return {
        "code": {name: sum(map(code_lines, python_files(name))) for name in LIMITS["code"]},
        "page": {name: lines_below(name) for name in LIMITS["page"]},
        "words": {name: words(name) for name in LIMITS["words"]},
        "other": {
            "functions_per_1000_lines": round(1000 * functions("cacheblend_rag") / package),
            "engine_options": len(BlendConfig.names()),
        },
    }


def test_every_part_is_within_its_budget() -> None:
    over = {
        f"{name} ({kind})": f"{size} of {LIMITS[kind][name]}"
        for kind, found in sizes().items()
        for name, size in found.items()
        if size > LIMITS[kind][name]
    }
    assert over == {}, f"over budget: {over}; {RULE}"


def test_every_room_has_a_budget() -> None:
    rooms = {f"cacheblend_rag/{path.parent.name}" for path in (ROOT / "cacheblend_rag").glob("*/__init__.py")}
    assert rooms - LIMITS["code"].keys() == set(), f"give it a limit in tests/budgets.toml: {RULE}"


def test_no_class_is_too_large_to_hold_in_mind() -> None:
    methods, lines, known = LIMITS["other"]["methods"], LIMITS["other"]["class_lines"], LIMITS["large"]
    large = {name: size for name, size in class_sizes().items() if size[0] > methods or size[1] > lines}
    grown = {
        name: size
        for name, size in large.items()
        if any(now > then for now, then in zip(size, known.get(name, (0, 0)), strict=True))
    }
    assert grown == {}, f"at most {methods} methods and {lines} lines; {RULE}"
    assert known.keys() - large.keys() == set(), "these fit now: take them off the list in tests/budgets.toml"


def test_docstrings_are_not_code(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(
        '"""About."""\n\n# a comment\ndef one() -> int:\n    """Return 1."""\n    return 1\n', encoding="utf-8"
    )
    assert code_lines(path) == 2


if __name__ == "__main__":
    print(
        json.dumps(sizes() | {"large": {k: v for k, v in class_sizes().items() if v[0] > 25 or v[1] > 400}}, indent=1)
    )
