"""`rankscope drill --script` on loops as their communities write them; all of them: `benchmarks.strangers_suite`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from probes.tape.rundir import RunDir
from trainer.drills.script.drill import script_drill
from trainer.drills.script.execute import Plan
from trainer.drills.script.faults import SCRIPT_FAULTS
from trainer.drills.script.score import ScriptRow
from watch.verdicts.diagnosed_run import diagnosed_run

LOOPS = Path(__file__).parents[2] / "benchmarks" / "strangers"


def test_each_fault_is_found_and_a_clean_run_is_silent(tmp_path: Path) -> None:
    plan = Plan(words=(str(LOOPS / "manual_allreduce.py"),), num_ranks=2, step=10, steps_after=20)
    _all_right(plan, ["kill", "wrong_size"], tmp_path)


@pytest.mark.alone
def test_an_exit_is_found_and_a_slow_rank_is_named_with_place_and_line(tmp_path: Path) -> None:
    """Slow by so much that a busy machine hides nothing."""
    plan = Plan(words=(str(LOOPS / "gpt_accumulation.py"),), num_ranks=2, step=20, steps_after=60)
    _all_right(plan, ["exit", "slow_before_optimizer"], tmp_path)


def _all_right(plan: Plan, faults: list[str], folder: Path) -> None:
    rows = [
        row if "straggler" in SCRIPT_FAULTS[row.fault].kinds else _without_load(row)
        for row in script_drill(plan, faults, folder=folder, keep=True, slow_ratio=5.0)
    ]
    assert [row.fault for row in rows] == ["none", *faults]
    assert [row.fault for row in rows if not row.is_right] == [], rows
    assert all(row.is_injected for row in rows)


def _without_load(row: ScriptRow) -> ScriptRow:
    """The row, but for alarms of a rank that waited for a core, which are right: what runs beside it takes the core."""
    if not row.false_alarms:
        return row
    with diagnosed_run(RunDir(Path(row.run)), is_over=True) as (store, diagnosis):
        rows = store.rows("SELECT summary FROM findings WHERE finding_kind = 'straggler' AND cause = 'host'")
        now = [one.summary for one in diagnosis.fired if (one.kind, one.cause) == ("straggler", "host")]
    ours = {*now, *(f"Reported live: {summary}" for (summary,) in rows)}
    return replace(row, false_alarms=tuple(alarm for alarm in row.false_alarms if alarm not in ours))
