"""Find readings that stand out from the readings of their peers, by median and median absolute deviation.

slow_among({"gpu-01": 700.0, "gpu-02": 705.0, ...}, slow_ratio=0.9, policy=policy)   # {"gpu-07": 0.62}
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

from analyzers.robust import median_or_nan, sigma
from trainer.preflight.verdict.policy import PreflightPolicy

__all__ = ["high_among", "slow_among"]

Key = TypeVar("Key", bound=Hashable)


def slow_among(values: Mapping[Key, float], *, slow_ratio: float, policy: PreflightPolicy) -> dict[Key, float]:
    """{key: value / value of its peers} for values that are too low, lowest first.

    1. With fewer than `least_peers` values, a value is too low if its ratio to the highest value is below
       `few_peers_ratio` and `slow_ratio`.
    2. Otherwise a value is too low if it is below `slow_ratio` x median, and at least `least_z` spreads below the
       median.
    3. Whatever the spread, a value is too low if it is below `half_speed_ratio` x lower quartile.
    """
    if len(values) < 2:
        return {}
    if len(values) < policy.least_peers:
        usual, limit = max(values.values()), max(values.values()) * min(slow_ratio, policy.few_peers_ratio)
    else:
        usual = median_or_nan(list(values.values()))
        limit = min(usual * slow_ratio, usual - policy.least_z * sigma(list(values.values())))
        limit = max(limit, policy.half_speed_ratio * sorted(values.values())[len(values) // 4])
    slow = {key: value / usual for key, value in values.items() if value < limit}
    return dict(sorted(slow.items(), key=lambda item: item[1]))


def high_among(
    values: Mapping[Key, float], *, high_ratio: float, least_excess: float, policy: PreflightPolicy
) -> dict[Key, float]:
    """{key: value / median} for values that are too high, highest first. Empty with fewer than `least_peers` values."""
    if len(values) < policy.least_peers:
        return {}
    usual, spread = median_or_nan(list(values.values())), sigma(list(values.values()))
    limit = max(usual * high_ratio, usual + least_excess, usual + policy.least_z * spread)
    high = {key: value / usual for key, value in values.items() if value > limit}
    return dict(sorted(high.items(), key=lambda item: -item[1]))
