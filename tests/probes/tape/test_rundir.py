from __future__ import annotations

import errno
from pathlib import Path

import pytest

from probes.tape import rundir
from probes.tape.attempts import claim
from probes.tape.rundir import FOREIGN, RunDir, RunError
from store import Store
from tests.factories import make_run


def test_a_run_that_is_missing_is_looked_for_in_the_folder_it_was_named_in(tmp_path: Path) -> None:
    for path, hint in (
        (tmp_path / "absent", f"see `ls {tmp_path}`"),
        (tmp_path / "nowhere" / "absent", f"there is no folder {tmp_path / 'nowhere'} either"),
        (tmp_path / "latest", "made by the first `rankscope train`"),
        (Path("s3://lake/runs/a"), "no run at s3://lake/runs/a: an address is read by `rankscope analyze`"),
        (Path("s3://"), "no run at s3://: an address is s3://bucket/prefix"),
        (Path("file:///data/a"), "no run at file:///data/a: an address is read by"),
    ):
        with pytest.raises(RunError) as told:
            RunDir.open(path)
        assert hint in str(told.value)


def test_a_name_without_its_folder_is_looked_for_in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_run(tmp_path, ranks=1, steps=2).path
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match=rf"no run at {made.name}: did you mean runs/{made.name}\?"):
        RunDir.open(Path(made.name))
    with pytest.raises(RunError, match="no run at demo-9: see `ls runs`"):
        RunDir.open(Path("demo-9"))


def test_a_file_in_place_of_a_run_names_the_command_that_reads_files(tmp_path: Path) -> None:
    log = tmp_path / "dead.log"
    log.write_text("step 1\n")
    with pytest.raises(RunError, match=r"dead\.log is a file, not a run's folder: .*; `rankscope analyze` reads files"):
        RunDir.open(log)


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


def test_a_run_is_readable_only_by_its_user(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir(mode=0o755)
    for run in (
        RunDir.create(tmp_path, name="a", manifest={}),
        *(RunDir.adopt(tmp_path / at)[0] for at in ("b", "empty")),
    ):
        run.begin_manifest({})
        assert run.path.stat().st_mode & 0o777 == 0o700
        assert (run.path / "run.json").stat().st_mode & 0o777 == 0o600


def test_a_run_that_was_opened_to_others_stays_open(tmp_path: Path) -> None:
    RunDir.adopt(tmp_path / "a")[0].begin_manifest({})
    (tmp_path / "a").chmod(0o750)
    run, is_new = RunDir.adopt(tmp_path / "a")
    assert (is_new, run.path.stat().st_mode & 0o777) == (False, 0o750)


def test_an_empty_folder_whose_mode_cannot_be_changed_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "chmod", refuse)
    RunDir.adopt(tmp_path)[0].begin_manifest({})
    assert RunDir.is_run(tmp_path)


def test_an_unreadable_manifest_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, ranks=1, steps=3)

    def failing(path: Path, limit_bytes: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error", str(path))

    with monkeypatch.context() as disk:
        disk.setattr(rundir, "read_plain", failing)
        assert RunDir.open(run.path).manifest() == {}, "a dead run is readable"
        problem = {"run.json": "cannot be read (Input/output error): what was configured is not known"}
        assert run.problems() == problem
        with Store.open(run) as store:
            assert dict(store.rows("SELECT * FROM ingest_problems")) == problem
        with pytest.raises(OSError, match="Input/output error"):
            run.add_to_manifest({"num_parameters": 3})
    before = run.manifest()
    run.add_to_manifest({"num_parameters": 3})
    assert run.manifest() == before | {"num_parameters": 3}
    with Store.open(run) as store:
        assert store.rows("SELECT * FROM ingest_problems") == [], "the disk is well again"


def test_a_renamed_run_has_the_name_of_its_folder(tmp_path: Path) -> None:
    """The name that the list of runs, addresses and commands use; the recorded one stays in the file."""
    run = RunDir.create(tmp_path, name="before", manifest={"command": ["train.py"]})
    moved = RunDir.open(run.path.rename(tmp_path / "after"))
    assert moved.manifest()["run_id"] == "after"
    assert moved.recorded_id() == run.run_id
    (moved.path / "run.json").write_text("{}")
    assert moved.manifest() == {}
    assert moved.recorded_id() == "after"


def test_a_manifest_of_another_run_is_reported_and_not_used(tmp_path: Path) -> None:
    one, other = (RunDir.create(tmp_path / "runs", name=name, manifest={"config": name}) for name in ("one", "other"))
    assert claim(one) == 0
    assert (one.problems(), one.manifest()["config"]) == ({}, "one")
    own = (one.path / "run.json").read_bytes()
    (one.path / "run.json").write_bytes((other.path / "run.json").read_bytes())
    assert one.problems() == {"run.json": FOREIGN}
    assert one.manifest() == {}
    (one.path / "run.json").write_bytes(own)
    one.begin_manifest({"config": "again"})  # another launch into the same folder
    assert claim(one) == 1
    assert (one.problems(), one.manifest()["config"]) == ({}, "again")
