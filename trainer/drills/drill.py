"""`rankscope drill`: train a configuration many times, each time with another fault, and score each run.

    drill = Drill(base, plan, folder=Path("runs/drill-1"), keep=False, limit_s=180.0)
    for row in drill.rows(view): ...
    drill.tally.recall

The score of a run depends only on its store. Runs without a problem are deleted unless `keep` is set; others are kept
for inspection.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from probes.tape.format.reader import TapeError
from store import Store, StoreError
from trainer.drills.execute import Base, Executed, execute
from trainer.drills.scenario import DrillPlan, Scenario
from trainer.drills.score import Score, Wanted, score_run
from trainer.drills.tally import Row, Tally
from trainer.launcher.processes.prefork import PreforkServer

__all__ = ["Drill", "View"]


class View(Protocol):
    """Display of a running drill."""

    def run_started(self, number: int, scenario: Scenario) -> None: ...

    def run_printed(self, line: str) -> None: ...

    def run_ended(self, row: Row) -> None: ...


class Drill:
    """Runs the scenarios of a plan one after another."""

    def __init__(self, base: Base, plan: DrillPlan, *, folder: Path, keep: bool, limit_s: float) -> None:
        self.base = base
        self.plan = plan
        self.folder = folder
        self.keep = keep
        self.limit_s = limit_s
        self.tally = Tally()

    def rows(self, view: View) -> Iterator[Row]:
        """Yield each run after it was judged. After a KeyboardInterrupt, `tally` has the runs so far."""
        server = PreforkServer()
        try:
            for number, scenario in enumerate(self.plan.scenarios):
                view.run_started(number, scenario)
                row = self._run(scenario, view, server)
                self.tally.add(row)
                view.run_ended(row)
                yield row
        finally:
            server.close()

    def _run(self, scenario: Scenario, view: View, server: PreforkServer) -> Row:
        folder = self.folder / f"{scenario.mesh.replace('*', '-x-')}-{scenario.name}-seed-{scenario.seed}"
        try:
            executed = execute(
                scenario, self.base, folder, limit_s=self.limit_s, server=server, on_line=view.run_printed
            )
        except KeyboardInterrupt:
            self._remove(folder)
            raise
        row = judge(scenario, executed)
        if row.passed and not self.keep:
            self._remove(folder)
            row = Row(scenario=scenario, score=row.score, wall_s=row.wall_s)
        return row

    def _remove(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()


def judge(scenario: Scenario, executed: Executed) -> Row:
    """Score a finished run. If the run cannot be read, `problem` of the row says why."""
    if executed.run is None:
        return Row(scenario=scenario, score=Score(injected=False), wall_s=executed.wall_s, problem=executed.problem)
    run, problem = executed.run, executed.problem
    try:
        with Store.open(run) as store:
            score = score_run(
                store,
                run.manifest(),
                Wanted(
                    steps=scenario.steps,
                    faults=scenario.faults,
                    expected=scenario.expected,
                    recovery=scenario.recovery,
                    required_events=scenario.required_events,
                    allowed=scenario.allowed,
                ),
                stacks_dir=run.stacks,
            )
    except (StoreError, TapeError) as error:
        score, problem = Score(injected=False), problem or str(error)
    return Row(scenario=scenario, score=score, wall_s=executed.wall_s, run=run.path, problem=problem)
