"""The import rules, kept by reading every module's syntax tree (and by starting the light ones once).

    probes      imports nothing of ours, and only torch, numpy and the standard library besides
    store       imports probes; no torch
    analyzers   imports store and probes; neither torch nor streamlit nor duckdb, and no clock
    watch       imports analyzers, store and probes
    trainer     imports watch and what watch imports
    dashboard   imports analyzers, store and probes
    rankscope   imports what a command needs, when it needs it; no package imports rankscope

No module imports itself through others, not even for types: there is no circle within a package or between its folders.

A rule that has to give way does so in one of the tables below, with its reason.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FRONT_DOOR = "rankscope"

# package -> the packages of ours that it may import
MAY_IMPORT = {
    "probes": {"probes"},
    "store": {"store", "probes"},
    "analyzers": {"analyzers", "store", "probes"},
    "watch": {"watch", "analyzers", "store", "probes"},
    "trainer": {"trainer", "watch", "analyzers", "store", "probes"},
    "dashboard": {"dashboard", "analyzers", "store", "probes"},
}
OURS = {*MAY_IMPORT, FRONT_DOOR}

RANK_PATH_PACKAGES = {"torch", "numpy"}

NOT_IN_ANALYZERS = {"torch", "streamlit", "duckdb", "time"}
# (module, package) -> why the analyzer needs it
ANALYZER_EXCEPTIONS: dict[tuple[str, str], str] = {}

MAX_TOP_LEVEL_MODULES = 13  # with __init__
MAX_MODULES_OF_A_FOLDER = 15  # without __init__
# Folders with one module an entry, found from the entry's name: they grow with what they list.
CATALOGUES = {
    "benchmarks/accuracy", "benchmarks/cost", "dashboard/views", "rankscope/commands", "store/readers/programs",
}  # fmt: skip
MAX_MODULE_LINES = 400
# module -> why it is longer
LONG_MODULES: dict[str, str] = {}

NAMELESS = {"util", "utils", "helper", "helpers", "manager", "managers", "common", "misc"}

# What `rankscope analyze` must not pay for.
HEAVY = ("torch", "streamlit", "pandas", "pyarrow", "opentelemetry")
# What a training script imports, which has torch and its framework already.
IN_A_TRAINING = f"{FRONT_DOOR}.frameworks."


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported name: where it stands and what it brings in."""

    path: str
    line: int
    target: str
    relative: bool

    @property
    def package(self) -> str:
        return self.target.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.target}"


