"""Run actions when modules are imported, without importing them.

    imports = OnImport()
    imports.when("safetensors.torch", patch)     # now if it is imported already, else right after its import
    ...
    imports.remove()

A script may import a library inside the function that uses it, so patching at any fixed point could be too early or too
late.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ...fail_open import failing_open

__all__ = ["OnImport"]

Action = Callable[[ModuleType], None]


class OnImport(MetaPathFinder):
    """An import finder that delegates to the other finders, and adds an action to the loader they return."""

    def __init__(self) -> None:
        self._actions: dict[str, list[Action]] = {}

    def when(self, name: str, action: Action) -> None:
        """Call `action(module)` when the module `name` is imported."""
        module = sys.modules.get(name)
        if module is not None and not _is_initializing(module):
            action(module)
            return
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self._actions.setdefault(name, []).append(action)

    def remove(self) -> None:
        """Stop waiting for imports."""
        self._actions.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an awaited module, with a loader that acts after it; None for all others."""
        actions = self._actions.pop(fullname, None)  # so that a nested call for the same module ends
        if actions is None:
            return None
        try:
            for finder in [finder for finder in sys.meta_path if finder is not self]:
                find = getattr(finder, "find_spec", None)
                spec = find(fullname, path, target) if find is not None else None
                if spec is not None:
                    if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                        spec.loader = _ActingLoader(spec.loader, self._actions)
                    return spec  # type: ignore[no-any-return]
            return None
        finally:
            self._actions[fullname] = actions  # kept until the module is executed: a spec alone imports nothing


class _ActingLoader(Loader):
    """A loader that runs a module's actions after it has executed the module. All else is done by the real loader."""

    def __init__(self, real: Any, actions: dict[str, list[Action]]) -> None:
        self._real, self._actions_by_name = real, actions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module as usual, then run its actions."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        module.__loader__ = self._real
        self._real.exec_module(module)
        for action in self._actions_by_name.pop(module.__name__, ()):
            with failing_open("attach.import"):
                action(module)


def _is_initializing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
