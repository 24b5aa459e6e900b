"""Check whether a run can continue without the ranks that `watch` asks to exclude.

refusal(config, request, num_available=4, leaving=1)      # "" if it can, else the reason why they stay
"""

from __future__ import annotations

from trainer.config.config import Config
from trainer.layout.resolve import fitting_world
from watch.exclusion.request import ExclusionRequest

__all__ = ["refusal"]


def refusal(config: Config, request: ExclusionRequest, *, num_available: int, leaving: int) -> str:
    """Reason in one line why the ranks stay; empty if they can be excluded. `num_available`: number of ranks, including
    spares.

    A smaller world trains the same global batch, so its steps take proportionally longer.
    """
    before, after = fitting_world(config, num_available), fitting_world(config, num_available - leaving)
    if not after:
        return f"no layout fits on {num_available - leaving} ranks"
    if after == before:
        return ""
    if request.keeps_size:
        return f"no spare: without them {after} of {before} ranks are left"
    if after <= request.min_size_ratio * before:
        cost = 1 / request.min_size_ratio
        return f"{after} ranks would be slower than {before} with the slow one, which costs {cost:.2f}x"
    return ""
