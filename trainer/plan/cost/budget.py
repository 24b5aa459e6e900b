"""Cost of training up to a number of tokens: steps, hours, GPU-hours, money and energy.

    cost = training_cost(expected, hardware, num_tokens=2e12, price_per_gpu_hour=2.5)
    cost.gpu_hours, cost.price, cost.energy_kwh
    failures = failure_cost(cost, expected, per_1000_gpu_days=0.5)
    failures.num_failures, failures.lost_hours

Everything follows from the estimated step time, without restarts, evaluations or checkpoints. The energy is an upper
bound: it assumes that the devices run at their power limit. Hosts, network and cooling are not included.

On average a failure costs half of the time between two checkpoints on disk, and a restart. Failures during the
repetition of lost steps are neglected. A recovery from a copy in memory loses less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.config.load import ConfigError
from trainer.plan.expected import Expected
from trainer.plan.hardware import Hardware

__all__ = ["FailureCost", "TrainingCost", "failure_cost", "parse_tokens", "training_cost"]

RESTART_S = 300.0
"""Assumed seconds from a failure to the next step: detection, rendezvous, imports, loading."""
_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCost:
    num_tokens: int
    steps: int
    hours: float
    gpu_hours: float
    price: float | None
    """In the currency of the given price; None without a price."""
    energy_kwh: float
    tokens_per_parameter: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCost:
    """Expected losses due to failures, in addition to a `TrainingCost`."""

    per_1000_gpu_days: float
    num_failures: float
    interval_steps: int
    lost_hours: float
    lost_ratio: float
    """Lost time divided by the hours that the training takes without failures."""
    lost_price: float | None


def training_cost(
    expected: Expected, hardware: Hardware, *, num_tokens: int, price_per_gpu_hour: float | None
) -> TrainingCost:
    """Cost of `num_tokens` in whole steps."""
    config = expected.config
    steps = math.ceil(num_tokens / (config.train.global_batch_size * config.data.seq_len))
    hours = steps * expected.step_s / 3600
    gpu_hours = hours * expected.plan.world_size
    return TrainingCost(
        num_tokens=num_tokens,
        steps=steps,
        hours=hours,
        gpu_hours=gpu_hours,
        price=None if price_per_gpu_hour is None else gpu_hours * price_per_gpu_hour,
        energy_kwh=gpu_hours * hardware.watts / 1000,
        tokens_per_parameter=num_tokens / expected.num_parameters,
    )


def failure_cost(cost: TrainingCost, expected: Expected, *, per_1000_gpu_days: float) -> FailureCost:
    """Cost of failures at this rate. Without intermediate checkpoints, each failure costs half of the run and a
    restart."""
    interval = expected.config.checkpoint.interval or cost.steps
    num_failures = per_1000_gpu_days * cost.gpu_hours / 24 / 1000
    lost_hours = num_failures * (interval * expected.step_s / 2 + RESTART_S) / 3600
    ratio = lost_hours / cost.hours
    return FailureCost(
        per_1000_gpu_days=per_1000_gpu_days,
        num_failures=num_failures,
        interval_steps=interval,
        lost_hours=lost_hours,
        lost_ratio=ratio,
        lost_price=None if cost.price is None else cost.price * ratio,
    )


def parse_tokens(text: str) -> int:
    """`300B`, `2T`, `1.5e9`, `2_000_000`. Raises ConfigError."""
    written = text.strip().lower().replace("_", "")
    factor = _UNITS.get(written[-1:], 1.0)
    try:
        number = float(written[:-1] if factor > 1 else written) * factor
    except ValueError:
        number = math.nan
    if not (1 <= number < 1e18):
        raise ConfigError(f"--tokens {text}: must be a number of tokens like 300B or 2T")
    return round(number)
