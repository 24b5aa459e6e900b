"""`rankscope drill` as a user starts it: it breaks real runs, and its report says what was noticed and survived."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.launched import SOURCE, TINY
from tests.forked import ForkedPython
from tests.waiting import wait_for
from watch.processes import processes_of


def drill(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    text = tmp_path / "text.txt"
    text.write_text(SOURCE * 4)
    settings = (*TINY, f"data.path=['{text}']", f"run.dir={tmp_path / 'runs'}", "parallel.dp_shard=2")
    changes = [part for setting in settings for part in ("--set", setting)]
    return ForkedPython(
        ["-m", "rankscope", "drill", *changes, *arguments],
        forks_python=True,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(300)
def test_faults_are_noticed_and_survived(tmp_path: Path) -> None:
    process = drill(
        tmp_path, "--faults", "nan_grad+stop,flipped_checkpoint", "--format", "json", "--html", "drill.html"
    )
    stdout, stderr = process.communicate(timeout=250)
    assert process.returncode == 0, stderr
    report = json.loads(stdout)
    assert report["recall"] == report["right_rank"] == report["right_cause"] == 1.0, stderr
    assert report["unrecovered"] == 0
    broken, flipped = report["runs"]
    assert [answer["kind"] for answer in broken["answers"]] == ["non_finite", "hang"]
    assert all(answer["seen"] for answer in broken["answers"])
    assert broken["training_s"] > 0
    assert broken["steps_lost"] > 0
    assert "F22+F2 nan_grad+stop" in (tmp_path / "drill.html").read_text()
    assert flipped["recovered"], "the damaged checkpoint was refused, and the one before it used"
    good = not any(run["problems"] for run in report["runs"])
    assert not good or not list((tmp_path / "runs").glob("drill-*")), "runs that went well are not kept"


def test_ctrl_c_leaves_a_table_and_no_process(tmp_path: Path) -> None:
    process = drill(tmp_path, "--faults", "none,kill")
    wait_for(lambda: list((tmp_path / "runs").glob("drill-*/*/latest/tapes/attempt-0/rank-*")), "ranks")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == 130, stderr
    assert "Interrupted after 0 of 2 runs" in stdout
    wait_for(lambda: not processes_of(tmp_path / "runs"), "end of every process")
    assert not list((tmp_path / "runs").glob("drill-*"))
