"""`rankscope plan`: estimate a run before it starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.terminal import FormatOption, console, echo, fail, wants_json

if TYPE_CHECKING:
    from trainer.plan.calibration import Calibration
    from trainer.plan.cost.budget import FailureCost, TrainingCost
    from trainer.plan.cost.compute_optimal import BudgetTokens
    from trainer.plan.expected import Expected
    from trainer.plan.hardware import Hardware
    from trainer.plan.strategies import Strategies

__all__ = ["EPILOG", "plan"]

EPILOG = (
    "\b\nExamples:\nrankscope plan llama-8b --gpus 64\n"
    "rankscope plan my.toml --gpus 16 --gpu a100 --gpu-memory 40GB --interconnect nvlink3,ib200\n"
    "rankscope plan llama-8b --gpus 64 --tokens 300B --price-per-gpu-hour 2.5 --failures 0.5\n"
    "rankscope plan llama-8b --gpus 64 --gpu-hours 50000 --calibrate runs/latest\n"
    "rankscope plan my.toml --gpus 8 --set parallel.tp=2 --no-ladder --format json"
)


def plan(
    context: typer.Context,
    config: Annotated[
        str, typer.Argument(help="TOML file, or a preset: debug, gpt2-124m, llama-1b, ...", metavar="CONFIG")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting; repeatable."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="Number of devices. Default: what a fixed layout needs, else 8.")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=1, help="Devices per node.")] = 8,
    gpu: Annotated[
        str,
        typer.Option(
            "--gpu", help="Device: gb200, b200, h200, h100, a100, v100, l40s, l4, a10, rtx4090, mi300x, mi355x."
        ),
    ] = "h100",
    gpu_memory: Annotated[
        str, typer.Option("--gpu-memory", metavar="80GB", help="Memory of a device. Default: that of its kind.")
    ] = "",
    interconnect: Annotated[
        str,
        typer.Option(
            "--interconnect",
            metavar="INSIDE,BETWEEN",
            help="Links in a node and between nodes; eth100/2: two devices share an adapter.",
        ),
    ] = "nvlink,ib400",
    hardware_table: Annotated[
        Path | None, typer.Option("--hardware", metavar="FILE", help="TOML file with devices and links to add.")
    ] = None,
    host_memory: Annotated[
        str, typer.Option("--host-memory", metavar="2TB", help="Host memory of a node. Default: unlimited.")
    ] = "",
    tokens: Annotated[
        str,
        typer.Option("--tokens", metavar="300B", help="Also estimate time, GPU-hours and energy for this many tokens."),
    ] = "",
    price_per_gpu_hour: Annotated[
        float | None,
        typer.Option("--price-per-gpu-hour", min=0, help="With --tokens or --gpu-hours: also estimate the price."),
    ] = None,
    failures: Annotated[
        float | None,
        typer.Option(
            "--failures", min=0, metavar="RATE", help="With --tokens: failures per 1,000 GPU-days, and their cost."
        ),
    ] = None,
    gpu_hours: Annotated[
        float | None,
        typer.Option("--gpu-hours", min=0, help="Also estimate the tokens and best model size for this budget."),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option("--calibrate", metavar="RUN", help="Scale all times to those measured in a run."),
    ] = None,
    ladder: Annotated[bool, typer.Option(help="Also try every other layout, the simplest first.")] = True,
    output: FormatOption = "text",
) -> None:
    """Estimate a run before it starts: memory, traffic, time, likely problems, and the layouts that fit."""
    as_json = wants_json(output)
    if price_per_gpu_hour is not None and not tokens and gpu_hours is None:
        fail("--price-per-gpu-hour: needs --tokens or --gpu-hours, for example --tokens 300B")
    if failures is not None and not tokens:
        fail("--failures: needs --tokens, for example --tokens 300B")
    from trainer.config.load import ConfigError, load_config
    from trainer.layout.resolve import resolve
    from trainer.plan.anti_patterns import anti_patterns
    from trainer.plan.calibration import calibrate as measure
    from trainer.plan.calibration import calibrated, calibrated_strategies
    from trainer.plan.cost.budget import failure_cost, parse_tokens, training_cost
    from trainer.plan.cost.compute_optimal import within_budget
    from trainer.plan.expected import expect
    from trainer.plan.hardware import parse_hardware
    from trainer.plan.strategies import strategies
    from trainer.presets import config_path

    try:
        hardware = parse_hardware(
            gpu=gpu, gpu_memory=gpu_memory, gpus_per_node=gpus_per_node, interconnect=interconnect,
            host_memory=host_memory, table=hardware_table,
        )  # fmt: skip
        settings = load_config(config_path(config), overrides or [])
        fixed = settings.parallel.num_ranks
        if gpus is not None and fixed is not None and fixed != gpus:
            raise ConfigError(f"the layout of {config} is for {fixed} devices: use --gpus {fixed}, or change parallel")
        gpus = gpus or fixed or 8
        expected = expect(settings, resolve(settings, gpus), hardware)
        found = strategies(settings, hardware, gpus) if ladder else None
        correction = measure(calibrate, hardware) if calibrate is not None else None
        if correction is not None:
            expected = calibrated(expected, correction.factor)
            found = calibrated_strategies(found, correction.factor) if found is not None else None
        cost = lost = budget = None
        if gpu_hours is not None:
            budget = within_budget(expected, gpu_hours=gpu_hours, price_per_gpu_hour=price_per_gpu_hour)
        if tokens:
            cost = training_cost(
                expected, hardware, num_tokens=parse_tokens(tokens), price_per_gpu_hour=price_per_gpu_hour
            )
            lost = None if failures is None else failure_cost(cost, expected, per_1000_gpu_days=failures)
    except ConfigError as error:
        fail(str(error))
    source = context.get_parameter_source("gpu")
    report = _Report(
        is_assumed=source is not None and source.name == "DEFAULT",
        expected=expected, hardware=hardware, warnings=anti_patterns(expected, hardware), found=found,
        costs={"cost": cost, "failures": lost, "budget": budget, "calibration": correction},
    )  # fmt: skip
    if as_json:
        _print_json(report)
    else:
        _print_text(report)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """Estimate of a run, with the costs that were asked for."""

    is_assumed: bool
    """True if no device was named."""
    expected: Expected
    hardware: Hardware
    warnings: list[str]
    found: Strategies | None
    costs: dict[str, TrainingCost | FailureCost | BudgetTokens | Calibration | None]
    """Costs by their key in the JSON output; None if not requested."""


def _print_json(report: _Report) -> None:
    import json

    from trainer.plan.json import as_json as plan_json

    content = plan_json(report.expected, report.hardware, report.warnings, report.found)
    content |= {name: asdict(value) for name, value in report.costs.items() if value is not None}
    echo(json.dumps(content, indent=2, allow_nan=False))


def _print_text(report: _Report) -> None:
    from trainer.plan.cost.cost_text import render_costs
    from trainer.plan.text import render

    render_costs([report.costs["calibration"]], report.expected, console())
    render(
        report.expected, report.hardware, report.warnings, report.found, console(), is_assumed=report.is_assumed
    )  # fmt: skip
    render_costs([report.costs[name] for name in ("cost", "failures", "budget")], report.expected, console())
