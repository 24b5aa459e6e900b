"""Where the rooms are, and the names under which a process imports them.

    from rankscope._rooms import claim_names

    claim_names()                                # a process of ours: `import trainer` is ours, whatever sys.path says
    from rankscope._rooms.probes.attach import attach          # in a training script: no name of its own is taken

The folders `probes`, `analyzers`, `trainer` and `dashboard` are at the top of the project, and names like these are
taken: a training script has its own `trainer` package or `probes.py` beside it. So in a process that is not ours the
rooms are subpackages of this one. What they import of each other by their short names (`from probes.schema import ...`)
is sent here too: modules loaded from here have an `__import__` of their own. Nobody else's imports pass through it.

In a checkout the rooms lie beside the package `rankscope`; in a wheel they lie in this folder, so that installing it
puts no `trainer` into anybody's site-packages.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

__all__ = ["FOLDER", "ROOMS", "claim_names"]

ROOMS = ("probes", "analyzers", "trainer", "dashboard")

_HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = _HERE if os.path.isdir(os.path.join(_HERE, ROOMS[0])) else os.path.dirname(os.path.dirname(_HERE))
"""The folder that holds the rooms."""
__path__ = [FOLDER]
_import = builtins.__import__


def _import_in_room(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """`__import__` as the rooms' modules see it: the rooms' names mean the rooms."""
    room = name.partition(".")[0]
    if level or room not in ROOMS:
        return _import(name, globals, locals, fromlist or (), level)
    module = _import(f"{__name__}.{name}", globals, locals, fromlist or ("*none*",), 0)
    return module if fromlist else sys.modules[f"{__name__}.{room}"]


class _RoomLoader(SourceFileLoader):
    """Loads a module whose imports go through `_import_in_room`."""

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = _BUILTINS
        super().exec_module(module)


_BUILTINS: dict[str, Any] = {**vars(builtins), "__import__": _import_in_room}


class _RoomFinder(MetaPathFinder):
    """Finds `rankscope._rooms.<room>...`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(__name__ + "."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            assert spec.origin is not None
            spec.loader = _RoomLoader(fullname, spec.origin)
        return spec


class _NameFinder(MetaPathFinder):
    """Finds the rooms under their short names, before anything on sys.path."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [FOLDER], target) if fullname in ROOMS else None


sys.meta_path.insert(0, _RoomFinder())


def claim_names() -> None:
    """From here on the rooms' short names are ours in this process. Not for a process that runs a user's code."""
    if not any(isinstance(finder, _NameFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _NameFinder())
