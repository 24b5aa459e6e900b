"""Losses and durations that climb over lines which are few, or far apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analyzers.evidence.printed_trends import climbing_loss
from tests.analyzers.evidence.written import diagnosed

KERAS = "Epoch {n}/60\n400/400 [==============================] - 9s 22ms/step - loss: {loss:.4f}\n"


def _keras(losses: list[float]) -> str:
    return "".join(KERAS.format(n=number, loss=loss) for number, loss in enumerate(losses, 1))


@pytest.mark.parametrize(
    "losses",
    [
        [0.9 * 1.2**number for number in range(18)],  # a climb
        [2 - 0.1 * number for number in range(8)] + [31.0 + number / 10 for number in range(6)],  # a jump that stays
    ],
)
def test_a_loss_that_multiplies_over_a_few_lines_is_found(tmp_path: Path, losses: list[float]) -> None:
    (found,) = diagnosed(tmp_path, "train.log", _keras(losses)).fired
    assert found.kind == "divergence"
    assert f"to {losses[-1]:.3f}"[:7] in found.summary


@pytest.mark.parametrize(
    "losses",
    [
        [3 - 0.1 * number for number in range(18)],
        [3.0] * 8 + [14.0, 13.0, 11.0] + [3.1] * 7,  # it came back
        [4 / 2**number for number in range(14)] + [0.004, 0.006, 0.003, 0.005],  # near zero
        [1.2 + 0.05 * number for number in range(18)],  # a rise, and no multiple
        [0.9 * 1.3**number for number in range(8)],  # too few
    ],
)
def test_other_losses_over_a_few_lines_give_no_finding(tmp_path: Path, losses: list[float]) -> None:
    assert diagnosed(tmp_path, "train.log", _keras(losses)).fired == ()


def test_a_climb_printed_every_tenth_step_is_found(tmp_path: Path) -> None:
    lines = [
        f"step {10 * n} loss {1.6 - min(n, 80) / 800 + n % 3 / 500 + max(0, n - 80) / 200:.4f}\n" for n in range(1, 201)
    ]
    (found,) = diagnosed(tmp_path, "train.log", "".join(lines)).fired
    assert (found.kind, found.cause) == ("divergence", "trend")
    assert 800 <= (found.first_step or 0) <= 1100
    assert diagnosed(tmp_path, "train.log", "".join(lines[:80])).fired == ()


def _printed(durations: list[float]) -> str:
    return "".join(
        f"step: {n} | loss: {3 - n / 100:.3f} | step_time: {took:.3f}s\n" for n, took in enumerate(durations, 1)
    )


def test_durations_that_grow_over_twenty_lines_are_found(tmp_path: Path) -> None:
    (found,) = diagnosed(tmp_path, "train.log", _printed([1 + 0.05 * n + n % 2 / 100 for n in range(20)])).fired
    assert (found.kind, found.cause) == ("throughput", "unknown")
    assert "slower from line to line" in found.summary


@pytest.mark.parametrize(
    "durations",
    [
        [1 + n % 3 / 50 for n in range(20)],
        [1 + 0.005 * n for n in range(20)],  # little
        [1.6 - 0.6 * 0.7**n for n in range(20)],  # approaches its level
        [1 + 0.05 * n for n in range(10)],  # too few
    ],
)
def test_other_durations_over_twenty_lines_give_no_finding(tmp_path: Path, durations: list[float]) -> None:
    assert diagnosed(tmp_path, "train.log", _printed(durations)).fired == ()


def test_a_program_that_prints_durations_only_is_judged_by_them(tmp_path: Path) -> None:
    line = " iteration {i:8d}/    9000 | elapsed time per iteration (ms): {ms} | global batch size: 16 |\n"
    text = "".join(line.format(i=i, ms=(640 if i < 200 else 1310) + i % 7) for i in range(1, 400))
    (finding,) = diagnosed(tmp_path, "job.log", text).fired
    assert finding.kind == "throughput"
    assert "slower since step 200" in finding.summary


def test_rows_of_many_ranks_are_read_a_few_times_each() -> None:
    """Rows of 2,000 files: comparing each with all others took minutes."""
    reads = 0

    class Row(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            nonlocal reads
            reads += name == "rank"
            return super().__getitem__(name)

    rows = [Row(rank=rank, step=step, loss=3.0 - step / 1000) for rank in range(4) for step in range(500)]
    assert climbing_loss(rows) == []
    assert 0 < reads < 20 * len(rows)


CLIP = (
    "2026-03-01,10:{m:02d}:00 | INFO | Train Epoch: 0 [{n}/80000 (9%)] Data (t): {data:.3f} Batch (t): {took:.3f}, "
    "90/s Loss: 4.1\n"
)
DET = (
    "2026-03-01 10:{m:02d}:00,100 - mmdet - INFO - Epoch [1][{n}/2000] lr: 0.01, time: {took:.3f}, "
    "data_time: {data:.3f}, loss: 0.8\n"
)


@pytest.mark.parametrize(("line", "apart"), [(CLIP, 12_800), (DET, 50)])
def test_three_lines_that_each_cover_many_steps_show_that_data_is_late(tmp_path: Path, line: str, apart: int) -> None:
    def job(data_s: float) -> str:
        return "".join(line.format(m=2 * n, n=n * apart, data=data_s, took=2.4) for n in range(1, 5))

    (late,) = diagnosed(tmp_path, "train.log", job(1.9)).fired
    assert (late.kind, late.cause) == ("data_bound", "steady")
    assert "79 %" in late.summary
    assert not diagnosed(tmp_path, "train.log", job(0.1)).fired


def test_three_lines_of_single_steps_show_nothing(tmp_path: Path) -> None:
    text = "".join(DET.format(m=0, n=n, data=1.9, took=2.4) for n in range(1, 5))
    assert not diagnosed(tmp_path, "train.log", text).fired
