"""`rankscope profile`: ask ranks of a live run to record their next steps with torch.profiler."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.terminal import LONGEST_S, FormatOption, console, echo, fail, print_json, wants_json

if TYPE_CHECKING:
    from rich.console import Console

    from probes.profiling.request import CaptureRequest
    from probes.tape.rundir import RunDir
    from watch.live_tapes import LiveTapes

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
        float,
        typer.Option(
            "--wait", metavar="SECONDS", help="How long to wait for the traces; 0: do not wait.", min=0, max=LONGEST_S
        ),
    ] = 120.0,
    output: FormatOption = "text",
) -> None:
    """Ask ranks of a live run to record their next steps with torch.profiler, the same steps on all of them.

    The traces are written to RUN/traces, and `rankscope analyze RUN` lists them. The run has to allow it
    (profiler.on_request, on by default) and its folder has to be writable.
    """
    as_json = wants_json(output)
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
    if tapes.is_over:
        fail(f"{run} has ended: there is no rank to profile")
    if not nodes:
        fail(f"{run}: no rank has begun yet; ask again in a few seconds")
    if absent := [rank for rank in wanted if rank not in nodes]:
        fail(f"--ranks {ranks}: {run} has no rank {absent[0]}, its ranks are {min(nodes)} to {max(nodes)}")
    request = CaptureRequest(
        number=time.time_ns(), attempt=tapes.attempt, ranks=wanted, first_step=first_step, num_steps=steps,
        reason="rankscope profile",
    )  # fmt: skip
    if unreachable := ask(found, request, nodes):
        fail(f"rank {unreachable[0]} cannot be asked: the folder of its node in {run} cannot be written")
    echo(f"asked for {steps} step{'s' * (steps != 1)} from step {first_step} on", err=as_json)
    traces = _wait(found, request, wait, tapes, console(err=as_json)) if wait else {}
    if as_json:
        by_rank = [{"rank": rank, "path": path} for rank, path in sorted(traces.items())]
        print_json({"run": found.run_id, "first_step": first_step, "steps": steps, "traces": by_rank})
        return
    for rank, path in sorted(traces.items()):
        echo(f"rank {rank}: {path or 'not kept, larger than profiler.budget_mb'}")


def _wait(
    run: RunDir, request: CaptureRequest, wait_s: float, tapes: LiveTapes, screen: Console
) -> dict[int, str | None]:
    """Wait for {rank: path of its trace}. Exits with code 1 if one is missing at the deadline or at the end of the
    run.
    """
    from rich.status import Status

    from probes.tape import event_kinds
    from probes.tape.events import read_events

    found: dict[int, str | None] = {}
    deadline, has_ended = time.monotonic() + wait_s, False
    with Status(_progress(request, found, tapes), console=screen) if screen.is_terminal else nullcontext() as status:
        while True:
            for rank in request.ranks:
                path = run.rank_dir(request.attempt, rank) / "events.jsonl"
                for event in read_events(path)[0] if path.exists() else ():
                    if event["kind"] == event_kinds.PROFILE_CAPTURED and event.get("request") == request.number:
                        found[rank] = event.get("path")
            if len(found) == len(request.ranks):
                return found
            if has_ended or time.monotonic() > deadline:  # the traces were read once more after the run had ended
                break
            tapes.poll()
            has_ended = tapes.is_over
            if status is not None:
                status.update(_progress(request, found, tapes))
            if not has_ended:
                time.sleep(0.5)
    names = ", ".join(str(rank) for rank in request.ranks if rank not in found)
    why = "the run has ended" if has_ended else f"none within {wait_s:g} s, its steps may be long"
    echo(f"rankscope: no trace of rank {names}: {why}", err=True)
    raise typer.Exit(1)


def _progress(request: CaptureRequest, found: Mapping[int, str | None], tapes: LiveTapes) -> str:
    """One line: how far the run is, and how many traces are there."""
    ((step,),) = tapes.source(all_nodes=True).rows(
        "SELECT arg_max(step, start_ns) FROM steps WHERE attempt = ?", [tapes.attempt]
    )
    last = request.first_step + request.num_steps - 1
    traces = f"{len(found)} of {len(request.ranks)} traces"
    return f"steps {request.first_step} to {last}: the run is at step {step}, {traces} written"
