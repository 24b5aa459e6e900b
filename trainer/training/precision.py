"""Loss scaling for fp16 with sharded gradients.

torch's `GradScaler` looks for Inf in the gradients of one process, but here all ranks must reach the same decision. So
the global norm is tested. It is equal on all ranks, and is not finite if any gradient on any rank is not finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["LossScaler"]


@dataclass(slots=True)
class LossScaler:
    """Scale of the loss, as in Micikevicius et al. 2018: halved on overflow, doubled after enough good steps."""

    scale: float = 2.0**16
    growth_interval: int = 2000
    lowest: float = 1.0
    good_steps: int = 0

    def absorbs(self, norm: float) -> bool:
        """Return True, and halve the scale, if `norm` is not finite and the scale may be the cause.

        False at the lowest scale, where an overflow comes from the model.
        """
        if math.isfinite(norm):
            return False
        self.good_steps = 0
        if self.scale <= self.lowest:
            return False
        self.scale = max(self.lowest, self.scale / 2)
        return True

    def succeeded(self) -> None:
        """Count a step that was taken."""
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.scale, self.good_steps = self.scale * 2, 0

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load(self, state: dict[str, float]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
