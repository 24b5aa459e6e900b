from __future__ import annotations

from pathlib import Path

import pytest

from probes.tape.rundir import RunDir, RunError


def test_a_run_that_is_missing_is_looked_for_in_the_folder_it_was_named_in(tmp_path: Path) -> None:
    for path, hint in (
        (tmp_path / "absent", f"see `ls {tmp_path}`"),
        (tmp_path / "nowhere" / "absent", f"there is no folder {tmp_path / 'nowhere'} either"),
        (tmp_path / "latest", "made by the first `rankscope train`"),
    ):
        with pytest.raises(RunError) as told:
            RunDir.open(path)
        assert hint in str(told.value)


def test_a_run_is_its_users_own(tmp_path: Path) -> None:
    for run in (RunDir.create(tmp_path, name="a", manifest={}), RunDir.adopt(tmp_path / "b")[0]):
        run.begin_manifest({})
        assert run.path.stat().st_mode & 0o777 == 0o700
        assert (run.path / "run.json").stat().st_mode & 0o777 == 0o600
