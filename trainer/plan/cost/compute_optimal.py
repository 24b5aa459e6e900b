"""Compute-optimal model size and number of tokens, and the tokens that a GPU-hour budget pays for.

    within = within_budget(expected, gpu_hours=10_000, price_per_gpu_hour=2.5)
    within.num_tokens                                           # tokens that the planned model can train on
    within.optimal.num_parameters, within.optimal.num_tokens    # lowest loss for the same number of operations

Hoffmann et al. 2022 (arXiv 2203.15556, "Chinchilla"): training takes C = 6 N D operations for N parameters and D
tokens. The loss is lowest if both grow with the square root of C, at about 20 tokens per parameter (approaches 1 and 2
of the paper; 70 billion parameters on 1.4 trillion tokens). The rule ignores the cost of inference, which is the reason
to train smaller models on many more tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.plan.expected import Expected

__all__ = ["TOKENS_PER_PARAMETER", "BudgetTokens", "ComputeOptimal", "compute_optimal", "within_budget"]

TOKENS_PER_PARAMETER = 20.0
_FLOPS_PER_PARAMETER_TOKEN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOptimal:
    num_flops: float
    num_parameters: float
    num_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetTokens:
    """Tokens that a number of GPU-hours pays for, in whole steps."""

    gpu_hours: float
    hours: float
    steps: int
    num_tokens: int
    tokens_per_parameter: float
    price: float | None
    """Cost in the currency of the given price; None if no price is given."""
    optimal: ComputeOptimal
    """Compute-optimal model for the same number of operations, at the utilisation of the planned model."""


def compute_optimal(num_flops: float) -> ComputeOptimal:
    """Model size and number of tokens with the lowest loss for a number of operations."""
    parameters = math.sqrt(num_flops / (_FLOPS_PER_PARAMETER_TOKEN * TOKENS_PER_PARAMETER))
    return ComputeOptimal(num_flops=num_flops, num_parameters=parameters, num_tokens=TOKENS_PER_PARAMETER * parameters)


def within_budget(expected: Expected, *, gpu_hours: float, price_per_gpu_hour: float | None) -> BudgetTokens:
    """Steps and tokens of the planned model that fit into these GPU-hours."""
    config = expected.config
    hours = gpu_hours / expected.plan.world_size
    steps = int(hours * 3600 / expected.step_s)
    num_tokens = steps * config.train.global_batch_size * config.data.seq_len
    return BudgetTokens(
        gpu_hours=gpu_hours,
        hours=hours,
        steps=steps,
        num_tokens=num_tokens,
        tokens_per_parameter=num_tokens / expected.num_parameters,
        price=None if price_per_gpu_hour is None else gpu_hours * price_per_gpu_hour,
        optimal=compute_optimal(num_tokens * expected.flops_per_token),
    )
