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


def median_s(steps: list[dict[str, Any]], phase: str, odd: bool, what: str) -> float:
    values = []
    for step in steps:
        if bool(step["step"] % 2) == odd:
            waited = step[f"{phase}_wait_ns"]
            values.append(waited if what == "wait" else step[f"{phase}_ns"] - waited)
    return statistics.median(values) / 1e9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_delay_is_own_time_of_its_phase(steps: list[dict[str, list[dict[str, Any]]]], kind: str, phase: str) -> None:
    """At least; that it is no more, and what the peer waits, is a trial: another process may take the core."""
    assert median_s(steps[1][kind], phase, phase == "forward", "own") >= DELAY_S


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_counted_twice(steps: list[dict[str, list[dict[str, Any]]]], kind: str) -> None:
    for ranks in steps:
        for step in ranks[kind]:
            waits = [step[f"{phase}_wait_ns"] for phase in ("data", "forward", "backward", "optimizer")]
            assert sum(waits) == step["collective_wait_ns"]
            for phase, waited in zip(("data", "forward", "backward", "optimizer"), waits, strict=True):
                assert 0 <= waited <= step[f"{phase}_ns"]
