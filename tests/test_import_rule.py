"""The house rules that can be read off the source: who imports whom, and how long things get."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "cacheblend_rag"
NAME = "cacheblend_rag"
FILES = sorted(PACKAGE.rglob("*.py"))

# From the top down; a room imports from rooms further down, never from its neighbours in a row.
ORDER = (
    ("__main__",),
    ("app",),
    ("calibration",),
    ("langchain", "llama_index"),
    ("retrieval", "engine"),
    ("llama_cpp",),
    ("fusor", "loading"),
    ("store",),
    ("models", "prompt"),
    ("report",),
    ("config",),
    ("errors",),
)
# The server's floors, from the top down; files of one floor may import each other.
FLOORS = (("app", "api"), ("services",), ("security",), ("settings", "keys_file", "problems"))
# It receives an iterator of per-layer KV.
FORBIDDEN = {"fusor": ("store",)}
# Memories of all tenants together. None may be asked for a text or its ids: by the time that an answer takes, another
# tenant would see what is in it.
REMEMBERED = {
    # about this machine, its packages and what PyTorch does here
    *("_auto_limit", "_multiprocessors", "_side_stream", "agrees", "kernels_run_on", "library"),
    *("rows_worth_it", "_arguments", "_options_of"),
    # a text of ours, numbers of samples, and models' own templates
    *("_passages", "_draw", "template_variables"),
}
# The only homes of an outside package, at module level or within a function.
HOMES = {
    # The fusor's check at load names transformers' version, no more.
    "transformers": ("models", "llama_cpp", "engine", "fusor.self_check", "retrieval"),
    "diskcache": ("store.disk",),
    "obstore": ("store.s3",),
    "valkey": ("store.valkey",),
    "faiss": ("retrieval",),
    "sentence_transformers": ("retrieval", "llama_index.embedding"),
    "langchain": ("langchain",),
    "langchain_core": ("langchain", "retrieval", "calibration", "app"),
    "langchain_classic": ("langchain", "app"),
    "langchain_text_splitters": ("langchain", "retrieval"),
    "llama_index": ("llama_index",),
    "peft": ("models.lora",),
    "PIL": (),
    "llguidance": ("engine.grammar",),
    "gguf": ("models.gguf",),
    "datasets": (),
    "matplotlib": (),
    "rouge_score": (),
    "llama_cpp": (),
    "fastapi": ("app.server.api", "app.server.app", "app.server.problems"),
    "ray": ("app.fleet",),
    "starlette": ("app.server.api", "app.server.problems", "app.fleet"),
    "uvicorn": ("app.server.app",),
    "prometheus_client": ("app.server.services.metrics",),
    "opentelemetry": ("engine.traces", "app.server.services.logs"),
}
MAX_FUNCTION = 60
# All that outlives a call at module level, and why it does: an owner, a bound or weak references.
REGISTRIES = {
    "engine.grammar._tokenizers": "weak, by tokenizer",
    "engine.llm_base.known_chunks": "the registry that models share by default; bounded, and known= gives them another",
    "engine.scheduler._schedulers": "weak, by model: who shares a model shares its turns",
    "engine.write_back._begun": "weak: queues to be emptied at exit",
    "langchain.tracking._tracker": "LangChain takes no configure hook back; bounded, and tracking(known) has another",
    "llama_index.tracking.shared_tracker": "LlamaIndex takes no handler back; bounded, and tracking(known) has another",
    "models.cpu.products._by_model": "weak, by model: copies of its weights",
    "models.families._registered": "families of model types, as code registers them; bounded by what is registered",
    "models.modules._kept": "weak, by model: what is to be given back to it",
    "prompt.chat._checked_calls": "weak, by tokenizer",
    "prompt.control._found": "weak, by tokenizer",
    "prompt.thoughts._found": "weak, by tokenizer",
    "store.tiered._begun": "weak: stores to be flushed at exit",
}
# What declares something when it is imported, and is only read afterwards.
DECLARED = {"config._OPTIONS"}
_CONTAINERS = (
    *("dict", "list", "set", "OrderedDict", "defaultdict", "deque", "Counter"),
    *("WeakSet", "WeakKeyDictionary", "WeakValueDictionary"),
)


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    return module.split(".")[0]


def rank_of(module: str) -> int | None:
    return next((rank for rank, rooms in enumerate(ORDER) if room_of(module) in rooms), None)


def floor_of(module: str) -> int | None:
    """The floor of one of the server's modules; None of any other."""
    name = module.removeprefix("app.server.").split(".")[0] if module.startswith("app.server.") else ""
    return next((floor for floor, names in enumerate(FLOORS) if name in names), None)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def all_nodes() -> list[tuple[Path, ast.AST]]:
    """Everything in every file."""
    return [(path, node) for path in FILES for node in ast.walk(tree_of(path))]


