"""`rankscope drill --script` on loops as their communities write them; all of them: `benchmarks.strangers_suite`."""

from __future__ import annotations

from pathlib import Path

from trainer.drills.script.drill import script_drill
from trainer.drills.script.execute import Plan

LOOPS = Path(__file__).parents[2] / "benchmarks" / "strangers"


def test_each_fault_is_found_and_a_clean_run_is_silent(tmp_path: Path) -> None:
    plan = Plan(words=(str(LOOPS / "manual_allreduce.py"),), num_ranks=2, step=10, steps_after=20)
    _all_right(plan, ["kill", "wrong_size"], tmp_path)


def test_an_exit_is_found_and_a_slow_rank_is_named_with_place_and_line(tmp_path: Path) -> None:
    """Slow by so much that a busy machine hides nothing."""
    plan = Plan(words=(str(LOOPS / "gpt_accumulation.py"),), num_ranks=2, step=20, steps_after=60)
    _all_right(plan, ["exit", "slow_before_optimizer"], tmp_path)


def _all_right(plan: Plan, faults: list[str], folder: Path) -> None:
    rows = list(script_drill(plan, faults, folder=folder, keep=True, slow_ratio=5.0))
    assert [row.fault for row in rows] == ["none", *faults]
    assert [row.fault for row in rows if not row.is_right] == [], rows
    assert all(row.is_injected for row in rows)
