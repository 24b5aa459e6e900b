"""The gradient norm of a step: as the loop clips by it, or our own; of sharded gradients this rank's part of it.

    norms = StepNorms(recorder, values)
    norms.clipped(norm)                  # what torch computed for clip_grad_norm_
    norms.measure()                      # before the optimizer's step

A rank that holds shards knows the norm of those alone. It is written as a series that is named after the ranks that
hold the rest (`PART`), and the analysis adds up (`analyzers.numerics.global_norms`): no collective is needed for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...collectives.gradients.input_gradient import INPUT_GRADIENT, InputGradientNorms
from ...collectives.groups.shard_groups import ranks_of_parts
from ...gradients import GradientProbe
from ...recorder import Recorder
from ...step_scalars import StepScalars

__all__ = ["PART", "StepNorms"]

PART = "grad_norm_part "
"""Before the ranks that share the gradients: the series of one rank's part."""
MAX_EXAMINED = 3
"""Steps in a row whose gradients are looked at one by one because they are not finite: more would say the same."""


class StepNorms:
    """The gradient norms of one loop."""

    def __init__(self, recorder: Recorder, values: StepScalars, *, is_wanted: bool = True) -> None:
        self._recorder = recorder
        self._values = values
        self.probe: GradientProbe | None = None
        self._make: Callable[[], GradientProbe] | None = None
        self.is_wanted = is_wanted
        """True if gradients are measured where the loop does not clip them."""
        self.measured: float | Tensor | None = None
        """The norm of the current step, if this rank knows it."""
        self.input_gradient = InputGradientNorms()
        self._clipped: Tensor | None = None
        self._partial: tuple[str, Tensor] | None = None  # (ranks, norm of what this one holds)
        self._examined = 0

    def measure_with(self, make: Callable[[], GradientProbe]) -> None:
        """Measure with another probe, made at the next update; free what the last one measured."""
        if self.probe is not None:
            self.probe.close()
        self.probe, self._make = None, make

    def began(self) -> None:
        """A step has begun."""
        self._clipped = self._partial = self.measured = None

    def clipped(self, norm: Any) -> None:
        """Take a norm that torch or FSDP computed for clipping: before it, and for free."""
        if not isinstance(norm, Tensor):
            return
        local = getattr(norm, "_local_tensor", None)
        if local is None:
            self._clipped = norm.detach()
        elif ranks := ranks_of_parts(norm):
            self._partial = ranks, local.detach()
        else:
            self._clipped = local.detach()

    def measure(self, factor: Any = None) -> None:
        """Write the norm, or this rank's part of it; each gradient at an interval. `factor`: what gradients have to be
        divided by, where the optimizer itself does it in its step."""
        if (of_input := self.input_gradient.of_step()) is not None:
            self._values.put(**{INPUT_GRADIENT: of_input})
        if self.probe is None:
            if self._make is None:
                return
            self.probe = self._make()
        step = self._recorder.step_number
        self.probe.after_backward(step)
        norm, parts = self._of_clipping()
        if norm is None and not parts and self.is_wanted:
            parts = self.probe.norms()
            if factor is not None:
                parts = {ranks: part / factor for ranks, part in parts.items()}
            norm = parts.pop("", None) if len(parts) == 1 else None
        numbers = self._write(norm, parts)
        if numbers and all(map(math.isfinite, numbers)):
            self._examined = 0
        elif numbers and self._examined < MAX_EXAMINED:
            self._examined += 1
            self._recorder.log(nonfinite_count=sum(count for _, count in self.probe.examine(step)))

    def updated_by_hand(self) -> None:
        """Write the norm that the loop clipped by; the gradients themselves may be gone."""
        self._write(*self._of_clipping())

    def _of_clipping(self) -> tuple[Tensor | None, dict[str, Tensor]]:
        if self._clipped is not None or self._partial is None:
            return self._clipped, {}
        return None, dict([self._partial])

    def _write(self, norm: Tensor | None, parts: dict[str, Tensor]) -> list[float]:
        """Returns the numbers that no device has to be awaited for."""
        numbers = [one.item() for one in (norm, *parts.values()) if one is not None and one.is_cpu]
        if norm is not None:
            self.measured = numbers[0] if norm.is_cpu else norm
            self._values.put(grad_norm=self.measured)
        for ranks, part in parts.items():
            self._values.put(**{f"{PART}{ranks}": part})
        return numbers
