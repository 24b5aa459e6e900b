"""Examples in module docstrings call the module's functions, classes and methods with parameters that they have."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("analyzers", "dashboard", "probes", "rankscope", "store", "trainer", "watch")
_STATEMENT = re.compile(r"^(?:with|if|while|for .+? in) (.*?)(?: as \w+)?:(?: .*)?$")


def examples(docstring: str) -> Iterator[ast.Call]:
    """Calls in the lines that are Python, without those that leave arguments out (`...`)."""
    for line in docstring.splitlines():
        text = line.partition("  #")[0]
        statement = _STATEMENT.match(text.strip())
        try:
            tree = ast.parse(statement[1] if statement else text.strip())
        except SyntaxError:
            continue
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call) and "..." not in ast.unparse(node))


def fits(call: ast.Call, target: object, *, is_method: bool) -> bool:
    """Whether the target can be called with so many positional and these named arguments."""
    if any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords):
        return True
    names = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    try:
        inspect.signature(target).bind(*[None] * (len(call.args) + is_method), **names)  # type: ignore[arg-type]
    except TypeError:
        return False
    except ValueError:  # no signature
        return True
    return True


def targets(module: ModuleType, function: ast.expr) -> Iterator[tuple[object, bool]]:
    """What an example may call: a function or class of the module, or a method of one of its classes, and whether it
    takes `self`."""
    own = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    if isinstance(function, ast.Name) and callable(own.get(function.id)):
        yield own[function.id], False
    if isinstance(function, ast.Attribute):
        for cls in (value for value in own.values() if inspect.isclass(value)):
            found = inspect.getattr_static(cls, function.attr, None)
            if inspect.isfunction(found):
                yield found, True
            elif isinstance(found, (staticmethod, classmethod)):
                yield getattr(cls, function.attr), False


@pytest.mark.parametrize("package", PACKAGES)
def test_examples_call_with_existing_parameters(package: str) -> None:
    wrong, num_checked = [], 0
    for path in sorted((ROOT / package).rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")), clean=False) or ""
        calls = list(examples(docstring))
        if not calls:
            continue
        module = importlib.import_module(
            ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        )
        for call in calls:
            known = list(targets(module, call.func))
            num_checked += bool(known)
            if known and not any(fits(call, target, is_method=is_method) for target, is_method in known):
                wrong.append(f"{path.relative_to(ROOT)}: {ast.unparse(call)}")
    assert wrong == []
    assert num_checked > 0
