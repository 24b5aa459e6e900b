"""The line at the end of an attached loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from probes.attach.last_line import last_line
from probes.tape.events import EventWriter
from probes.tape.rundir import RunDir
from tests.factories import empty_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return empty_run(tmp_path)


def report(run: RunDir, *findings: tuple[str, str, str, str]) -> None:
    run.node_dir(0).mkdir(parents=True, exist_ok=True)
    events = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=-1)
    for name, severity, status, summary in findings:
        events.write("finding", id=name, finding_kind=name, severity=severity, status=status, summary=summary)
    events.close()


def test_a_run_without_reports_points_to_analyze_for_the_verdict(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.path.parent)
    line = f"rankscope: no problems were reported during the run. For the verdict: rankscope analyze {run.path.name}"
    assert last_line(run, 0) == line


def test_the_most_severe_open_finding_is_shown(run: RunDir) -> None:
    report(
        run,
        ("straggler-0-r1", "warning", "fired", "Rank 1 is slow."),
        ("hang-0", "critical", "fired", "Rank 2 hangs."),
        ("hang-0", "info", "ok", "Over: Rank 2 hangs."),
        ("non_finite-0", "critical", "fired", "Rank 3 made a NaN."),
    )
    assert last_line(run, 0).startswith("rankscope: Rank 3 made a NaN. 1 more. The verdict: rankscope analyze ")
