"""Counts of the package's source: lines, classes, functions, and what is larger or smaller than it should be.

``python -m docs.benchmarks.scripts.house --root ../before .``

Each root is a checkout. The table has three columns for each: the whole package, the library (all but the room
``app``), and the programs (``app`` and ``__main__``). A function's lines are all from ``def`` to its end. The last line
is the same as JSON. Nothing of the package is imported.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

__all__ = ["HALVES", "ClassSize", "SourceFile", "commit_of", "count", "large_classes", "main", "read_sources"]

PACKAGE = "cacheblend_rag"
HALVES = ("all", "library", "app")
METHODS, LINES = 25, 400
"""The most methods and lines of a class that one can hold in mind."""
_SMALL = 4  # lines of a body that may as well stand where it is called
_SPARE = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING)
_CONTAINERS = {"dict", "list", "set", "defaultdict", "OrderedDict", "Counter", "deque"}
_WEAK = {"WeakSet", "WeakKeyDictionary", "WeakValueDictionary"}
# Methods that change a container, and what threads and processes wait by.
_CHANGING = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault"}
_CHANGING |= {"update", "appendleft"}
_SYNCHRONISING = {"Lock", "RLock", "Condition", "Event", "Semaphore", "BoundedSemaphore", "local", "ContextVar"}
_SYNCHRONISING |= {"FileLock"}
_KINDS = ("lines", "code", "docstring", "comment", "blank")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class ClassSize:
    """A class's methods, those of its properties among them, and its lines with all docstrings."""

    name: str
    methods: int
    lines: int

    @property
    def large(self) -> bool:
        """Whether it has more of either than it should."""
        return self.methods > METHODS or self.lines > LINES


@dataclass(frozen=True)
class SourceFile:
    """A module: its dotted name within the package, and its text."""

    module: str
    text: str

    @property
    def room(self) -> str:
        """The folder right below the package, or the module itself."""
        return self.module.split(".")[0]

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    def of_kind(self, *kinds: type[ast.AST]) -> Iterator[Any]:
        """Nodes of some kinds."""
        return (node for node in self.nodes if isinstance(node, kinds))

    @cached_property
    def lines(self) -> dict[str, int]:
        """Lines by what stands on them: code, docstrings, comments alone, nothing."""
        docstring = {line for node in self.of_kind(ast.Expr) if _is_text(node) for line in _span(node)}
        code, comment = set[int](), set[int]()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                comment.add(token.start[0])
            elif token.type not in _SPARE:
                code.update(range(token.start[0], token.end[0] + 1))
        code -= docstring
        comment -= code | docstring
        whole = len(self.text.splitlines())
        blank = whole - len(code) - len(docstring) - len(comment)
        return dict(zip(_KINDS, (whole, len(code), len(docstring), len(comment), blank), strict=True))

    @cached_property
    def functions(self) -> list[_Function]:
        """Its functions and methods, those within others too."""
        return list(self.of_kind(ast.FunctionDef, ast.AsyncFunctionDef))

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        """Its classes."""
        return list(self.of_kind(ast.ClassDef))

    @cached_property
    def class_sizes(self) -> list[ClassSize]:
        """How large its classes are."""
        return [
            ClassSize(
                f"{self.module}.{found.name}",
                len({one.name for one in found.body if isinstance(one, _Function)}),
                len(_span(found)),
            )
            for found in self.classes
        ]

    @cached_property
    def references(self) -> Counter[str]:
        """How often each name is used, as a name or as an attribute."""
        names = Counter(node.id for node in self.of_kind(ast.Name))
        names.update(node.attr for node in self.of_kind(ast.Attribute))
        return names

    def changed_names(self) -> set[str]:
        """Names of the module whose contents a function changes."""
        return {name for function in self.functions for name in _changed(function) if isinstance(name, str)}


def read_sources(root: Path) -> list[SourceFile]:
    """The package's modules in a checkout."""
    package = root / PACKAGE
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "__init__"
        found.append(SourceFile(module, path.read_text(encoding="utf-8")))
    if not found:
        raise SystemExit(f"house: {package} holds no Python files; name the root of a checkout")
    return found


def large_classes(sources: Iterable[SourceFile]) -> list[ClassSize]:
    """Classes that have too many methods or lines, the largest first."""
    found = [size for source in sources for size in source.class_sizes if size.large]
    return sorted(found, key=lambda size: -size.lines)


