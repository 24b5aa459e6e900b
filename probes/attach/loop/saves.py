"""Record when a user's loop saves, as phase `checkpoint`: with torch, safetensors, numpy, torch.distributed.checkpoint.

saves = Saves(phases)
saves.patch(imports)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, Protocol

from ...collectives.gradients.model_hook import without_hooks
from ...fail_open import failing_open
from ..patching.on_import import OnImport

__all__ = ["Saves"]

_PLACES = (
    ("torch", "save"),
    ("torch.serialization", "save"),
    ("numpy", "save"),
    ("numpy", "savez"),
    ("numpy", "savez_compressed"),
    ("safetensors.torch", "serialize_file"),  # `save_file` calls this function, however `save_file` was imported
    ("torch.distributed.checkpoint.state_dict_saver", "_save_state_dict"),  # what `dcp.save` calls
)


class _Phases(Protocol):
    """Phases of a loop, as `loop_hooks.LoopPhases` records them."""

    def replace(self, place: Any, name: str, wrapper: Callable[..., Any]) -> None: ...

    def enter(self, kind: str) -> None: ...

    def leave(self, kind: str) -> None: ...

    def is_in(self, kind: str) -> bool: ...


class Saves:
    """Records the saves in the loop's thread; of nested saves only the outermost."""

    def __init__(self, phases: _Phases) -> None:
        self._phases = phases

    def patch(self, imports: OnImport) -> None:
        """Wrap the functions, now or once their modules are imported."""
        for module, function in _PLACES:
            imports.when(module, partial(self._patch, function))

    def _patch(self, function: str, module: ModuleType) -> None:
        if hasattr(module, function):
            self._phases.replace(module, function, self._save)

    def _save(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._phases.is_in("checkpoint"):
            return real(*args, **kwargs)
        with failing_open("attach.save"):
            self._phases.enter("checkpoint")
        try:
            return without_hooks(real, *args, **kwargs)
        finally:
            with failing_open("attach.save"):
                self._phases.leave("checkpoint")
