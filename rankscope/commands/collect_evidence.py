"""`rankscope collect-evidence`: gather a node's evidence of an incident into one archive."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from probes.tape.typed_path import analyze_command
from rankscope.terminal import FormatOption, console, echo, fail, print_json, wants_json

__all__ = ["EPILOG", "collect_evidence"]

EPILOG = (
    "\b\nExamples:\nrankscope collect-evidence --log job.log\n"
    "srun --overlap --jobid JOB --nodes N --ntasks-per-node 1 rankscope collect-evidence --into /shared/evidence\n"
    "rankscope analyze /shared/evidence"
)


def collect_evidence(
    into: Annotated[Path, typer.Option("--into", metavar="DIR", help="Folder for the archive of this node.")] = Path(),
    log: Annotated[list[Path] | None, typer.Option("--log", metavar="FILE", help="A log to include.")] = None,
    pid: Annotated[
        list[int] | None,
        typer.Option("--pid", metavar="PID", help="A process of the job (default: all with RANK set)."),
    ] = None,
    max_mb: Annotated[
        int,
        typer.Option("--max-mb", min=1, metavar="MB", help="Maximum size of the contents; what is left out is listed."),
    ] = 1024,
    output: FormatOption = "text",
) -> None:
    """Gather stacks, dumps, RAS, dmesg, nvidia-smi and logs of this node into one archive for `analyze`.

    Run it on every node of a hanging job at the same moment; the job continues. Missing evidence is listed.
    Exit codes: 0 the archive was written, 2 it was not.
    """
    as_json = wants_json(output)
    from watch.evidence import collect

    try:
        into.mkdir(parents=True, exist_ok=True)
        archive = into / f"evidence-{socket.gethostname() or 'host'}.tar.gz"
        collected = collect(archive, logs=log or (), pids=pid or (), max_bytes=max_mb << 20)
    except OSError as error:
        fail(f"--into {into}: cannot be written ({error.strerror}); name a folder")
    if as_json:
        print_json({"archive": str(collected.archive), "missing": dict(collected.missing)})
        return
    for name, why in collected.missing.items():
        echo(f"rankscope: no {name}: {why}", err=True)
    line = f"{collected.archive}. Now: {analyze_command(into)}"
    console().print(line, markup=False, highlight=False, soft_wrap=True)
