"""`rankscope drill --script` on loops as their communities write them; all of them: `benchmarks.strangers`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from probes.tape.rundir import RunDir
from tests.depth import usually
from tests.e2e.launched import OF_SPEED
from tests.forked import run_python
from trainer.drills.script.drill import script_drill
from trainer.drills.script.execute import Plan
from trainer.drills.script.score import ScriptRow
from watch.verdicts.diagnosed_run import diagnosed_run

ROOT = Path(__file__).parents[2]
LOOPS = ROOT / "benchmarks" / "strangers"
DRILL = f"import sys; from {__name__} import drill_loop; drill_loop(sys.argv[1])"


def test_each_fault_is_found_and_a_clean_run_is_silent(tmp_path: Path) -> None:
    done = run_python(["-c", DRILL, str(tmp_path)], cwd=ROOT, timeout_s=280, forks_python=True)
    assert done.returncode == 0, done.stderr


def drill_loop(folder: str) -> None:
    """In a process that lets the launches, their ranks and watches be forks."""
    plan = Plan(words=(str(LOOPS / "manual_allreduce.py"),), num_ranks=2, step=10, steps_after=20)
    all_right(plan, [*usually({"kill": 0, "wrong_size": 0}, later=["kill"])], Path(folder))


def all_right(plan: Plan, faults: list[str], folder: Path) -> None:
    rows = [_without_load(row) for row in script_drill(plan, faults, folder=folder, keep=True, slow_ratio=5.0)]
    assert [row.fault for row in rows] == ["none", *faults]
    assert [row.fault for row in rows if not row.is_right] == [], rows
    assert all(row.is_injected for row in rows)


def _without_load(row: ScriptRow) -> ScriptRow:
    """The row, but for alarms of speed: what runs beside it takes its cores, and that is rightly reported."""
    if not row.false_alarms:
        return row
    with diagnosed_run(RunDir(Path(row.run)), is_over=True) as (store, diagnosis):
        rows = store.rows("SELECT finding_kind, summary FROM findings")
        now = [summary for kind, summary in rows if kind in OF_SPEED]
        of_speed = {one.summary for one in diagnosis.fired if one.kind in OF_SPEED}
    of_speed |= {*now, *(f"Reported live: {summary}" for summary in now)}
    return replace(row, false_alarms=tuple(alarm for alarm in row.false_alarms if alarm not in of_speed))
