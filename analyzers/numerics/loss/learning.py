"""Fall of the loss over a run, in units of its step-to-step noise.

fall = loss_fall(losses)
fall.drop_nat, fall.margin_ratio       # 3.3, 24.0: it fell by 24 times the noise
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from analyzers.policy import SHARED
from analyzers.robust import sigma

__all__ = ["LossFall", "loss_fall"]

_WINDOW_RATIO = 0.1  # first and last tenth of the steps: long enough for a median, short enough to be an end


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFall:
    """Median loss of the first and of the last `window_steps` steps, and the noise between neighbouring steps."""

    start_nat: float
    end_nat: float
    noise_nat: float
    window_steps: int

    @property
    def drop_nat(self) -> float:
        """Decrease of the loss, nat; negative if it rose."""
        return self.start_nat - self.end_nat

    @property
    def margin_ratio(self) -> float:
        """The drop in units of the noise; infinite if there is no noise."""
        return self.drop_nat / self.noise_nat if self.noise_nat else float("inf") * (self.drop_nat or 0.0)


def loss_fall(losses: Sequence[float]) -> LossFall | None:
    """Fall of finite `losses` in the order of training; None for fewer than twice `SHARED.min_steps`.

    The noise is the robust spread (MAD) of differences between neighbours, divided by sqrt(2). The trend of a falling
    loss hardly affects it.
    """
    if len(losses) < 2 * SHARED.min_steps:
        return None
    window = max(SHARED.block_steps, int(len(losses) * _WINDOW_RATIO))
    steps = [after - before for before, after in itertools.pairwise(losses)]
    noise = sigma(steps) / 2**0.5
    return LossFall(
        start_nat=median(losses[:window]), end_nat=median(losses[-window:]), noise_nat=noise, window_steps=window
    )
