"""`rankscope drill` as a user starts it: how soon a fault is noticed, and no word of a pause of half a second."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.test_drill import drill


@pytest.mark.timeout(240)
def test_faults_are_found_and_survived_and_a_trap_gives_no_finding(tmp_path: Path) -> None:
    process = drill(
        tmp_path, "--faults", "nan_grad+stop,pause,flipped_checkpoint", "--format", "json", "--html", "drill.html"
    )
    stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    report = json.loads(stdout)
    assert report["recall"] == report["right_rank"] == report["right_cause"] == 1.0, stderr
    assert report["unrecovered"] == 0
    broken, paused, flipped = report["runs"]
    assert [answer["kind"] for answer in broken["answers"]] == ["non_finite", "hang"]
    assert all(answer["seen"] for answer in broken["answers"])
    assert 0 < broken["training_s"] < 60
    assert broken["steps_lost"] > 0
    assert paused["answers"] == []
    assert "F22+F2 nan_grad+stop" in (tmp_path / "drill.html").read_text()
    assert flipped["recovered"], "the damaged checkpoint was refused, and the one before it used"
    good = not any(run["problems"] for run in report["runs"])
    assert not good or not list((tmp_path / "runs").glob("drill-*")), "runs that went well are not kept"
