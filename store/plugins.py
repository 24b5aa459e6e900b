"""Modules that other installed packages bring, found by their entry points.

    for plugin in plugins("rankscope.readers", ("recognise", "read")):
        if plugin.module is None:
            print(plugin.name, plugin.problem)

A module that cannot be loaded, or lacks a name that it needs, costs its own part and is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

__all__ = ["Plugin", "plugins"]

MAX_PROBLEM_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """One entry point. `problem` says why it could not be loaded; then `module` is None."""

    name: str
    module: ModuleType | None = None
    problem: str = ""

    def table(self, part: str) -> Mapping[str, Any]:
        """A mapping of the module by its name; empty where it has none."""
        found: Mapping[str, Any] = getattr(self.module, part, None) or {}
        return found


@cache
def plugins(group: str, needed: tuple[str, ...]) -> tuple[Plugin, ...]:
    """All of a group, by name. Each is imported once a process."""
    found = []
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        try:
            module = entry.load()
            if missing := [name for name in needed if not hasattr(module, name)]:
                raise AttributeError(f"{entry.value} has no {' and no '.join(missing)}")
        except Exception as error:  # code of others: whatever it raises is its own loss
            problem = f"{type(error).__name__}: {error}"[:MAX_PROBLEM_CHARS]
            found.append(Plugin(name=entry.name, problem=problem))
        else:
            found.append(Plugin(name=entry.name, module=module))
    return tuple(found)
