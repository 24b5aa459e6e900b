"""Kinds of findings and analyses that other installed packages bring.

    # pyproject.toml of the package
    [project.entry-points."rankscope.analyzers"]
    my_team = "my_team.rankscope_analyzers"

The entry point names a module with `KINDS` and `ANALYSES`, and where it wants `WHY`, `NEXT` and `FIGURES`, as a package
of `analyzers` has them in `explain` and `figures` (docs/api.md). A module that cannot be loaded costs its own findings
and is reported; no kind of ours can be replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

__all__ = ["GROUP", "Plugin", "part_of", "plugins"]

GROUP = "rankscope.analyzers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """One entry point. `problem` says why it could not be loaded; then `module` is None."""

    name: str
    module: ModuleType | None = None
    problem: str = ""

    def table(self, part: str) -> Mapping[str, Any]:
        """`WHY`, `NEXT` or `FIGURES` of the module; empty where it has none."""
        found: Mapping[str, Any] = getattr(self.module, part, None) or {}
        return found


@cache
def plugins() -> tuple[Plugin, ...]:
    """All of them, by name. Each is imported once a process."""
    found = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            module = entry.load()
            if not hasattr(module, "KINDS") or not hasattr(module, "ANALYSES"):
                raise AttributeError(f"{entry.value} has no KINDS or no ANALYSES")
        except Exception as error:  # code of others: whatever it raises is its own loss
            found.append(Plugin(name=entry.name, problem=f"{type(error).__name__}: {error}"[:500]))
        else:
            found.append(Plugin(name=entry.name, module=module))
    return tuple(found)


def part_of(kind: str, part: str) -> Any:
    """The entry of a kind in `WHY`, `NEXT` or `FIGURES` of the plug-ins; None where none has one."""
    return next((plugin.table(part)[kind] for plugin in plugins() if kind in plugin.table(part)), None)
