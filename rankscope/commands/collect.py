"""`rankscope collect`: merge the run folders of several nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from probes.tape.typed_path import analyze_command
from rankscope.terminal import FormatOption, console, echo, fail, print_json, wants_json

__all__ = ["EPILOG", "collect"]

EPILOG = (
    "\b\nExamples:\nrankscope collect node-0/runs/demo node-1/runs/demo --into runs/demo\n"
    "rankscope collect /mnt/*/runs/demo --into runs/demo"
)


def collect(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The run's folder of each node.")],
    into: Annotated[Path, typer.Option("--into", metavar="DIR", help="New folder, or one made by collect.")],
    checkpoints: Annotated[bool, typer.Option("--checkpoints", help="Copy checkpoints too.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Merge even if the names of the runs differ.")] = False,
    output: FormatOption = "text",
) -> None:
    """Merge the folders of a run whose nodes wrote to their own disks, for analyze, report and dashboard.

    Copies tapes, events, stacks, logs and stores; changes nothing in the folders that it reads. Run it again to
    copy what has been added since.
    """
    as_json = wants_json(output)
    from analyzers.wording import counted, recorded_ranks, size_text
    from probes.tape.rundir import RunError
    from store.collect import collect as collect_runs

    try:
        done = collect_runs(runs, into, checkpoints=checkpoints, force=force)
    except RunError as error:
        fail(str(error))
    if as_json:
        counts = {"files": done.num_files, "bytes": done.num_bytes}
        print_json({"run": str(into), "nodes": done.nodes, "ranks": done.ranks, **counts, "skipped": done.left_out})
        return
    for path in done.left_out:
        echo(f"rankscope: skipped {path}", err=True)
    files = f"{done.num_files:,} file{'s' * (done.num_files != 1)}, {size_text(done.num_bytes)}"
    ranks = recorded_ranks({"num_ranks": len(done.ranks), "world_size": done.run.manifest().get("world_size")})
    what = f"{ranks or 'no rank'} of {counted(len(done.nodes), 'node')}, {files}"
    line = f"{into}: {what}. Now: {analyze_command(into)}"
    console().print(line, markup=False, highlight=False, soft_wrap=True)
