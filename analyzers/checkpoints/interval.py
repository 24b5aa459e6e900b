"""Checkpoint interval, from the measured cost of a save and the failure rate of the run.

    daly_interval_s(cost_s=0.2, mtbf_s=3600.0)     # 37.8: seconds of training between two saves
    suggest(source, manifest)                      # from a run's own saves and failures; None without saves

The expected time lost to saves and to repeated work is lowest, to first order, with sqrt(2 * cost * MTBF) between saves
(Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974). Daly's higher-order formula
("A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006, equation 37) also
holds if saves are not short compared with the time between failures:

    sqrt(2 c M) * (1 + sqrt(c / 2M) / 3 + (c / 2M) / 9) - c        for c < 2 M, else M

For a save in the background the cost is the time for which training stands still.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from analyzers.checkpoints.policy import FailurePolicy
from analyzers.deaths.failed_attempts import failed_attempts
from analyzers.source import Source

__all__ = ["Suggestion", "daly_interval_s", "suggest", "young_interval_s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """Suggested interval, and the numbers from which it was computed."""

    steps: int
    interval_s: float
    cost_s: float
    mtbf_s: float
    num_saves: int
    num_failures: int
    """Number of failed attempts of the run; if 0, `mtbf_s` is assumed from the number of devices."""


def young_interval_s(*, cost_s: float, mtbf_s: float) -> float:
    """Seconds between saves by Young's first-order formula. Raises ValueError unless both arguments are positive."""
    if not (cost_s > 0 and mtbf_s > 0):
        raise ValueError(f"cost_s = {cost_s}, mtbf_s = {mtbf_s}: both must be above 0")
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_interval_s(*, cost_s: float, mtbf_s: float) -> float:
    """Seconds between saves by Daly's higher-order formula. Raises ValueError unless both arguments are positive."""
    first_order_s = young_interval_s(cost_s=cost_s, mtbf_s=mtbf_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return first_order_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def suggest(source: Source, manifest: Mapping[str, Any], policy: FailurePolicy = FailurePolicy()) -> Suggestion | None:
    """Suggest an interval from a run's records; None without a finished step or a verified save to disk.

    Attempts that were stopped on purpose are not failures. The interval is at least the duration of the longest save,
    so that no save waits for the previous one.
    """
    if not source.has("checkpoints") or not source.has("steps"):
        return None
    ((num_saves, cost_s, longest_s),) = source.rows(
        """
        SELECT count(*), median(stall_ns) / 1e9, max(duration_ns) / 1e9 FROM checkpoints
        WHERE tier = 'disk' AND state = 'verified' AND stall_ns > 0
        """
    )
    ((step_s, wall_s),) = source.rows(
        """
        SELECT median(step_s), sum(seconds) FROM (
            SELECT median(duration_ns) / 1e9 AS step_s, (max(start_ns + duration_ns) - min(start_ns)) / 1e9 AS seconds
            FROM steps WHERE duration_ns IS NOT NULL GROUP BY attempt)
        """
    )
    if not num_saves or not step_s or not wall_s:
        return None
    num_failures = len(failed_attempts(source, manifest))
    world_size = manifest.get("world_size")
    devices = world_size if isinstance(world_size, int) and world_size > 0 else 1
    mtbf_s = wall_s / num_failures if num_failures else policy.device_mtbf_s / devices
    interval_s = max(daly_interval_s(cost_s=cost_s, mtbf_s=mtbf_s), longest_s or 0.0)
    return Suggestion(
        steps=max(1, round(interval_s / step_s)),
        interval_s=interval_s,
        cost_s=cost_s,
        mtbf_s=mtbf_s,
        num_saves=num_saves,
        num_failures=num_failures,
    )
