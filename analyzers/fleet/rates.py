"""Rates of rare incidents from small samples, by empirical Bayes over all members of a fleet.

    prior = fit(counts, hours)                     # distribution of rates in this fleet
    rate = posterior(prior, count=3, hours=40.0)   # rate.mean_per_h, rate.low_per_h, rate.high_per_h
    tail(prior, count=3, hours=40.0)               # probability that an ordinary member has as many, or more

Counts are Poisson with individual rates, and rates are Gamma distributed over the fleet (so a count is negative
binomial). Source: Gelman et al., "Bayesian Data Analysis", chapter 2.7 (cancer rates of counties).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Prior", "Rate", "fit", "posterior", "tail"]

Z_90 = 1.645
_SHAPES = tuple(10 ** (step / 4) for step in range(-4, 13))  # from 0.1 (rates differ widely) to 1000 (all rates equal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Gamma distribution of rates, with a mean of `shape / hours` per hour."""

    shape: float
    hours: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Incidents per hour, with a 90 % interval."""

    mean_per_h: float
    low_per_h: float
    high_per_h: float


def fit(counts: Sequence[int], hours: Sequence[float]) -> Prior:
    """The prior under which these counts are most likely; an uninformative one if there are no hours."""
    total_hours = sum(hours)
    if total_hours <= 0:
        return Prior(shape=1.0, hours=1.0)
    mean = max(sum(counts), 0.5) / total_hours
    shape = max(_SHAPES, key=lambda a: sum(_log_mass(k, t, a, a / mean) for k, t in zip(counts, hours, strict=True)))
    return Prior(shape=shape, hours=shape / mean)


def posterior(prior: Prior, *, count: int, hours: float) -> Rate:
    """Rate of a member, given its number of incidents and its hours.

    The prior counts for at most one incident, so that a deviating member can stand out.
    """
    weight = min(1.0, 1.0 / prior.shape)
    shape, rate = prior.shape * weight + count, prior.hours * weight + hours
    return Rate(
        mean_per_h=shape / rate,
        low_per_h=_gamma_quantile(shape, -Z_90) / rate,
        high_per_h=_gamma_quantile(shape, Z_90) / rate,
    )


def tail(prior: Prior, *, count: int, hours: float) -> float:
    """Probability that a member with a typical rate has at least `count` incidents in `hours`."""
    below = sum(math.exp(_log_mass(k, hours, prior.shape, prior.hours)) for k in range(count))
    return min(1.0, max(0.0, 1.0 - below))


def _log_mass(count: int, hours: float, shape: float, rate: float) -> float:
    """Logarithm of the negative binomial mass."""
    return (
        math.lgamma(shape + count) - math.lgamma(shape) - math.lgamma(count + 1)
        + shape * math.log(rate / (rate + hours))
        + (count * math.log(hours / (rate + hours)) if count else 0.0)
    )  # fmt: skip


def _gamma_quantile(shape: float, z: float) -> float:
    """Quantile of a Gamma distribution with scale 1, by Wilson and Hilferty (1931)."""
    root = 1 - 1 / (9 * shape) + z / (3 * math.sqrt(shape))
    return float(shape * max(0.0, root) ** 3)
