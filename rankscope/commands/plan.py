"""`rankscope plan`: estimate a run before it starts."""

from __future__ import annotations

from typing import Annotated

import typer

from rankscope.terminal import console, echo, fail

__all__ = ["EPILOG", "plan"]

EPILOG = (
    "\b\nExamples:\nrankscope plan llama-8b --gpus 64\n"
    "rankscope plan my.toml --gpus 16 --gpu a100 --gpu-memory 40GB --interconnect nvlink3,ib200\n"
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
    ladder: Annotated[bool, typer.Option(help="Also try every other layout, the simplest first.")] = True,
    output: Annotated[str, typer.Option("--format", help="Output: text or json.", metavar="text|json")] = "text",
) -> None:
    """Estimate a run before it starts: memory, traffic, time, likely problems, and the layouts that fit."""
    if output not in ("text", "json"):
        fail(f"--format {output}: choose text or json")
    from trainer.config.load import ConfigError, load_config
    from trainer.layout.plan import resolve
    from trainer.plan.anti_patterns import anti_patterns
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
    except ConfigError as error:
        fail(str(error))
    warnings = anti_patterns(expected, hardware)
    if output == "json":
        import json

        from trainer.plan.json import as_json

        echo(json.dumps(as_json(expected, hardware, warnings, found), indent=2, allow_nan=False))
        return
    from trainer.plan.text import render

    render(expected, hardware, warnings, found, console())
