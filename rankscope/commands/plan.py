"""`rankscope plan`: estimate a run before it starts."""

from __future__ import annotations

from typing import Annotated

import typer

from rankscope.terminal import console, echo, fail

__all__ = ["EPILOG", "plan"]

EPILOG = (
    "\b\nExamples:\nrankscope plan llama-8b --gpus 64\n"
    "rankscope plan my.toml --gpus 16 --gpu a100 --gpu-memory 40GB --interconnect nvlink3,ib200\n"
    "rankscope plan llama-8b --gpus 64 --tokens 300B --price-per-gpu-hour 2.5 --failures 0.5\n"
    "rankscope plan my.toml --gpus 8 --set parallel.tp=2 --no-ladder --format json"
)


def plan(
    config: Annotated[
        str, typer.Argument(help="TOML file, or a preset: debug, gpt2-124m, llama-1b, ...", metavar="CONFIG")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting; repeatable."),
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="Number of devices.")] = 8,
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=1, help="Devices per node.")] = 8,
    gpu: Annotated[str, typer.Option("--gpu", help="Device: b200, h200, h100, a100, l40s, rtx4090.")] = "h100",
    gpu_memory: Annotated[
        str, typer.Option("--gpu-memory", metavar="80GB", help="Memory of a device. Default: that of its kind.")
    ] = "",
    interconnect: Annotated[
        str,
        typer.Option("--interconnect", metavar="INSIDE,BETWEEN", help="Links in a node and between nodes."),
    ] = "nvlink,ib400",
    tokens: Annotated[
        str,
        typer.Option("--tokens", metavar="300B", help="Also estimate time, GPU-hours, energy of so many tokens."),
    ] = "",
    price_per_gpu_hour: Annotated[
        float | None,
        typer.Option("--price-per-gpu-hour", min=0, help="With --tokens: price, in the same currency."),
    ] = None,
    failures: Annotated[
        float | None,
        typer.Option(
            "--failures", min=0, metavar="RATE", help="With --tokens: failures per 1,000 GPU-days, and their cost."
        ),
    ] = None,
    ladder: Annotated[bool, typer.Option(help="Also try every other layout, the simplest first.")] = True,
    output: Annotated[str, typer.Option("--format", help="Output: text or json.", metavar="text|json")] = "text",
) -> None:
    """Estimate a run before it starts: memory, traffic, time, likely problems, and the layouts that fit."""
    if output not in ("text", "json"):
        fail(f"--format {output}: choose text or json")
    if price_per_gpu_hour is not None and not tokens:
        fail("--price-per-gpu-hour: needs --tokens, for example --tokens 300B")
    if failures is not None and not tokens:
        fail("--failures: needs --tokens, for example --tokens 300B")
    from trainer.config.load import ConfigError, load_config
    from trainer.layout.plan import resolve
    from trainer.plan.anti_patterns import anti_patterns
    from trainer.plan.budget import failure_cost, parse_tokens, training_cost
    from trainer.plan.expected import expect
    from trainer.plan.hardware import parse_hardware
    from trainer.plan.strategies import strategies
    from trainer.presets import config_path

    try:
        hardware = parse_hardware(
            gpu=gpu, gpu_memory=gpu_memory, gpus_per_node=gpus_per_node, interconnect=interconnect
        )
        settings = load_config(config_path(config), overrides or [])
        expected = expect(settings, resolve(settings, gpus), hardware)
        found = strategies(settings, hardware, gpus) if ladder else None
        cost = lost = None
        if tokens:
            cost = training_cost(
                expected, hardware, num_tokens=parse_tokens(tokens), price_per_gpu_hour=price_per_gpu_hour
            )
            lost = None if failures is None else failure_cost(cost, expected, per_1000_gpu_days=failures)
    except ConfigError as error:
        fail(str(error))
    warnings = anti_patterns(expected, hardware)
    if output == "json":
        import json
        from dataclasses import asdict

        from trainer.plan.json import as_json

        content = as_json(expected, hardware, warnings, found)
        if cost is not None:
            content["cost"] = asdict(cost)
        if lost is not None:
            content["failures"] = asdict(lost)
        echo(json.dumps(content, indent=2, allow_nan=False))
        return
    from trainer.plan.text import render, render_cost, render_failures

    render(expected, hardware, warnings, found, console())
    if cost is not None:
        render_cost(cost, console())
    if lost is not None:
        render_failures(lost, console())