def modules_of(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def all_modules() -> list[Path]:
    return [path for package in (*MAY_IMPORT, FRONT_DOOR) for path in modules_of(package)]


@functools.cache
def imports_in(source: str, path: str, *, members: bool = False, with_types: bool = False) -> tuple[Import, ...]:
    """Every import of a module, inside functions too; those for the type checker alone count only `with_types`.

    With `members`, `from a import b` is reported as `a.b`. Several rules read each module.
    """
    return tuple(_imports_in(source, path, members=members, with_types=with_types))


def _imports_in(source: str, path: str, *, members: bool, with_types: bool) -> Iterator[Import]:
    pending: list[ast.AST] = [ast.parse(source, filename=path)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path=path, line=node.lineno, target=alias.name, relative=False)
        elif isinstance(node, ast.ImportFrom):
            base = _target(node, path)
            for target in [f"{base}.{alias.name}" for alias in node.names] if members else [base]:
                yield Import(path=path, line=node.lineno, target=target, relative=node.level > 0)
        elif isinstance(node, ast.If) and _is_type_checking(node.test) and not with_types:
            pending.extend(node.orelse)
        else:
            pending.extend(ast.iter_child_nodes(node))


def _target(node: ast.ImportFrom, path: str) -> str:
    if node.level == 0:
        return node.module or ""
    package = Path(path).parts[:-1]
    base = package[: len(package) - (node.level - 1)]
    return ".".join((*base, *((node.module,) if node.module else ())))


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports_of(package: str) -> list[Import]:
    return [
        found
        for path in modules_of(package)
        for found in imports_in(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    ]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in all_modules()}


def _import_graph(*, with_types: bool = False) -> dict[str, set[str]]:
    """{module: the modules that it imports}; a package that is only passed through does not count."""
    graph: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        graph[name] = set()
        source, where = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        for found in imports_in(source, where, members=True, with_types=with_types):
            target = found.target if found.target in MODULES else found.target.rpartition(".")[0]
            if target != name and not name.startswith(f"{target}."):
                graph[name].add(target)
    return graph


def report(broken: list[str]) -> str:
    return "\n  " + "\n  ".join(broken)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_one_way(package: str) -> None:
    broken = [str(found) for found in imports_of(package) if found.package in OURS - MAY_IMPORT[package]]
    assert not broken, report(broken)


def test_probes_use_relative_imports() -> None:
    broken = [str(found) for found in imports_of("probes") if found.package == "probes" and not found.relative]
    assert not broken, report(broken)


def test_rank_path_needs_only_torch_numpy_and_the_standard_library() -> None:
    allowed = RANK_PATH_PACKAGES | sys.stdlib_module_names | {"probes"}
    broken = [str(found) for found in imports_of("probes") if found.package not in allowed]
    assert not broken, report(broken)


def test_store_has_no_torch() -> None:
    broken = [str(found) for found in imports_of("store") if found.package == "torch"]
    assert not broken, report(broken)


def fail_on_circle(graph: dict[str, set[str]]) -> None:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("a circle of imports: " + " <- ".join(error.args[1]))


def test_no_module_imports_itself_through_others() -> None:
    graph = _import_graph(with_types=True)
    fail_on_circle({name: {found for found in targets if found in MODULES} for name, targets in graph.items()})


def folder_of(module: str) -> str:
    """Folder of a module below its package; a module at the top of a package stands for itself."""
    parts = MODULES[module].relative_to(ROOT).parts
    return "/".join(parts[:2])


def test_no_folder_of_a_package_imports_itself_through_others() -> None:
    graph: dict[str, set[str]] = {}
    for name, targets in _import_graph().items():
        own = folder_of(name)
        others = {folder_of(target) for target in targets if target in MODULES}
        graph.setdefault(own, set()).update(others - {own})
    fail_on_circle(graph)


def test_top_levels_stay_small() -> None:
    broken = [
        f"{package}: {count} modules"
        for package in OURS
        if (count := len(list((ROOT / package).glob("*.py")))) > MAX_TOP_LEVEL_MODULES
    ]
    assert not broken, report(broken)


def test_folders_stay_small() -> None:
    counts = Counter(
        path.parent.relative_to(ROOT).as_posix()
        for path in (*all_modules(), *modules_of("benchmarks"))
        if path.stem != "__init__"
    )
    broken = {folder: count for folder, count in counts.items() if count > MAX_MODULES_OF_A_FOLDER}
    assert broken.keys() == CATALOGUES, broken


def test_analyzers_have_no_torch_no_database_and_no_clock() -> None:
    broken = [
        str(found)
        for found in imports_of("analyzers")
        if found.package in NOT_IN_ANALYZERS and (found.path, found.package) not in ANALYZER_EXCEPTIONS
    ]
    assert not broken, report(broken)


def test_modules_are_named_for_a_concept() -> None:
    broken = [str(path.relative_to(ROOT)) for path in all_modules() if path.stem in NAMELESS]
    assert not broken, report(broken)


def test_modules_stay_short() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines()) for path in all_modules()
    }
    broken = [
        f"{name}: {num_lines} lines"
        for name, num_lines in lengths.items()
        if num_lines > MAX_MODULE_LINES and name not in LONG_MODULES
    ]
    assert not broken, report(broken)
    stale = [name for name in LONG_MODULES if lengths.get(name, 0) <= MAX_MODULE_LINES]
    assert not stale, f"no longer long, take them off the list: {stale}"


def test_reading_side_starts_without_the_heavy_packages() -> None:
    """The front door, all analyzers and what plans and starts a run, imported together in a fresh process."""
    paths = [
        path
        for path in (*modules_of("store"), *modules_of("analyzers"), *modules_of(FRONT_DOOR))
        if not path.stem.startswith("__")
    ]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    names = [name for name in names if not name.startswith(IN_A_TRAINING)]
    names += [module_name(path) for path in (ROOT / "trainer" / "plan").rglob("*.py")]
    names += ["trainer.launcher.start"]  # refuses a mistake before torch is imported
    program = (
        f"import sys, importlib\nfor name in {names!r}:\n"
        f"    importlib.import_module(name)\n"
        f"    heavy = [h for h in {HEAVY!r} if h in sys.modules]\n"
        f"    if heavy: sys.exit(f'import {{name}} brings in {{heavy}}')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr


def test_what_starts_a_plug_in_needs_neither_numpy_nor_the_database() -> None:
    """Each command that reports starts a process per plug-in."""
    program = "import sys, store.plugins; print([name for name in ('numpy', 'duckdb') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_script_that_imports_rankscope_pays_for_nothing_of_it() -> None:
    program = (
        f"import sys, __future__; was = set(sys.modules); import {FRONT_DOOR}; print(sorted(set(sys.modules) - was))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.stdout.strip() == f"['{FRONT_DOOR}']", done.stderr


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("probes/tape/writer.py", "import os, torch.nn", ["os", "torch.nn"]),
        ("probes/tape/writer.py", "from . import schema", ["probes.tape"]),
        ("probes/tape/writer.py", "from .schema import TABLES", ["probes.tape.schema"]),
        ("probes/tape/writer.py", "from ..recorder import Recorder", ["probes.recorder"]),
        ("probes/tape/writer.py", "def late():\n    import duckdb", ["duckdb"]),
        ("probes/tape/writer.py", "if TYPE_CHECKING:\n    import duckdb\nelse:\n    import mmap", ["mmap"]),
        ("probes/tape/writer.py", "import typing\nif typing.TYPE_CHECKING:\n    import duckdb", ["typing"]),
    ],
)
def test_import_reader(path: str, source: str, expected: list[str]) -> None:
    assert [found.target for found in imports_in(source, path)] == expected
