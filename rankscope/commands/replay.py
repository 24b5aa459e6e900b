"""`rankscope replay`: recompute one step of a run and check every operation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.terminal import FormatOption, RunArgument, console, echo, fail, print_json, wants_json

if TYPE_CHECKING:
    from trainer.replay.session import ReplayReport

__all__ = ["EPILOG", "replay"]

EPILOG = (
    "\b\nExamples:\nrankscope replay runs/latest --step 40\nrankscope replay runs/latest --step 40 --device cpu\n"
    "rankscope replay runs/latest --step 40 --format json"
)
DRIFT_RATIO = 1e-3
"""Maximum relative difference between a recomputed and a recorded loss; above it the replayed state differs from the
run's.
"""


def replay(
    run: RunArgument,
    step: Annotated[int, typer.Option("--step", min=1, metavar="N", help="Step to recompute, from 1.")],
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Device to compute on.")] = "auto",
    output: FormatOption = "text",
) -> None:
    """Recompute one step of a run from the newest good checkpoint before it, and report whether the fault recurs:
    first module and operation, forward or backward, on which rank, with which inputs and samples.

    Works on a live or finished run, and writes only into its store. DDP needs one process, other layouts as many as the
    run had. Steps between the checkpoint and N are recomputed too. Faults are not injected again.
    """
    as_json = wants_json(output)
    if device not in ("auto", "cpu", "cuda"):
        fail(f"--device {device}: choose auto, cpu or cuda")
    from probes.tape.rundir import RunError
    from store import StoreError
    from trainer.checkpoint.disk_tier.manifest import CheckpointError, StorageError
    from trainer.config.load import ConfigError
    from trainer.replay.session import replay_step
    from trainer.replay.target import ReplayError

    def report(line: str) -> None:
        echo(line, err=True)

    try:
        replayed = replay_step(run, step, device=device, report=report)
    except (RunError, StoreError, CheckpointError, StorageError, ConfigError, ReplayError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or run} cannot be read now ({error.strerror or error}): try again")
    if as_json:
        from analyzers.report.json import plain

        print_json(plain(replayed.to_json()))
        return
    from analyzers.report.terminal.replay_text import render

    target = replayed.target
    render(
        replayed.found,
        console(),
        kind=target.kind,
        ranks=target.ranks,
        figures=_figures(replayed),
        loss=replayed.loss,
        recorded=target.loss,
        doubts=_doubts(replayed),
    )


def _figures(replayed: ReplayReport) -> list[tuple[str, str]]:
    target = replayed.target
    state = f"checkpoint of step {target.state_step}" if target.checkpoint else "the initial state"
    num_updates = len(target.updates)
    updates = f", then {num_updates} step{'s' * (num_updates > 1)} recomputed" if num_updates else ""
    processes = "1 process" if replayed.num_processes == 1 else f"{replayed.num_processes} processes"
    return [
        ("loss", f"{replayed.loss:.6g} (recorded {target.loss:.6g})"),
        ("grad norm", f"{replayed.grad_norm:.6g} (recorded {target.grad_norm:.6g})"),
        ("state", f"{state}{updates}"),
        ("batch", f"{target.batch_index}, {replayed.found.num_samples} samples"),
        ("took", f"{replayed.duration_s:.1f} s in {processes}"),
    ]


def _doubts(replayed: ReplayReport) -> list[str]:
    """Reasons why the replayed state may differ from the run's."""
    doubts = []
    if replayed.data_differs:
        doubts.append("The data set is not the one that the run trained on: batches and samples differ.")
    worst = replayed.max_loss_deviation_ratio
    if worst is not None and (worst > DRIFT_RATIO or math.isnan(worst)):
        doubts.append(f"A recomputed loss differs by {100 * worst:.2g} % from its record, so the state differs, too.")
    if replayed.target.checkpoint and not replayed.target.is_good:
        doubts.append(f"The checkpoint of step {replayed.target.state_step} was not verified as good.")
    return doubts
