from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from probes.tape.rundir import RunDir, RunError
from store.runs_folder import RunsFolder

OUTSIDE = ["../secret", "..", ".", "/etc", "runs/../../secret", "a/b", "", "link", "\x00", "a" * 5000, "~", "%2e%2e"]


def started(path: Path, epoch_s: int) -> None:
    manifest = path / "run.json"
    manifest.write_text(json.dumps(RunDir(path).manifest() | {"created_wall_ns": epoch_s * 10**9}))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    for number, name in enumerate(("older", "newer")):
        run = RunDir.create(folder, name=name, manifest={})
        started(run.path, 1_800_000_000 + number)
    return folder


def test_the_newest_run_comes_first_and_latest_is_not_a_separate_run(runs: Path) -> None:
    names = RunsFolder(runs).run_ids()
    assert [name.partition("-")[0] for name in names] == ["newer", "older"]
    assert RunsFolder(runs).newest() == names[0]
    assert RunsFolder(runs).resolved("latest") == names[0]


def test_a_copied_run_keeps_its_place(runs: Path, tmp_path: Path) -> None:
    older = RunsFolder(runs).run_ids()[1]
    shutil.copytree(runs / older, runs / "copied")
    started(runs / "copied", 1_700_000_000)
    os.utime(runs / "copied" / "run.json", (4e9, 4e9))  # whatever the time of the file says
    os.utime(runs / older / "run.json", (4e9 - 1, 4e9 - 1))
    names = RunsFolder(runs).run_ids()
    assert names[1:] == [older, "copied"]
    (runs / "copied" / "run.json").write_text("{}")  # no start is known: the file's time is the best there is
    os.utime(runs / "copied" / "run.json", (4e9, 4e9))
    assert RunsFolder(runs).newest() == "copied"


@pytest.mark.parametrize("run_id", OUTSIDE)
def test_nothing_outside_the_folder_is_opened(runs: Path, run_id: str) -> None:
    secret = RunDir.create(runs.parent, name="secret", manifest={}).path
    secret.rename(runs.parent / "secret")
    (runs / "link").symlink_to(runs.parent / "secret")
    with pytest.raises(RunError, match="choose one from the list"):
        RunsFolder(runs).open(run_id)


def test_latest_that_leads_out_is_no_run(runs: Path) -> None:
    other = RunDir.create(runs.parent / "elsewhere", name="other", manifest={})
    (runs / "latest").unlink()
    (runs / "latest").symlink_to(other.path)
    assert RunsFolder(runs).resolved("latest") is None


def test_a_run_is_opened_by_its_name_whatever_signs_are_in_it(runs: Path) -> None:
    name = "<script>alert(1)</script>".replace("/", "-")
    (runs / name / "tapes").mkdir(parents=True)
    assert RunsFolder(runs).open(name).path == runs.resolve() / name


def test_a_folder_without_runs_or_without_a_folder_is_empty(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    assert RunsFolder(tmp_path).run_ids() == []
    assert RunsFolder(tmp_path / "nowhere").run_ids() == []
