"""`rankscope replay RUN --step N`: from a run's folder to the result of the replayed step.

    replayed = replay_step(Path("runs/latest"), 40, device="auto", report=print)
    replayed.found.text(replayed.target.ranks)
    # "A replay reproduced it in blocks.3.mlp.up (mm), forward on rank 2: data or numerics."

If each rank had the whole model (DDP), this process replays the step alone; otherwise as many processes as the run had
ranks, on this machine. The processes find each other through a file in a scratch folder, which also holds their
request; nothing is written to the run's folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from analyzers.numerics.replay_result import ReplayResult, find_replay
from analyzers.run.records.event_log import Event, EventLog
from analyzers.source import Source
from probes.attach.launch.own_process import own_process
from probes.tape.rundir import RunDir
from store import Store
from trainer.config.config import Config
from trainer.config.launch_folder import enter_launch_folder
from trainer.config.load import changed_config
from trainer.layout.plan import Plan
from trainer.layout.resolve import resolve
from trainer.replay.target import ReplayError, Target, find_target

__all__ = ["REQUEST_NAME", "ReplayReport", "replay_step"]

REQUEST_NAME = "request.json"
DEADLINE_S = 3600.0
"""Seconds for all rank processes together, so that a hanging replay does not block the terminal forever."""
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """One step, replayed."""

    target: Target
    found: ReplayResult
    loss: float
    grad_norm: float
    max_loss_deviation_ratio: float | None
    """Largest relative difference between the recomputed and the recorded loss of earlier steps."""
    data_differs: bool
    num_processes: int
    duration_s: float

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.target.step,
            "attempt": self.target.attempt,
            "batch_index": self.target.batch_index,
            "step_kind": self.target.kind,
            "loss_recorded": self.target.loss,
            "grad_norm_recorded": self.target.grad_norm,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "state_step": self.target.state_step,
            "steps_recomputed": len(self.target.updates),
            "max_loss_deviation_ratio": self.max_loss_deviation_ratio,
            "data_differs": self.data_differs,
            "num_processes": self.num_processes,
            "duration_s": self.duration_s,
            **self.found.evidence(),
            "samples": [asdict(sample) for sample in self.found.samples],
        }


def replay_step(path: Path, step: int, *, device: str = "auto", report: Callable[[str], None]) -> ReplayReport:
    """Replay a step. Raises ReplayError, RunError, ConfigError, CheckpointError or StoreError, one line each."""
    start = time.monotonic()
    run = RunDir.open(path)
    manifest = run.private_manifest()
    recorded, world_size = manifest.get("config"), manifest.get("world_size")
    if not isinstance(recorded, dict) or not isinstance(world_size, int):
        raise ReplayError(f"{path} cannot be replayed: its run.json has no configuration of this trainer.")
    config = changed_config(recorded, [f"train.device={device}", "data.num_workers=0"])
    plan = resolve(config, world_size)
    with Store.open(run) as store:
        target = find_target(store, run, step)
        losses = _recorded_losses(store, target)
    enter_launch_folder(config, manifest)
    good = "good" if target.is_good else "not yet known to be good"
    state = f"the checkpoint of step {target.state_step} ({good})" if target.checkpoint else "the initial state"
    report(f"Step {step} of attempt {target.attempt}, batch {target.batch_index}, from {state}.")
    results, count = _replay(config, plan, target, losses, report)
    return ReplayReport(
        target=target,
        found=_combine(results, target),
        loss=results[0]["events"][0]["loss"],
        grad_norm=results[0]["events"][0]["grad_norm"],
        max_loss_deviation_ratio=results[0]["max_loss_deviation_ratio"],
        data_differs=any(one["data_differs"] for one in results),
        num_processes=count,
        duration_s=time.monotonic() - start,
    )


def _recorded_losses(source: Source, target: Target) -> dict[int, float]:
    rows = source.rows(
        "SELECT step, arg_max(loss, start_ns) FROM steps WHERE rank >= 0 AND step > ? AND step < ? AND committed "
        "AND loss IS NOT NULL GROUP BY step",
        [target.state_step, target.step],
    )
    return {int(step): float(loss) for step, loss in rows}


def _replay(
    config: Config, plan: Plan, target: Target, losses: dict[int, float], report: Callable[[str], None]
) -> tuple[list[dict[str, Any]], int]:
    """Run the replay; returns the results of the processes, and their number."""
    import torch

    from trainer.replay.step_replay import replay_target, runs_in_one_process
    from trainer.training.build import pick_device

    if runs_in_one_process(plan):
        device = pick_device(config, 0)
        result = replay_target(config, plan, target, device, losses=losses, report=report)
        return [json.loads(json.dumps(asdict(result)))], 1  # the same JSON types as if a separate process had run it
    available = torch.cuda.device_count()
    if config.train.device == "cuda" and available < plan.world_size:
        raise ReplayError(
            f"the run had {plan.world_size} ranks with one part of the model each, and this machine has {available} "
            "GPUs; replay it on the CPU with --device cpu"
        )
    with tempfile.TemporaryDirectory(prefix="rankscope-replay-") as folder:
        request = {"config": config.model_dump(mode="json"), "target": target.to_json(), "losses": losses}
        (Path(folder) / REQUEST_NAME).write_text(json.dumps(request | {"world_size": plan.world_size}))
        return _run_ranks(Path(folder), plan.world_size, report), plan.world_size


def _run_ranks(folder: Path, world_size: int, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Start the processes, pass on the progress of rank 0, and read their results."""
    report(f"Starting {world_size} processes.")
    processes = []
    try:
        for rank in range(world_size):
            command, environment = own_process("trainer.replay.rank_process", str(folder), str(rank))
            environment = {**(environment or os.environ), "RANKSCOPE_DISABLED": "1"}
            with (folder / f"rank-{rank}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
                )
        deadline, shown = time.monotonic() + DEADLINE_S, 0
        while (codes := [process.poll() for process in processes]).count(0) < world_size:
            lines = _lines(folder / "progress.txt")
            for line in lines[shown:]:
                report(line)
            shown = len(lines)
            if failed := [rank for rank, code in enumerate(codes) if code]:
                # If one process fails, the others soon fail, too. Give them time to write their errors.
                time.sleep(5 * _POLL_S)
                raise ReplayError(_failure(folder, failed))
            if time.monotonic() > deadline:
                raise ReplayError(f"The processes of the ranks did not end within {DEADLINE_S:.0f} s.")
            time.sleep(_POLL_S)
        for line in _lines(folder / "progress.txt")[shown:]:
            report(line)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world_size)]


def _lines(path: Path) -> list[str]:
    """Complete lines of a file."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def _failure(folder: Path, failed: Sequence[int]) -> str:
    """The reason in one line. It is the error that a rank reported; without one, the end of the rank's log."""
    for rank in range(len(list(folder.glob("rank-*.log")))):
        if lines := _lines(folder / f"rank-{rank}.error"):
            return lines[0]
    log = (folder / f"rank-{failed[0]}.log").read_text(errors="replace").strip().splitlines()
    return f"The process of rank {failed[0]} failed: {log[-1] if log else 'no output'}"


def _combine(results: Sequence[dict[str, Any]], target: Target) -> ReplayResult:
    """Combine the events of all ranks in the form that the analyzer of replays reads."""
    events = [
        Event(wall_ns=place, attempt=0, rank=detail["rank"], step=target.step, kind="replay", detail=detail)
        for place, detail in enumerate(
            sorted(
                (detail for one in results for detail in one["events"]), key=lambda detail: detail["state"] != "same"
            )
        )
    ]
    found = find_replay(EventLog(events), attempt=0, step=target.step)
    assert found is not None, "each rank has an event"
    return found
