"""Kinds of findings and analyses that other installed packages bring.

    # pyproject.toml of the package
    [project.entry-points."rankscope.analyzers"]
    my_team = "my_team.rankscope_analyzers"

The entry point names a module with `KINDS` and `ANALYSES`, and where it wants `WHY`, `NEXT` and `FIGURES`, as a package
of `analyzers` has them in `explain` and `figures` (docs/api.md). A module that cannot be loaded costs its own findings
and is reported; no kind of ours can be replaced.
"""

from __future__ import annotations

from typing import Any

from store.plugins import Plugin
from store.plugins import plugins as plugins_of

__all__ = ["GROUP", "Plugin", "part_of", "plugins"]

GROUP = "rankscope.analyzers"


def plugins() -> tuple[Plugin, ...]:
    """All of them, by name. Each is imported once a process."""
    return plugins_of(GROUP, ("KINDS", "ANALYSES"))


def part_of(kind: str, part: str) -> Any:
    """The entry of a kind in `WHY`, `NEXT` or `FIGURES` of the plug-ins; None where none has one."""
    return next((plugin.table(part)[kind] for plugin in plugins() if kind in plugin.table(part)), None)
