from __future__ import annotations

from pathlib import Path

import pytest

from probes.tape.rundir import RunDir, RunError


def test_a_run_that_is_missing_is_looked_for_in_the_folder_it_was_named_in(tmp_path: Path) -> None:
    for path, hint in (
        (tmp_path / "absent", f"see `ls {tmp_path}`"),
        (tmp_path / "nowhere" / "absent", f"there is no folder {tmp_path / 'nowhere'} either"),
        (tmp_path / "latest", "made by the first `rankscope train`"),
        (Path("s3:/lake/runs/a"), "address is read by `rankscope analyze`"),
    ):
        with pytest.raises(RunError) as told:
            RunDir.open(path)
        assert hint in str(told.value)


def test_a_folder_of_runs_names_one_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    with pytest.raises(RunError, match=r"runs holds no run .*: name a run's folder, for example runs/latest"):
        RunDir.open(folder)
    RunDir.adopt(folder / "a")[0].begin_manifest({})
    run = RunDir.adopt(folder / "b")[0]
    run.begin_manifest({})
    with pytest.raises(RunError, match=rf"is a folder of runs: name one of them, for example {run.path}"):
        RunDir.open(folder)
    (folder / "latest").symlink_to("a")
    with pytest.raises(RunError, match=r"for example .*runs/latest"):
        RunDir.open(folder)


def test_a_run_is_its_users_own(tmp_path: Path) -> None:
    for run in (RunDir.create(tmp_path, name="a", manifest={}), RunDir.adopt(tmp_path / "b")[0]):
        run.begin_manifest({})
        assert run.path.stat().st_mode & 0o777 == 0o700
        assert (run.path / "run.json").stat().st_mode & 0o777 == 0o600
