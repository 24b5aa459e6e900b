"""`rankscope drill --script`: a clean run is silent, and a slow rank is named with place and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_script_drill import LOOPS
from trainer.drills.script.drill import script_drill
from trainer.drills.script.execute import Plan

PLANS = {
    ("kill", "wrong_size"): Plan(words=(str(LOOPS / "manual_allreduce.py"),), num_ranks=2, step=10, steps_after=20),
    ("exit", "slow_before_optimizer"): Plan(
        words=(str(LOOPS / "gpt_accumulation.py"),), num_ranks=2, step=20, steps_after=60
    ),
}


@pytest.mark.parametrize("faults", PLANS, ids=" ".join)
def test_each_fault_is_found_and_a_clean_run_is_silent(faults: tuple[str, ...], tmp_path: Path) -> None:
    rows = list(script_drill(PLANS[faults], [*faults], folder=tmp_path, keep=True, slow_ratio=5.0))
    assert [row.fault for row in rows] == ["none", *faults]
    assert [row.fault for row in rows if not row.is_right] == [], rows
    assert all(row.is_injected for row in rows)
