"""Whole training runs inside test ranks: the loop with its recovery, in whatever process group there is.

result = run_loop(config, folder, rank=0, world_size=1, faults=["nan_grad@step=8,rank=0"])
result.losses[8]              # of the step that was taken in the end, whatever happened on the way
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from probes.tape.rundir import RunDir
from probes.tape_recorder import TapeRecorder
from tests.trainer.layouts import tiny
from trainer.checkpoint import attempt_fence as fence
from trainer.checkpoint.state import local_tensors, training_tensors
from trainer.config.config import Config
from trainer.data.batches import Batch
from trainer.faults.inject import arm
from trainer.faults.options import parse_fault
from trainer.guard.recovery import Recovery
from trainer.layout.resolve import resolve
from trainer.rank.late_verdict import late_verdict
from trainer.rank.loop import Session, train
from trainer.training.build import build

RECOVERY_SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"dim": 32, "hidden_dim": 64},
    "data": {"seq_len": 16},
    "optim": {"lr": 4e-3, "warmup_steps": 4, "schedule": "constant"},
    "checkpoint": {"interval": 8, "memory_interval": 4},
}


def small(**sections: dict[str, Any]) -> Config:
    """A configuration of a few milliseconds a step, with a constant rate and frequent copies."""
    merged = {
        name: {**RECOVERY_SECTIONS.get(name, {}), **sections.get(name, {})} for name in {*RECOVERY_SECTIONS, *sections}
    }
    return tiny(**merged)


@dataclass
class RunResult:
    """Final state of one rank. `tensors` are this rank's own shards."""

    outcome: str
    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    batches: dict[int, int] = field(default_factory=dict)
    tried: list[tuple[int, int]] = field(default_factory=list)  # (step, batch) in the order in which they ran
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)
    start: tuple[int, int] = (0, 0)


class Without:
    """A loader of a stream that never held some batches: those after them move up."""

    def __init__(self, inner: Any, missing: Sequence[int]) -> None:
        self.inner = inner
        self.missing = sorted(missing)

    def batch(self, batch_index: int) -> Batch:
        for gone in self.missing:
            batch_index += batch_index >= gone
        return self.inner.batch(batch_index)


class LossRecorder(TapeRecorder):
    """A recorder that also keeps what the loop logged, by step; the last time a step ran counts."""

    def __init__(self, result: RunResult, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.result = result

    def log(self, **values: float) -> None:
        super().log(**values)
        self._keep(self.step_number, values)

    def log_late(self, step: int, **values: float) -> None:
        super().log_late(step, **values)
        if values.get("committed"):
            self._keep(step, values)

    def _keep(self, step: int, values: dict[str, float]) -> None:
        result = self.result
        if "batch_index" in values:
            result.batches[step] = int(values["batch_index"])
            result.tried.append((step, int(values["batch_index"])))
        if "loss" in values:
            result.losses[step] = values["loss"]
            result.norms[step] = values["grad_norm"]


def run_loop(
    config: Config,
    folder: Path,
    *,
    rank: int,
    world_size: int,
    attempt: int = 0,
    faults: Sequence[str] = (),
    missing: Sequence[int] = (),
    stop_at_step: int = 0,
    change: Callable[[Session], None] | None = None,
) -> RunResult:
    """Train as the worker does. `missing`: batches that the stream never held; `stop_at_step`: rank 0 asks for it."""
    run = RunDir(folder)
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    result = RunResult("")
    fence.hold(run, attempt)
    recorder = LossRecorder(result, run.rank_dir(attempt, rank), rank=rank, attempt=attempt, world_size=world_size)
    training = build(config, resolve(config, world_size), torch.device("cpu"), recorder=recorder)
    if missing:
        training.loader = Without(training.loader, missing)
    arm([parse_fault(text) for text in faults], training, recorder, run, rank=rank, world_size=world_size)
    recovery = Recovery(training, recorder, run, None)
    session = Session(
        training=training,
        recorder=recorder,
        recovery=recovery,
        late=late_verdict(training, recorder, recovery),
        asked_to_stop=lambda: rank == 0 and recorder.step_number == stop_at_step,
    )
    if change is not None:
        change(session)
    try:
        result.outcome = train(session)
    finally:
        recorder.close()
    result.tensors = {name: value.clone() for name, value in local_tensors(training_tensors(training)).items()}
    result.skipped = list(session.recovery.ledger.skipped)
    if dist.is_initialized():
        dist.barrier()
    return result


def assert_same_bits(one: RunResult, other: RunResult, steps: range | None = None) -> None:
    """Assert that two ranks computed the same, to the last bit."""
    assert one.tensors.keys() == other.tensors.keys()
    for name, value in one.tensors.items():
        assert torch.equal(value, other.tensors[name]), name
    wanted = steps or range(1, max(one.losses) + 1)
    for step in wanted:
        assert one.losses[step] == other.losses[step], f"loss of step {step}"
        assert one.norms[step] == other.norms[step], f"gradient norm of step {step}"


def with_steps(config: Config, steps: int) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})
