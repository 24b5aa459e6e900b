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
        """Wait for no further import."""
        self._actions.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an awaited module, with a loader that acts after it; None for all others."""
        actions = self._actions.pop(fullname, None)
        if actions is None:
            return None
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find is not None else None
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _ActingLoader(spec.loader, actions)
                return spec  # type: ignore[no-any-return]
        self._actions[fullname] = actions  # not installed; it may be asked for again
        return None


class _ActingLoader(Loader):
    """A loader that calls its actions after the module was executed; everything else is the real loader's."""

    def __init__(self, real: Any, actions: list[Action]) -> None:
        self._real, self._own_actions = real, actions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module as usual, then run the action."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        module.__loader__ = self._real
        self._real.exec_module(module)
        for action in self._own_actions:
            with failing_open("attach.import"):
                action(module)


def _is_initializing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
