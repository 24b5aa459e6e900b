"""`rankscope drill`: inject faults into a configuration, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope.terminal import console, fail
from trainer.faults.catalogue import MESHES

__all__ = ["EPILOG", "drill"]

EPILOG = (
    "Examples:  rankscope drill examples/gpt-demo.toml   |   "
    "rankscope drill my.toml --faults F2,F22,kill+nan_grad   |   "
    "rankscope drill my.toml --mesh ddp,fsdp,fsdp*tp --seeds 5 --format json --html drill.html"
)


def drill(
    config_path: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="TOML file or preset. Default: the built-in settings.")
    ] = None,
    faults: Annotated[
        str,
        typer.Option("--faults", metavar="all|F2,nan_grad,...", help="Faults to inject; A+B injects both in one run."),
    ] = "all",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs of each fault, at other steps and ranks.")] = 1,
    mesh: Annotated[
        str, typer.Option("--mesh", metavar="ddp,fsdp,...", help=f"Layouts to try: {', '.join(MESHES)}.")
    ] = "config",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting; repeatable.")
    ] = None,
    nproc_per_node: Annotated[
        int, typer.Option("--nproc-per-node", min=0, help="Ranks; 0 takes as many as the mesh of CONFIG needs.")
    ] = 0,
    limit_s: Annotated[float, typer.Option("--limit-s", min=10, help="Time limit of one run.")] = 180.0,
    output: Annotated[str, typer.Option("--format", help="Output: text or json.", metavar="text|json")] = "text",
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write an HTML page.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep every run. Default: only those that failed.")] = False,
    list_faults: Annotated[bool, typer.Option("--list", help="List the faults and exit.")] = False,
) -> None:
    """Train your configuration with faults injected one after the other; report what was detected and recovered."""
    if output not in ("text", "json"):
        fail(f"--format {output}: choose text or json")
    from trainer.drills.table import print_faults

    if list_faults:
        print_faults(console())
        return
    from trainer.config.load import ConfigError, load_config
    from trainer.drills.command import run_drill
    from trainer.drills.execute import Base
    from trainer.drills.scenario import DrillError, plan_drill
    from trainer.launcher.start import ranks_needed
    from trainer.presets import config_path as preset_or_file

    changes = overrides or []
    try:
        config_path = config_path and preset_or_file(config_path)
        config = load_config(config_path, changes)
        num_ranks = nproc_per_node or ranks_needed(config)
        plan = plan_drill(config, faults.split(","), meshes=mesh.split(","), seeds=seeds, num_ranks=num_ranks)
    except (ConfigError, DrillError) as error:
        fail(str(error))
    base = Base(config=config_path, overrides=tuple(changes), num_ranks=num_ranks)
    raise typer.Exit(
        run_drill(base, plan, runs=Path(config.run.dir), output=output, html=html, keep=keep, limit_s=limit_s)
    )