@cache
def imports() -> dict[Path, list[tuple[int, str]]]:
    """Lines and full names of everything that each file imports, wherever it stands."""
    found: dict[Path, list[tuple[int, str]]] = {path: [] for path in FILES}
    for path, node in all_nodes():
        if isinstance(node, ast.Import):
            found[path] += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are written out in full"
            assert node.module is not None
            found[path].append((node.lineno, node.module))
            if node.module == NAME:
                found[path] += [(node.lineno, f"{NAME}.{alias.name}") for alias in node.names]
    return found


def breaches(module: str, imported: str) -> str | None:
    """The fault of one module importing another, if there is one."""
    outside = imported.split(".")[0]
    if outside != NAME:
        homes = HOMES.get(outside)
        inside = homes is None or any(module == home or module.startswith(home + ".") for home in homes)
        return None if inside else f"{outside} is known only to {homes}"
    target = imported.removeprefix(NAME).removeprefix(".")
    if not module or not target or target[0].isupper() or target.startswith("__"):
        return None  # the package's own front, whose names are imported on first use
    own, other = rank_of(module), rank_of(target)
    if own is None or other is None:
        return "a room that has no place in the order"
    if room_of(module) != room_of(target) and (other <= own or room_of(target) in FORBIDDEN.get(room_of(module), ())):
        return f"{room_of(module)} lies beneath or beside {room_of(target)}"
    above, below = floor_of(module), floor_of(target)
    if above is not None and below is not None and below < above:
        return f"{module} is on a floor below {target}"
    return None


def test_imports_run_downward() -> None:
    wrong = [
        f"{path}, line {line}: {imported}: {reason}"
        for path in FILES
        for line, imported in imports()[path]
        if (reason := breaches(module_of(path), imported)) is not None
    ]
    assert wrong == []


def test_the_library_does_without_its_programs() -> None:
    """All but the room ``app`` is the library. The command, ``python -m``, is a program too."""
    library = {path for path in FILES if room_of(module_of(path)) not in ("app", "__main__")}
    wrong = [
        f"{path}, line {line}"
        for path in library
        for line, imported in imports()[path]
        if f"{imported}.".startswith(f"{NAME}.app.")
    ]
    assert wrong == []
    named = [path for path in library if f"{NAME}.app" in path.read_text(encoding="utf-8")]
    assert named == [], "not by a name that is imported later either"


def test_modules_form_no_circle() -> None:
    """Also within a room, and wherever in a file an import stands."""
    modules = {module_of(path): path for path in FILES}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = {imported.removeprefix(NAME).removeprefix(".") for _, imported in imports()[path]}
        graph[module] = {name for name in names if name in modules and name != module}
    assert len(list(TopologicalSorter(graph).static_order())) == len(modules)


def test_the_rule_catches_what_it_should() -> None:
    for module, imported in [
        ("fusor.blend", "cacheblend_rag.store.base"),
        ("fusor.work", "cacheblend_rag.loading"),
        ("config", "cacheblend_rag.engine.engine"),
        ("store.base", "cacheblend_rag.engine.pipeline"),
        ("store.memory", "diskcache"),
        ("fusor.blend", "transformers"),
        ("loading.controller", "transformers.cache_utils"),
        ("engine.engine", "faiss"),
        ("engine.engine", "cacheblend_rag.langchain"),
        ("models.adapter", "cacheblend_rag.store.base"),
        ("prompt.tokenizer", "cacheblend_rag.models"),
        ("nowhere", "cacheblend_rag.config"),
        ("app.server.services.service", "cacheblend_rag.app.server.api.requests"),
        ("app.server.security.tenants", "cacheblend_rag.app.server.services.service"),
        ("app.server.settings", "cacheblend_rag.app.server.security.tenants"),
        ("app.server.services.service", "fastapi"),
    ]:
        assert breaches(module, imported) is not None, (module, imported)


def test_every_file_of_the_server_is_on_a_floor() -> None:
    modules = [module_of(path) for path in FILES if path.is_relative_to(PACKAGE / "app" / "server")]
    assert [one for one in modules if one != "app.server" and floor_of(one) is None] == []


def test_functions_stay_short() -> None:
    long = {}
    for file, node in all_nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            described = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            docstring = (first.end_lineno or 0) - first.lineno + 1 if described else 0
            # A compiled kernel takes what others hold in objects, a line each.
            kernel = any("triton" in ast.unparse(decorator) for decorator in node.decorator_list)
            length = (node.end_lineno or 0) - (first.lineno if kernel else node.lineno) + 1 - docstring
            if length > MAX_FUNCTION:
                long[f"{node.name} of {module_of(file)}"] = length
    assert long == {}


