"""`rankscope drill`: inject faults into a configuration, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope.terminal import LONGEST_S, FormatOption, console, echo, fail, print_json, refuse_bad_output, wants_json
from trainer.faults.catalogue import MESHES

__all__ = ["EPILOG", "drill"]

EPILOG = (
    "\b\nExamples:\nrankscope drill examples/gpt-demo.toml\n"
    "rankscope drill my.toml --faults F2,F22,kill+nan_grad\n"
    "rankscope drill my.toml --mesh ddp,fsdp,fsdp*tp --seeds 5 --format json --html drill.html\n"
    "rankscope drill --script train.py --nproc-per-node 4 --faults slow,kill,hang\n"
    "rankscope drill --script 'train.py --lr 1e-3' --nproc-per-node 2 --faults all --format json"
)


def drill(
    config_path: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="TOML file or preset. Default: the built-in settings.")
    ] = None,
    script: Annotated[
        str,
        typer.Option("--script", metavar="'FILE ARGUMENTS'", help="Drill your own script, or '-m MODULE ...'."),
    ] = "",
    faults: Annotated[
        str,
        typer.Option("--faults", metavar="all|F2,nan_grad,...", help="Faults to inject; A+B injects both in one run."),
    ] = "all",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs per fault, at different steps and ranks.")] = 1,
    mesh: Annotated[
        str, typer.Option("--mesh", metavar="ddp,fsdp,...", help=f"Layouts to try: {', '.join(MESHES)}.")
    ] = "config",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting; repeatable.")
    ] = None,
    nproc_per_node: Annotated[
        int, typer.Option("--nproc-per-node", min=0, help="Ranks; 0 takes as many as the mesh of CONFIG needs.")
    ] = 0,
    limit_s: Annotated[float, typer.Option("--limit-s", min=10, max=LONGEST_S, help="Time limit of one run.")] = 180.0,
    output: FormatOption = "text",
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write an HTML page.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep every run. Default: only those that failed.")] = False,
    list_faults: Annotated[bool, typer.Option("--list", help="List the faults and exit.")] = False,
) -> None:
    """Train your configuration with faults injected one after the other; report what was detected and recovered.

    With --script, `rankscope run` launches your own script, unchanged, with faults such as slow, kill and hang.
    """
    as_json = wants_json(output)
    refuse_bad_output("--html", html)
    if script:
        if config_path is not None or overrides or html is not None or mesh != "config" or seeds != 1:
            fail(
                "--script takes --faults, --nproc-per-node, --limit-s, --format, --keep and --list and no other options"
            )
        raise typer.Exit(_drill_script(script, faults, nproc_per_node, limit_s, as_json, keep=keep, lists=list_faults))
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


def _drill_script(
    script: str, faults: str, num_ranks: int, limit_s: float, as_json: bool, *, keep: bool, lists: bool
) -> int:
    """Drill the user's script; 1 if a fault was missed or a clean run has a finding."""
    import shlex
    import time

    from analyzers.report.terminal.safe_console import SafeConsole
    from trainer.drills.script.drill import print_rows, script_drill, to_json
    from trainer.drills.script.execute import Plan
    from trainer.drills.script.faults import SCRIPT_FAULTS, chosen_faults

    if lists:
        for name, fault in SCRIPT_FAULTS.items():
            expected = " or ".join(fault.kinds) or "nothing"
            echo(f"{name:22} {fault.what}: {expected}")
        return 0
    try:
        names, words = chosen_faults(faults), shlex.split(script)
    except ValueError as error:
        fail(str(error))
    if not words or (words[0] != "-m" and not Path(words[0]).is_file()):
        fail(f"--script {script}: no such file")
    plan = Plan(words=tuple(words), num_ranks=num_ranks or 2, limit_s=limit_s)
    folder = (Path("runs") / time.strftime("drill-%Y%m%d-%H%M%S")).resolve()
    shown, rows = SafeConsole(stderr=as_json), []
    try:
        for row in script_drill(plan, names, folder=folder, keep=keep):
            rows.append(row)
            outcome = "right" if row.is_right else "WRONG"
            shown.print(f"{len(rows)}/{len(names) + 1}  {row.fault}: {outcome}, {row.wall_s:.0f} s", highlight=False)
    except KeyboardInterrupt:
        print_rows(rows, shown)
        return 130
    print_rows(rows, shown)
    if as_json:
        print_json(to_json(rows))
    return 0 if rows and all(row.is_right for row in rows) else 1