def count(sources: Sequence[SourceFile]) -> dict[str, Any]:
    """All counts of some modules; fit for JSON."""
    lines = {kind: sum(source.lines[kind] for source in sources) for kind in _KINDS}
    functions = [function for source in sources for function in source.functions]
    lengths = [len(_span(function)) for function in functions]
    classes = [found for source in sources for found in source.classes]
    names = Counter(found.name for found in classes)
    files = Counter(source.module.split(".")[-1] for source in sources)
    rooms = dict.fromkeys(source.room for source in sources)
    private, single = _private(sources)
    return {
        **lines,
        "rooms": {room: sum(one.lines["code"] for one in sources if one.room == room) for room in rooms},
        "files": len(sources),
        "median_file": statistics.median([source.lines["lines"] for source in sources] or [0]),
        "classes": len(classes),
        "dataclasses": sum(any("dataclass" in ast.unparse(one) for one in found.decorator_list) for found in classes),
        "protocols": _with_base(classes, "Protocol"),
        "typed_dicts": _with_base(classes, "TypedDict", derived=True),
        "functions": len(functions),
        "mean_function": statistics.mean(lengths or [0]),
        "median_function": statistics.median(lengths or [0]),
        "up_to_3_lines": sum(length <= 3 for length in lengths),
        "up_to_5_lines": sum(length <= 5 for length in lengths),
        "share_up_to_5_lines": sum(length <= 5 for length in lengths) / max(1, len(lengths)),
        "above_60_lines": sum(length > 60 for length in lengths),
        "functions_per_1000_code": 1000 * len(functions) / max(1, lines["code"]),
        "properties": sum("property" in ast.unparse(one) for each in functions for one in each.decorator_list),
        "private_functions": len(private),
        "private_with_one_reference": len(single),
        "private_small_with_one_reference": sum(_body_lines(function) <= _SMALL for function in single),
        "large_classes": [asdict(size) for size in large_classes(sources)],
        "registries": sorted(_registries(sources)),
        "class_names_in_two_files": sorted(name for name, times in names.items() if times > 1),
        "file_names_twice": sum(times > 1 for times in files.values()),
        "type_ignores": sum(source.text.count("# type: ignore") for source in sources),
        "broad_excepts": sum(_is_broad(one) for source in sources for one in source.of_kind(ast.ExceptHandler)),
        "any": sum(source.references["Any"] for source in sources),
        "synchronising": sum(_called(node) in _SYNCHRONISING for each in sources for node in each.of_kind(ast.Call)),
    }


def _private(sources: Iterable[SourceFile]) -> tuple[list[_Function], list[_Function]]:
    """Private functions, and those that their file names once beside their definition."""
    pairs = [(source, one) for source in sources for one in source.functions if one.name.startswith("_")]
    private = [(source, one) for source, one in pairs if not one.name.endswith("__")]
    return [one for _, one in private], [one for source, one in private if source.references[one.name] == 1]


def _registries(sources: Sequence[SourceFile]) -> Iterator[str]:
    """Names of modules that hold what functions change: containers, and objects that change themselves."""
    changing = {found.name for source in sources for found in source.classes if _changes_itself(found)}
    for source in sources:
        changed = source.changed_names()
        for node in source.tree.body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                if value is None or not isinstance(target, ast.Name):
                    continue
                made = _called(value)
                container = isinstance(value, ast.Dict | ast.List | ast.Set) or made in _CONTAINERS
                if made in _WEAK or made in changing or (container and target.id in changed):
                    yield f"{source.module}.{target.id}"


def _changes_itself(found: ast.ClassDef) -> bool:
    """Whether a method but those that make it sets an attribute, or changes what one holds."""
    if any("frozen=True" in ast.unparse(one) for one in found.decorator_list):
        return False
    making = ("__init__", "__post_init__", "__new__", "__setstate__")
    methods = [one for one in found.body if isinstance(one, _Function) and one.name not in making]
    return any(isinstance(name, tuple) for method in methods for name in _changed(method))


def _changed(function: _Function) -> Iterator[str | tuple[str]]:
    """What a function changes: a name, or an attribute of ``self`` in a tuple."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
            yield from _owner(node.func.value)
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Subscript):
                yield from _owner(target.value)
            elif isinstance(target, ast.Attribute):
                yield from _owner(target)


def _owner(node: ast.AST) -> Iterator[str | tuple[str]]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        yield (node.attr,)


def _called(node: ast.AST | None) -> str:
    """The name of what a call calls, without its module and its type's parameters."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Subscript):
        function = function.value
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _with_base(classes: Iterable[ast.ClassDef], name: str, derived: bool = False) -> int:
    """Classes of a base; with ``derived``, also those that have it from one of the others."""
    bases = [(one.name, {ast.unparse(base).split("[")[0].split(".")[-1] for base in one.bases}) for one in classes]
    wanted, before = {name}, 0
    while derived and len(wanted) > before:
        before = len(wanted)
        wanted |= {own for own, of in bases if of & wanted}
    return sum(bool(of & wanted) for _, of in bases)


