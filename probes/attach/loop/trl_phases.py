"""Record parts of a step of TRL's trainers as phases: generation, reward, log_probs, sync_weights.

    pieces = TrlPhases(phases)
    pieces.patch(imports)

GRPO and its relatives do most of a step's work before the first forward pass that trains: they sample completions,
score them, and compute log-probabilities under the old and the reference model. They wrap each part in TRL's
`ProfilingContext`, which reports the part's name to experiment trackers. Here the name becomes a phase on the tapes. In
other loops Transformers' `generate` is the phase `generation`. As these phases are not among a step's fixed ones (data,
forward, backward, ...), their time also counts as the gap between the fixed phases around them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch

from ...fail_open import failing_open
from ..patching.on_import import OnImport

__all__ = ["TrlPhases", "phase_of"]

_GENERATION = "transformers.generation.utils"
_MODULE = "trl.extras.profiling"
_PHASES = {
    "generate": "generation",
    "generate_batch": "generation",
    "_calculate_rewards": "reward",
    "_get_per_token_logps_and_entropies": "log_probs",
    "_get_per_token_logps": "log_probs",
    "sync_weights": "sync_weights",
}
"""By the last part of a piece's name: `GRPOTrainer.transformers.generate`, `VLLMGeneration.sync_weights`."""


class _Phases(Protocol):
    """Phases of a loop, as `loop_hooks.LoopPhases` records them."""

    def replace(self, place: Any, name: str, wrapper: Callable[..., Any]) -> None: ...

    def enter(self, kind: str) -> None: ...

    def leave(self, kind: str) -> None: ...

    def begin(self) -> None: ...

    def is_in(self, kind: str) -> bool: ...


def phase_of(name: str) -> str:
    """Name of the phase that corresponds to a piece; empty for pieces that are parts of forward and backward."""
    return _PHASES.get(name.rpartition(".")[2], "")


class TrlPhases:
    """Records the pieces in the loop's thread; of nested pieces of a phase only the outermost."""

    def __init__(self, phases: _Phases) -> None:
        self._phases = phases
        self._open: dict[int, str] = {}  # id of TRL's context -> phase

    def patch(self, imports: OnImport) -> None:
        """Wrap TRL's context and Transformers' `generate`, now or when they are imported."""
        imports.when(_MODULE, self._patch)
        imports.when(_GENERATION, self._patch_generate)

    def _patch_generate(self, module: ModuleType) -> None:
        mixin = getattr(module, "GenerationMixin", None)
        if mixin is not None:
            self._phases.replace(mixin, "generate", self._generate)

    def _generate(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._phases.is_in("generation"):
            return real(*args, **kwargs)
        with failing_open("attach.generate"):
            self._phases.begin()
            self._phases.enter("generation")
        try:
            return real(*args, **kwargs)
        finally:
            with failing_open("attach.generate"):
                self._phases.leave("generation")

    def _patch(self, module: ModuleType) -> None:
        context = getattr(module, "ProfilingContext", None)
        if context is not None:
            self._phases.replace(context, "__enter__", self._enter)
            self._phases.replace(context, "__exit__", self._exit)

    def _enter(self, real: Callable[..., Any], context: Any) -> Any:
        with failing_open("attach.trl"):
            phase = phase_of(str(getattr(context, "name", "")))
            # With gradients the log-probabilities are the forward pass.
            trains = phase == "log_probs" and torch.is_grad_enabled()
            if phase and not trains and not self._phases.is_in(phase):
                self._phases.begin()
                self._phases.enter(phase)
                self._open[id(context)] = phase
        return real(context)

    def _exit(self, real: Callable[..., Any], context: Any, *error: Any) -> Any:
        with failing_open("attach.trl"):
            phase = self._open.pop(id(context), "")
            if phase:
                self._phases.leave(phase)
        return real(context, *error)
