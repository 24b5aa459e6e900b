"""Costs of a plan in the terminal: for given tokens, failures or GPU-hours.

render_costs([cost, failures, None, budget], expected, console)
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape

from trainer.plan.calibration import Calibration
from trainer.plan.cost.budget import RESTART_S, FailureCost, TrainingCost
from trainer.plan.cost.compute_optimal import TOKENS_PER_PARAMETER, BudgetTokens
from trainer.plan.expected import Expected
from trainer.plan.text import amount, seconds

__all__ = ["render_costs"]

Cost = TrainingCost | FailureCost | BudgetTokens | Calibration


def render_costs(costs: Iterable[Cost | None], expected: Expected, console: Console) -> None:
    """Print the given costs, in this order."""
    for cost in costs:
        match cost:
            case TrainingCost():
                _cost(cost, console)
            case FailureCost():
                _failures(cost, console)
            case BudgetTokens():
                _budget(cost, expected.num_parameters, console)
            case Calibration():
                _calibration(cost, console)


def _cost(cost: TrainingCost, console: Console) -> None:
    """Print the cost of a number of tokens."""
    _print(
        console,
        f"[bold]Cost[/] of {amount(cost.num_tokens)}tokens ({cost.tokens_per_parameter:.3g} a parameter): "
        f"{cost.steps} steps, {_duration(cost.hours)}, {cost.gpu_hours:,.0f} GPU-hours{_price(cost.price)}, "
        f"{cost.energy_kwh / 1e3:,.3g} MWh at the devices' power limit",
        "  an estimate, without restarts, evaluations, checkpoints, hosts and cooling\n",
    )


def _failures(failures: FailureCost, console: Console) -> None:
    """Print the additional cost of failures."""
    _print(
        console,
        f"[bold]Failures[/] at {failures.per_1000_gpu_days:g} per 1,000 GPU-days: "
        f"{failures.num_failures:,.3g} expected, {_duration(failures.lost_hours)} lost ({failures.lost_ratio:.1%})"
        f"{_price(failures.lost_price)}, with a checkpoint every {failures.interval_steps} steps and "
        f"{RESTART_S:.0f} s for a restart",
    )


def _budget(budget: BudgetTokens, num_parameters: int, console: Console) -> None:
    """Print the training that a number of GPU-hours allows."""
    best = budget.optimal
    _print(
        console,
        f"[bold]Budget[/] of {budget.gpu_hours:,.0f} GPU-hours{_price(budget.price)}: {budget.steps} steps in "
        f"{_duration(budget.hours)}, {amount(budget.num_tokens).strip()} tokens "
        f"({budget.tokens_per_parameter:.3g} a parameter)",
        f"  compute-optimal for the same {amount(best.num_flops)}FLOP: {amount(best.num_parameters).strip()} "
        f"parameters on {amount(best.num_tokens).strip()} tokens ({TOKENS_PER_PARAMETER:g} a parameter, Hoffmann et "
        f"al. 2022); this model has {amount(num_parameters).strip()}\n",
    )


def _calibration(found: Calibration, console: Console) -> None:
    """Print the factor applied to all times."""
    device = f" on {escape(found.device)}" if found.device else ""
    _print(
        console,
        f"[bold]Calibrated[/] by {escape(found.run)}{device}: a step took {seconds(found.measured_s)} (median of "
        f"{found.num_steps}), its own plan {seconds(found.planned_s)}. All times below are x {found.factor:.3g}.\n",
    )


def _print(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _price(price: float | None) -> str:
    return "" if price is None else f", price {price:,.0f}"


def _duration(hours: float) -> str:
    return f"{hours / 24:,.1f} days" if hours >= 48 else f"{hours:,.1f} hours"
