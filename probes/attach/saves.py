"""Saves of a loop of the user's own as phase `checkpoint`: torch.save, safetensors and torch.distributed.checkpoint.

saves = Saves(phases)
saves.patch()                # again after the first step: libraries may be imported late
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..fail_open import failing_open

__all__ = ["Saves"]

_PLACES = (
    ("torch", "save"),
    ("torch.serialization", "save"),
    ("safetensors.torch", "serialize_file"),  # what `save_file` calls, however it was imported
    ("torch.distributed.checkpoint.state_dict_saver", "_save_state_dict"),  # what `dcp.save` calls
)


class _Phases(Protocol):
    """Phases of a loop, as `loop_hooks.LoopPhases` records them."""

    def replace(self, place: Any, name: str, wrapper: Callable[..., Any]) -> None: ...

    def enter(self, kind: str) -> None: ...

    def leave(self, kind: str) -> None: ...

    def is_in(self, kind: str) -> bool: ...


class Saves:
    """Records each save of the thread that attached, the outermost where one calls another."""

    def __init__(self, phases: _Phases) -> None:
        self._phases = phases
        self._patched: set[tuple[str, str]] = set()

    def patch(self) -> None:
        """Wrap the functions of modules that have been imported by now."""
        for place in _PLACES:
            module = torch if place[0] == "torch" else sys.modules.get(place[0])
            if place not in self._patched and hasattr(module, place[1]):
                self._patched.add(place)
                self._phases.replace(module, place[1], self._save)

    def _save(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._phases.is_in("checkpoint"):
            return real(*args, **kwargs)
        with failing_open("attach.save"):
            self._phases.enter("checkpoint")
        try:
            return real(*args, **kwargs)
        finally:
            with failing_open("attach.save"):
                self._phases.leave("checkpoint")
