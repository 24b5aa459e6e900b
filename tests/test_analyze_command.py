"""`rankscope analyze` as a command: light, and clear about what it could not read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from probes.tape.format.reader import segment_paths
from probes.tape.rundir import RunDir
from rankscope.commands import analyze
from tests.e2e.launched import rankscope
from tests.factories import make_run

VERSION_OFFSET = 8  # of the schema version in a tape's header


def truncate(tape: Path) -> None:
    with tape.open("r+b") as file:
        file.truncate(9000)


def make_newer(tape: Path) -> None:
    with tape.open("r+b") as file:
        file.seek(VERSION_OFFSET)
        file.write(b"\x63")


@pytest.mark.parametrize(("damage", "words"), [(truncate, "shorter"), (make_newer, "update rankscope")])
def test_a_damaged_tape_is_named_and_the_rest_is_reported(
    tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    run = make_run(tmp_path, ranks=4, steps=60)
    damage(segment_paths(run.rank_dir(0, 0), "steps")[0])
    done = rankscope("analyze", str(run.path), "--format", "json")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert words in done.stderr
    assert json.loads(done.stdout)["run"]["num_ranks"] == 4


@pytest.mark.parametrize("content", ["", '{"run_id": "beg'])
def test_a_damaged_manifest_is_named_and_the_rest_is_reported(tmp_path: Path, content: str) -> None:
    """Limits and missing ranks are then unknown, as with a damaged tape. The argument is the folder of runs."""
    run = make_run(tmp_path, ranks=4, steps=60)
    (run.path / "run.json").write_text(content)
    done = rankscope("analyze", str(run.path.parent), "--format", "json")
    assert done.returncode == 2, done.stderr
    assert f"{run.path / 'run.json'}: is damaged: what was configured is not known; the report cov" in done.stderr
    report = json.loads(done.stdout)
    assert (report["run"]["run_id"], report["run"]["num_ranks"]) == (run.run_id, 4)
    (configuration,) = (found for found in report["findings"] if found["kind"] == "configuration")
    assert "run.json is missing, damaged or of another run" in configuration["summary"]


@pytest.mark.parametrize(("fail_on", "code"), [("critical", 0), ("warning", 1)])
def test_exit_codes_follow_the_worst_finding(tmp_path: Path, fail_on: str, code: int) -> None:
    run = make_run(tmp_path, ranks=4, steps=80, slow={2: 1.6}, phase="forward")
    done = rankscope("analyze", str(run.path), "--format", "json", "--fail-on", fail_on)
    report = json.loads(done.stdout)
    assert [(f["kind"], f["ranks"]) for f in report["findings"] if f["status"] == "fired"] == [("straggler", [2])]
    assert done.returncode == code, done.stderr
    assert ("rankscope: warning: Rank 2 was slow" in done.stderr) == bool(code)


def test_analyze_imports_no_heavy_packages(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=4, steps=150)
    done = _python("-X", "importtime", "-m", "rankscope", "analyze", str(run.path))
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert "duckdb" in imported
    assert not imported & {"torch", "streamlit", "pandas", "plotly", "jinja2"}


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=100, check=True)


def test_the_folder_of_a_run_is_left_as_it_was_found(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=30)
    tapes = {path: path.read_bytes() for path in RunDir(run.path).tapes.rglob("*") if path.is_file()}
    assert rankscope("analyze", str(run.path)).returncode == 0
    assert {path: path.read_bytes() for path in RunDir(run.path).tapes.rglob("*") if path.is_file()} == tapes


def test_findings_that_are_over_stay_over_beside_a_log(tmp_path: Path) -> None:
    """As without the log: open findings come first, the others say that they are over."""
    run = make_run(tmp_path, ranks=4, steps=120, slow={3: 1.6}, slow_from=60, phase="forward", nan={1: 30})
    log = tmp_path / "job.log"
    log.write_text("step 1 loss 4.2\nstep 2 loss 4.1\n")
    diagnosis, _ = analyze._diagnosis([run.path, log], "")
    first, second, *_ = diagnosis.verdict.splitlines()
    assert first.startswith("Rank 3 was slow")
    assert second.startswith("Already over: The forward pass of rank 1 gave a NaN"), second
