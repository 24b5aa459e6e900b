"""Walk the types of an API from its names: what functions, methods and properties return, what fields and attributes
hold, and what those types have in turn.

    untyped(rankscope)           # ["open_run -> Run.manifest: Mapping[str, Any]"]
    revealed(rankscope)          # a program that asks a type checker for the type of each of them
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

__all__ = ["reached", "revealed", "untyped"]

OURS = ("rankscope.", "probes.", "store.", "analyzers.", "trainer.", "watch.")


def untyped(module: ModuleType) -> list[str]:
    """`where: type` of each returned type and each field in which `Any` stands, or that has none."""
    return [f"{where}: {hint}" for where, hint in _walked(module) if _has_any(hint)]


def reached(module: ModuleType) -> set[type]:
    """Classes of Rankscope that the walk came by."""
    named = {one for name in module.__all__ for one in _classes(getattr(module, name))}
    return named | {one for _, hint in _walked(module) for one in _classes(hint)}


def revealed(module: ModuleType) -> str:
    """A program whose `reveal_type` lines ask for the type of each member, as somebody's code imports the classes."""
    lines = [f"import {module.__name__}", *(f"reveal_type({module.__name__}.{name})" for name in module.__all__)]
    for one in sorted(reached(module), key=lambda one: one.__name__):
        home = one.__module__ if one.__module__.startswith("rankscope.") else f"rankscope.{one.__module__}"
        names = dict.fromkeys(place.rpartition(".")[2] for place, _ in _hints("", one))
        lines += [f"from {home} import {one.__name__}", f"def of_{one.__name__}(one: {one.__name__}) -> None:"]
        lines += [f"    reveal_type(one.{name})" for name in names] or ["    pass"]
    return "\n".join([*lines, ""])


def _walked(module: ModuleType) -> Iterator[tuple[str, object]]:
    seen: set[type] = set()
    waiting: list[tuple[str, object]] = [(name, getattr(module, name)) for name in module.__all__]
    while waiting:
        where, one = waiting.pop(0)
        for place, hint in _hints(where, one):
            yield place, hint
            for found in _classes(hint):
                if found not in seen:
                    seen.add(found)
                    waiting.append((f"{place} -> {found.__name__}", found))


def _hints(where: str, one: object) -> Iterator[tuple[str, object]]:
    """(place, type) of what one object of the API gives: a function its result, a class its fields and members."""
    if not isinstance(one, type):
        if callable(one):
            yield where, get_type_hints(one).get("return", Any)
        return
    for name, hint in get_type_hints(one).items():
        if not name.startswith("_"):
            yield f"{where}.{name}", hint
    for name, member in inspect.getmembers(one):
        of = member.fget if isinstance(member, property) else member
        is_public = not name.startswith("_") or name in ("__iter__", "__getitem__", "__call__", "__enter__")
        if is_public and inspect.isroutine(of) and _is_ours(of):
            yield f"{where}.{name}", get_type_hints(of).get("return", Any)
    yield from _attributes(where, one)


def _attributes(where: str, one: type) -> Iterator[tuple[str, object]]:
    """Attributes that only `__init__` sets: each has a type there (`self.rows: list[int] = rows`), or `Any`."""
    if not (inspect.isfunction(one.__init__) and _is_ours(one.__init__)) or hasattr(one, "__dataclass_fields__"):
        return
    names = vars(sys.modules[one.__module__])
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(one.__init__)))):
        if not isinstance(node, (ast.AnnAssign, ast.Assign)):
            continue
        for target in [node.target] if isinstance(node, ast.AnnAssign) else node.targets:
            if isinstance(target, ast.Attribute) and not target.attr.startswith("_"):
                stated = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else "Any"
                yield f"{where}.{target.attr}", eval(stated, {"Any": Any, **names})  # noqa: S307


def _is_ours(of: Callable[..., object]) -> bool:
    return (getattr(of, "__module__", None) or "").startswith(OURS)


def _classes(hint: object) -> Iterator[type]:
    if isinstance(hint, type) and get_origin(hint) is None and f"{hint.__module__}.".startswith(OURS):
        yield hint
    for part in get_args(hint):
        yield from _classes(part)
        if isinstance(part, list):  # the arguments of a Callable
            for one in part:
                yield from _classes(one)


def _has_any(hint: object) -> bool:
    if hint is Any:
        return True
    if get_origin(hint) is np.ndarray:  # numpy's own name for an array of any shape
        return _has_any(get_args(hint)[1])
    if isinstance(hint, TypeVar):
        return False
    return any(_has_any(part) for part in (*get_args(hint), *(hint if isinstance(hint, list) else ())))
