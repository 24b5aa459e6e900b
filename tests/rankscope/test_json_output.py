"""`--format json` of the commands that write files, and outputs into folders that are not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rankscope.cli import app
from tests.support.recorded_gpu import copy_gpu_run


def printed(*words: str) -> dict[str, object]:
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_files_are_named_in_one_document(tmp_path: Path) -> None:
    run = copy_gpu_run("none", tmp_path)
    path = str(getattr(run, "path", run))
    report = printed("report", path, "--markdown", str(tmp_path / "ticket.md"), "--format", "json")
    assert report["files"] == [{"path": str(tmp_path / "ticket.md"), "bytes": (tmp_path / "ticket.md").stat().st_size}]
    shared = printed("share", path, "--out", str(tmp_path / "run.tar.gz"), "--format", "json")
    assert shared["bytes"] == (tmp_path / "run.tar.gz").stat().st_size
    assert shared["verdict"] == report["verdict"]
    trace = printed("export", path, "--to", "chrome-trace", "--out", str(tmp_path / "t.json"), "--format", "json")
    assert trace["bytes"] == (tmp_path / "t.json").stat().st_size


@pytest.mark.parametrize("option", ["--html", "--markdown", "--chrome-trace"])
def test_a_folder_that_is_not_there_is_refused_and_not_made(option: str, tmp_path: Path) -> None:
    target = tmp_path / "misspelt" / "report.html"
    done = CliRunner().invoke(app, ["report", str(tmp_path), option, str(target)])
    assert done.exit_code == 2
    assert "there is no folder" in done.output
    assert not target.parent.exists()
