"""fp16's loss scale: a search and a probe are healthy, a fall is not; and a dropped step is no NaN."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from analyzers.numerics.loss_scale import loss_scale_collapse
from analyzers.numerics.nonfinite import non_finite_values
from analyzers.scope import Scope
from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from tests.analyzers.memory_store import MemoryStore
from tests.sentences import plain
from tests.trainer.training_runs import run_loop, small, with_steps


def overflows(*steps: int, scale: float = 65536.0) -> MemoryStore:
    store = MemoryStore()
    for number, step in enumerate(steps):
        scale /= 2
        store.event("loss_scale", rank=0, step=step, wall_ns=number, scale=scale)
    return store


@pytest.mark.parametrize("steps", [(), (1, 1, 1, 2, 2, 3), (500, 2500, 4500, 6500), (100, 150, 200)])
def test_a_search_and_a_probe_now_and_then_are_healthy(steps: tuple[int, ...]) -> None:
    assert plain(loss_scale_collapse(overflows(*steps), Scope())) == []


def test_a_fall_is_found() -> None:
    (finding,) = plain(loss_scale_collapse(overflows(1, 2, 400, 410, 411, 450, 452), Scope()))
    assert (finding.kind, finding.first_step, finding.last_step) == ("loss_scale_collapse", 400, 452)
    assert (finding.evidence["scale_before"], finding.evidence["scale_after"]) == (16384, 512)


def test_the_lowest_scale_is_one_whenever_it_comes() -> None:
    (finding,) = plain(loss_scale_collapse(overflows(*range(1, 17)), Scope()))
    assert finding.evidence["scale_after"] == 1.0


def test_a_dropped_step_is_not_called_non_finite() -> None:
    store = overflows(7)
    row = {"attempt": 0, "rank": 0, "step": 7, "loss": 2.0, "local_loss": 2.0}
    store.add("steps", [row | {"start_ns": 1, "grad_norm": math.inf, "committed": False}])
    store.add("steps", [row | {"start_ns": 2, "grad_norm": 1.0, "committed": True}])
    assert non_finite_values(store, Scope()) == []
    store.event("nonfinite", rank=0, step=7, phase="backward", parameters=[], local_nonfinite_count=1)
    assert [finding.kind for finding in non_finite_values(store, Scope())] == ["non_finite"], (
        "the guard refused one too"
    )


def test_a_real_overflow_is_told_with_its_scale(tmp_path: Path) -> None:
    def too_high(session: object) -> None:
        session.training.scaler.scale = 2.0**40  # type: ignore[attr-defined]

    config = with_steps(small(train={"precision": "fp16"}), 3)
    run_loop(config, tmp_path, rank=0, world_size=1, change=too_high)
    events, _, _ = read_events(RunDir(tmp_path).rank_dir(0, 0) / "events.jsonl")
    scales = [event["scale"] for event in events if event["kind"] == "loss_scale"]
    assert scales[0] == 2.0**39
    assert all(after == before / 2 for before, after in itertools.pairwise(scales))
