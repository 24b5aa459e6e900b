"""`rankscope profile`: ask ranks of a live run to record their next steps with torch.profiler."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.terminal import echo, fail

if TYPE_CHECKING:
    from probes.profiling.request import CaptureRequest
    from probes.tape.rundir import RunDir

__all__ = ["EPILOG", "profile"]

EPILOG = (
    "\b\nExamples:\nrankscope profile runs/latest\nrankscope profile runs/latest --ranks 0,3 --steps 5\n"
    "rankscope analyze runs/latest/traces"
)


def profile(
    run: Annotated[Path, typer.Argument(help="Folder of a run that trains, e.g. runs/latest.", metavar="RUN")],
    ranks: Annotated[str, typer.Option("--ranks", metavar="RANK,...", help="Ranks to profile.")] = "0",
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Steps, at most 100.", min=1, max=100)] = 3,
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", help="How long to wait for the traces; 0 = not.", min=0)
    ] = 120.0,
) -> None:
    """Ask ranks of a live run to record their next steps with torch.profiler, the same steps on all of them.

    The traces are written to RUN/traces, and `rankscope analyze RUN` lists them. The run has to allow it
    (profiler.on_request, on by default) and its folder has to be writable.
    """
    from probes.profiling.request import CaptureRequest
    from probes.settings.section import read
    from probes.settings.sections import ProfilerSettings
    from probes.tape.rundir import RunDir, RunError
    from store import StoreError
    from watch.live_tapes import LiveTapes
    from watch.profiling.next_steps import ask, next_step, nodes_of

    try:
        wanted = tuple(sorted({int(rank) for rank in ranks.split(",")}))
    except ValueError:
        fail(f"--ranks {ranks}: give numbers with commas between, e.g. 0,3")
    try:
        found = RunDir.open(run)
        if not read(ProfilerSettings, found.manifest()).on_request:
            fail(f"{run} was started with profiler.on_request = false: its ranks take no requests")
        tapes = LiveTapes(found)
        tapes.poll()
        source = tapes.source(all_nodes=True)
        nodes, first_step = nodes_of(source, tapes.attempt), next_step(source, tapes.attempt, tapes.now_ns())
    except (RunError, StoreError) as error:
        fail(str(error))
    if tapes.has_ended or not nodes:
        fail(f"{run} does not train: there is no rank to profile")
    if absent := [rank for rank in wanted if rank not in nodes]:
        fail(f"--ranks {ranks}: {run} has no rank {absent[0]}, its ranks are {min(nodes)} to {max(nodes)}")
    request = CaptureRequest(
        number=time.time_ns(), attempt=tapes.attempt, ranks=wanted, first_step=first_step, num_steps=steps,
        reason="rankscope profile",
    )  # fmt: skip
    if unasked := ask(found, request, nodes):
        fail(f"rank {unasked[0]} cannot be asked: the folder of its node in {run} cannot be written")
    echo(f"asked for {steps} step{'s' * (steps != 1)} from step {first_step} on")
    if wait:
        _wait(found, request, wait)


def _wait(run: RunDir, request: CaptureRequest, wait_s: float) -> None:
    """Print each trace as it is written; exit code 1 if one is missing at the deadline."""
    from probes.tape import event_kinds
    from probes.tape.events import read_events

    left, deadline = set(request.ranks), time.monotonic() + wait_s
    while left:
        for rank in sorted(left):
            path = run.rank_dir(request.attempt, rank) / "events.jsonl"
            for event in read_events(path)[0] if path.exists() else ():
                if event["kind"] == event_kinds.PROFILE_CAPTURED and event.get("request") == request.number:
                    left.discard(rank)
                    echo(f"rank {rank}: {event.get('path') or 'not kept, larger than profiler.budget_mb'}")
        if left and time.monotonic() > deadline:
            names = ", ".join(map(str, sorted(left)))
            echo(
                f"no trace of rank {names} within {wait_s:g} s: the run may have ended, or its steps are long", err=True
            )
            raise typer.Exit(1)
        if left:
            time.sleep(0.5)