def _makes(value: ast.AST, kinds: Collection[str]) -> bool:
    """Whether an expression makes an empty container, or an object of some kinds."""
    if isinstance(value, ast.Dict | ast.List | ast.Set):
        return not (value.keys if isinstance(value, ast.Dict) else value.elts)
    if isinstance(value, ast.Tuple):
        return any(_makes(one, kinds) for one in value.elts)
    if isinstance(value, ast.Call):
        name = ast.unparse(value.func).rpartition(".")[2]
        return (name in kinds and (name not in _CONTAINERS or not value.args)) or any(
            _makes(one, kinds) for one in value.args
        )
    return False


def _assignments(body: Iterable[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            yield ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target), node.value


def test_state_that_outlives_a_call_has_an_owner() -> None:
    """Of all modules: containers that are filled while the program runs, and objects that hold some."""
    made = {
        node.name: [
            value
            for one in node.body
            if isinstance(one, ast.FunctionDef) and one.name == "__init__"
            for name, value in _assignments(ast.walk(one))
            if "self." in name
        ]
        for _, node in all_nodes()
        if isinstance(node, ast.ClassDef)
    }
    kinds = set(_CONTAINERS)
    while grown := {name for name, values in made.items() if any(_makes(one, kinds) for one in values)} - kinds:
        kinds |= grown
    found = {
        f"{module_of(path)}.{name}"
        for path in FILES
        for name, value in _assignments(tree_of(path).body)
        if _makes(value, kinds)
    }
    assert found - DECLARED == set(REGISTRIES)


def test_nothing_is_keyed_by_a_hash_that_is_seeded() -> None:
    calls = [
        f"{file}, line {node.lineno}"
        for file, node in all_nodes()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hash"
    ]
    assert calls == [], "texts have other hashes in each process, and two of them may have the same"


def test_memories_of_all_tenants_are_asked_for_no_text() -> None:
    """Found once: digests of token ids, remembered in one place, told what others had asked about."""
    found = {
        node.name
        for path in FILES
        for node in tree_of(path).body
        if isinstance(node, ast.FunctionDef)
        if any("cache" in ast.unparse(one).split("(")[0] for one in node.decorator_list)
    }
    assert found == REMEMBERED


def test_every_module_says_what_it_is_and_asserts_nothing() -> None:
    assert [path for path in FILES if not ast.get_docstring(tree_of(path))] == []
    asserts = [f"{file}, line {node.lineno}" for file, node in all_nodes() if isinstance(node, ast.Assert)]
    assert asserts == [], "input is checked by errors of our own, which python -O keeps"


def test_tables_of_packages_name_each_of_their_modules() -> None:
    tables = 0
    for path in PACKAGE.rglob("__init__.py"):
        listed = re.findall(r"^``(\w+)``  ", ast.get_docstring(tree_of(path)) or "", re.MULTILINE)
        if listed:
            assert sorted(listed) == sorted(one.stem for one in path.parent.glob("*.py") if one != path), path
            tables += 1
    assert tables >= 3


def test_the_package_holds_no_weights_and_knows_nothing_of_its_tests() -> None:
    kept = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert [path for path in kept if path.suffix in (".safetensors", ".bin", ".pt", ".gguf")] == []
    top = {"__init__.py", "__main__.py", "config.py", "errors.py", "report.py"}
    assert {path.name for path in PACKAGE.glob("*.py")} == top
    assert sum(path.stat().st_size for path in kept) < 4_000_000
    for path in FILES:
        outside = {imported.split(".")[0] for _, imported in imports()[path]}
        assert not outside & {"tests", "docs", "examples"}, path


@pytest.mark.slow
def test_heavy_packages_are_imported_where_they_are_used() -> None:
    """One program imports more and more of the package."""
    heavy = ["torch", "transformers", "faiss", "sentence_transformers", "diskcache"]
    readers = ["bs4", "lxml", "mammoth", "pypdf", "langchain_text_splitters"]
    # Compilers and quantisers take as long as PyTorch and transformers together.
    slow = ["torch._dynamo", "torchao", "transformers.modeling_utils", "transformers.quantizers.auto"]
    steps = (
        (["errors", "config", "report", "app.cli"], heavy),
        ([f"retrieval.{name}" for name in ("documents", "splitting", "embedder", "saved_index")], heavy + readers),
        (["retrieval.index"], ["torch", "transformers", "sentence_transformers", *readers]),
        (["langchain", "llama_index"], slow),
    )
    script = f"import sys, importlib\nfor names, absent in {steps}:\n"
    script += f"    for name in names: importlib.import_module('{NAME}.' + name)\n"
    script += "    print(names, [one for one in absent if one in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180, check=True)
    assert done.stdout.splitlines() == [f"{names} []" for names, _ in steps]


def test_public_names_are_there_and_others_are_not() -> None:
    import cacheblend_rag

    for name in cacheblend_rag.__all__:
        assert getattr(cacheblend_rag, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = cacheblend_rag.Engine
