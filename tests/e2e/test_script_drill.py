"""`rankscope drill --script` on loops as their communities write them; all of them: `benchmarks.strangers_suite`."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.drills.script.drill import script_drill
from trainer.drills.script.execute import Plan

LOOPS = Path(__file__).parents[2] / "benchmarks" / "strangers"


@pytest.mark.parametrize(
    ("loop", "faults"), [("manual_allreduce.py", ["kill", "wrong_size"]), ("gpt_accumulation.py", ["exit"])]
)
def test_each_fault_is_found_and_a_clean_run_is_silent(tmp_path: Path, loop: str, faults: list[str]) -> None:
    plan = Plan(words=(str(LOOPS / loop),), num_ranks=2, step=10, steps_after=20)
    rows = list(script_drill(plan, faults, folder=tmp_path, keep=True))
    assert [row.fault for row in rows] == ["none", *faults]
    assert [row.fault for row in rows if not row.is_right] == [], rows
    assert all(row.is_injected for row in rows)


def test_a_slow_rank_is_named_with_place_and_line(tmp_path: Path) -> None:
    """By so much that a busy machine hides nothing."""
    plan = Plan(words=(str(LOOPS / "gpt_accumulation.py"),), num_ranks=2, step=20, steps_after=60)
    clean, slow = script_drill(plan, ["slow_before_optimizer"], folder=tmp_path, keep=True, slow_ratio=5.0)
    assert clean.is_right, clean
    assert slow.is_right, slow
