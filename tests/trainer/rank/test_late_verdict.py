"""A verdict one step late: the same bits as one at once, whatever goes wrong, and no update of a bad step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from probes.guard.spike_detector import SpikeDetector
from probes.tape.events import read_events
from probes.tape.format.reader import read_segment, segment_paths
from probes.tape.format.writer import COMPLETE
from probes.tape.rundir import RunDir
from tests.depth import usually
from tests.processes import run_ranks
from tests.trainer.training_runs import RunResult, assert_same_bits, run_loop, small, with_steps
from trainer.checkpoint.state import local_tensors, training_tensors
from trainer.config.config import Config
from trainer.config.load import ConfigError
from trainer.rank.loop import Session
from trainer.training.clipping import ClipNumbers

LAYOUTS: dict[str, dict[str, Any]] = {"ddp": {"dp_replicate": 2, "dp_shard": 1}, "fsdp": {"dp_shard": 2}}
LAYOUTS = usually(LAYOUTS, later=["ddp"])
STEPS = 28
FAULTS = ("failing_batch@batch=9", "nan_grad@step=14,rank=1", "bad_batch@batch=24", "bad_batch@batch=25")


def _config(verdict: str, **sections: Any) -> Config:
    sections.setdefault("recovery", {}).update(verdict=verdict)
    sections.setdefault("probes", {}).update(nonfinite_flags=False)
    return with_steps(small(**sections), STEPS)


@dataclass(slots=True)
class _Updates:
    """Watches the updates of one training: which the device was asked to leave out, and whether these changed a bit."""

    left_out: list[int] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    num_judged_late: int = 0

    def watch(self, session: Session) -> None:
        training, take = session.training, session.training.step

        def taking(step: int, *, leave_out: torch.Tensor | None = None) -> float:
            before = {name: value.clone() for name, value in local_tensors(training_tensors(training)).items()}
            rate = take(step, leave_out=leave_out)
            self.num_judged_late += leave_out is not None
            if leave_out is not None and leave_out.item():
                after = local_tensors(training_tensors(training))
                self.left_out.append(step + 1)
                self.changed += [name for name, value in before.items() if not torch.equal(value, after[name])]
            return rate

        training.step = taking  # type: ignore[method-assign]


def _at_once_and_late(
    rank: int, world_size: int, folder: Path, layouts: dict[str, dict[str, Any]]
) -> list[tuple[RunResult, RunResult, _Updates]]:
    found = []
    for name, parallel in layouts.items():
        updates = _Updates()
        at_once, late = (
            run_loop(
                _config(verdict, parallel=parallel), folder / name / verdict, rank=rank, world_size=world_size,
                faults=FAULTS, change=updates.watch if verdict == "late" else None,
            )
            for verdict in ("at_once", "late")
        )  # fmt: skip
        assert_same_bits(late, at_once)
        found.append((at_once, late, updates))
    return found


def test_the_weights_are_those_of_verdicts_at_once(tmp_path: Path) -> None:
    """NaN from a batch, NaN from a device, two spikes; what the device leaves out changes no bit of any shard."""
    for results in run_ranks(_at_once_and_late, world_size=2, args=(tmp_path, LAYOUTS), deadline_s=100):
        for at_once, late, updates in results:
            assert late.skipped == at_once.skipped
            assert {9, 24, 25} <= set(late.skipped)
            assert late.batches == at_once.batches
            assert late.tried != at_once.tried, "no step was computed while the one before was not judged"
            assert len(updates.left_out) >= 4
            assert not updates.changed
            assert updates.num_judged_late >= STEPS - 1


def test_without_copies_the_step_alone_is_left_out(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"checkpoint": {"memory_interval": 0, "interval": 0}}
    met = run_loop(
        _config("late", **sections), tmp_path / "met", rank=0, world_size=1, faults=["failing_batch@batch=13"]
    )
    never = run_loop(_config("at_once", **sections), tmp_path / "never", rank=0, world_size=1, missing=[13])
    assert_same_bits(met, never)


def test_a_nan_that_is_not_reproduced_is_refused_as_with_an_immediate_verdict(tmp_path: Path) -> None:
    """The repeated step is good, and still the step is refused: a device that does so again and again must go."""
    runs = {}
    for verdict in ("late", "at_once"):
        config = _config(verdict, model={"dropout": 0.1})
        runs[verdict] = run_loop(config, tmp_path / verdict, rank=0, world_size=1, faults=["nan_grad@step=14,rank=0"])
    assert_same_bits(runs["late"], runs["at_once"])
    assert [step for step, _ in runs["late"].tried][13:17] == [14, 15, 14, 9]
    found = {verdict: _responses(RunDir(tmp_path / verdict).rank_dir(0, 0)) for verdict in runs}
    assert found["late"] == found["at_once"]
    assert [kind for kind, _ in found["late"]] == ["nonfinite", "replay", "rollback"]
    (path,) = segment_paths(RunDir(tmp_path / "late").rank_dir(0, 0), "steps")
    steps = read_segment(path).records
    assert (steps["state"] == COMPLETE).all()
    rows = steps[steps["step"] == 14]
    assert rows["committed"].tolist() == [0, 0, 1]
    assert np.isfinite(rows["grad_norm"]).tolist() == [False, True, True]


def _responses(rank_dir: Path) -> list[tuple[str, tuple[Any, ...]]]:
    keys = ("step", "from_step", "to_step", "came_back", "skipped_batches", "replayed_batches", "failures")
    events, _, _ = read_events(rank_dir / "events.jsonl")
    chosen = [event for event in events if event["kind"] in ("nonfinite", "replay", "rollback", "batch_skipped")]
    return [(event["kind"], tuple(event.get(key) for key in keys)) for event in chosen]


def test_numbers_are_read_after_the_next_forward_and_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    read = ClipNumbers.read
    monkeypatch.setattr(ClipNumbers, "read", lambda self: (order.append("read"), read(self))[1])

    def spy(session: Session) -> None:
        compute = session.training.forward_backward
        session.training.forward_backward = lambda batch: (order.append(f"batch {batch.index}"), compute(batch))[1]  # type: ignore[method-assign]

    run_loop(with_steps(_config("late"), 4), tmp_path, rank=0, world_size=1, change=spy)
    assert order == ["batch 0", "batch 1", "read", "batch 2", "read", "batch 3", "read", "read"]


def test_a_flagged_update_changes_nothing(tmp_path: Path) -> None:
    """Neither parameters nor moments nor the count of steps, to the last bit."""
    updates = _Updates()
    run_loop(_config("late"), tmp_path, rank=0, world_size=1, faults=["nan_grad@step=14,rank=0"], change=updates.watch)
    assert 14 in updates.left_out
    assert not updates.changed


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"optim": {"fused": False}}, "fused"),
        ({"train": {"precision": "fp16"}}, "fp16"),
    ],
)
def test_a_training_that_cannot_lag_says_so(sections: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        run_loop(_config("late", **sections), tmp_path, rank=0, world_size=1)
    run_loop(with_steps(_config("auto", **sections), 2), tmp_path / "auto", rank=0, world_size=1)


def test_no_loss_in_the_clean_range_is_a_spike() -> None:
    dice = random.Random(0)
    num_judged = num_spikes = 0
    for _ in range(40):
        detector, level, noise = SpikeDetector(), dice.uniform(0.5, 12), dice.choice((0.001, 0.02, 0.2))
        for step in range(1, 60):
            low, high = detector.clean_range()
            loss = (
                level
                * dice.lognormvariate(0, noise)
                * (dice.choice((1.07, 1.09, 1.5, 4)) if dice.random() < 0.1 else 1)
            )
            loss = -loss if dice.random() < 0.002 else loss
            is_spike = detector.observe(step, loss, dice.choice((1.0, 1.1, 30.0))).is_spike
            num_spikes += is_spike
            num_judged += low < loss < high
            assert not (is_spike and low < loss < high), (step, loss, low, high)
    assert num_spikes > 20
    assert num_judged > 1500