def _is_broad(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or ast.unparse(handler.type) in ("Exception", "BaseException")


def _is_text(node: ast.Expr) -> bool:
    return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _span(node: Any) -> range:
    """Lines of a node."""
    return range(node.lineno, node.end_lineno + 1)


def _body_lines(function: _Function) -> int:
    """Lines of a function's body, without its docstring."""
    first, *rest = function.body
    body = rest if isinstance(first, ast.Expr) and _is_text(first) else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]


_ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "lines / code / docstring / comment / blank": lambda found: " / ".join(f"{found[name]:,}" for name in _KINDS),
    "files, median file": lambda found: f"{found['files']}, {found['median_file']:g}",
    "classes, dataclasses, protocols, TypedDicts": lambda found: ", ".join(
        str(found[name]) for name in ("classes", "dataclasses", "protocols", "typed_dicts")
    ),
    "functions: number, mean, median": lambda found: (
        f"{found['functions']:,}, {found['mean_function']:.1f}, {found['median_function']:g}"
    ),
    "functions ≤ 3, ≤ 5, > 60 lines": lambda found: (
        f"{found['up_to_3_lines']}, {found['up_to_5_lines']} ({found['share_up_to_5_lines']:.0%}), "
        f"{found['above_60_lines']}"
    ),
    "functions per 1,000 lines of code": lambda found: f"{found['functions_per_1000_code']:.0f}",
    "properties": lambda found: str(found["properties"]),
    "private functions; named once in their file; of these body ≤ 4 lines": lambda found: (
        f"{found['private_functions']}; {found['private_with_one_reference']}; "
        f"{found['private_small_with_one_reference']}"
    ),
    "classes above 25 methods or 400 lines": lambda found: str(len(found["large_classes"])),
    "names of modules whose contents change": lambda found: str(len(found["registries"])),
    "class names in two files": lambda found: str(len(found["class_names_in_two_files"])),
    "file names that occur twice": lambda found: str(found["file_names_twice"]),
    "`# type: ignore`, broad `except`, `Any`": lambda found: (
        f"{found['type_ignores']}, {found['broad_excepts']}, {found['any']:,}"
    ),
    "locks, events, thread-locals, context variables, file locks": lambda found: str(found["synchronising"]),
}


def count_checkout(root: Path) -> dict[str, dict[str, Any]]:
    """The counts of each of `HALVES` of a checkout."""
    sources = read_sources(root)
    programs = [source for source in sources if source.room in ("app", "__main__")]
    library = [source for source in sources if source not in programs]
    return {name: count(part) for name, part in zip(HALVES, (sources, library, programs), strict=True)}


def house_table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The counts as a table, and the large classes and registries by name.

    Parameters
    ----------
    found : dict of str to dict
        The result of `count_checkout` for each checkout, by its name.
    """
    parts = [(root, half, halves[half]) for root, halves in found.items() for half in HALVES]
    rows = [["", *(f"{root}, {half}" for root, half, _ in parts)], ["---"] * (len(parts) + 1)]
    rows += [[title, *(show(counts) for _, _, counts in parts)] for title, show in _ROWS.items()]
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    for root, halves in found.items():
        large = [f"`{one['name']}` ({one['methods']}, {one['lines']})" for one in halves["all"]["large_classes"]]
        rooms = sorted(halves["all"]["rooms"].items(), key=lambda pair: -pair[1])
        registries = [f"`{name}`" for name in halves["all"]["registries"]]
        lines += ["", f"{root}, lines of code by room: {', '.join(f'{room} {code:,}' for room, code in rooms)}."]
        lines += ["", f"{root}, large classes (methods, lines): {', '.join(large) or 'none'}."]
        lines += ["", f"{root}, names of modules whose contents change: {', '.join(registries) or 'none'}."]
    return "\n".join(lines)


def commit_of(root: Path) -> str:
    """The commit of a checkout, or the name of its folder."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or root.resolve().name


def main(arguments: Sequence[str] | None = None) -> int:
    """Count what the arguments name; the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m docs.benchmarks.scripts.house", description=__doc__)
    parser.add_argument("--root", nargs="+", default=["."], metavar="FOLDER", help="checkouts (default: this one)")
    roots = [Path(root) for root in parser.parse_args(arguments).root]
    found = {commit_of(root): count_checkout(root) for root in roots}
    print(house_table(found))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
