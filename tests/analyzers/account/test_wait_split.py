"""A rank's own time and its waiting: what the straggler analyzer lives from.

One rank of two takes 80 ms longer in forward or backward. Its own time grows by that, and its peer's waiting does.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.probes.recorded_world import recorded_world, rows
from tests.probes.small_models import train
from tests.processes import run_ranks

KINDS = ("ddp", "fsdp", "tp")
DELAY_S = 0.08
TOLERANCE_S = 0.04  # two ranks share cores with whatever else the machine does
STEPS = 4  # the slow phase alternates: forward at odd steps


def _worker(rank: int, world_size: int, folder: str) -> dict[str, list[dict[str, Any]]]:
    def delay_s(step: int) -> tuple[float, float]:
        if rank != 1:
            return 0.0, 0.0
        return (DELAY_S, 0.0) if step % 2 else (0.0, DELAY_S)

    found = {}
    for kind in KINDS:
        with recorded_world(rank, world_size, folder, kind) as recorder:
            train(kind, recorder, 2 + 2 * STEPS, delay_s)
        found[kind] = rows(recorder.directory, "steps")[2:]  # without the first, which set things up
    return found


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[dict[str, Any]]]]:
    folder: Path = tmp_path_factory.mktemp("split")
    return run_ranks(_worker, world_size=2, args=(str(folder),))


def _median_s(steps: list[dict[str, Any]], phase: str, odd: bool, what: str) -> float:
    values = []
    for step in steps:
        if bool(step["step"] % 2) == odd:
            waited = step[f"{phase}_wait_ns"]
            values.append(waited if what == "wait" else step[f"{phase}_ns"] - waited)
    return statistics.median(values) / 1e9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_own_time_is_told_from_waiting(steps: list[dict[str, list[dict[str, Any]]]], kind: str, phase: str) -> None:
    odd = phase == "forward"
    peer, slow = (ranks[kind] for ranks in steps)
    excess = _median_s(slow, phase, odd, "own") - _median_s(peer, phase, odd, "own")
    assert excess == pytest.approx(DELAY_S, abs=TOLERANCE_S)
    # Where the peer waits is where it next needs the slow rank: DDP's forward reduces nothing.
    waits_in = "backward" if kind == "ddp" else phase
    waited = _median_s(peer, waits_in, odd, "wait") - _median_s(slow, waits_in, odd, "wait")
    assert waited == pytest.approx(DELAY_S, abs=TOLERANCE_S)
    assert _median_s(peer, phase, odd, "own") < TOLERANCE_S


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_counted_twice(steps: list[dict[str, list[dict[str, Any]]]], kind: str) -> None:
    for ranks in steps:
        for step in ranks[kind]:
            waits = [step[f"{phase}_wait_ns"] for phase in ("data", "forward", "backward", "optimizer")]
            assert sum(waits) == step["collective_wait_ns"]
            for phase, waited in zip(("data", "forward", "backward", "optimizer"), waits, strict=True):
                assert 0 <= waited <= step[f"{phase}_ns"]
