"""A run's folder is replaced while the run records: that is reported at once, and only one folder is written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from probes.tape.files.held_folder import HeldFolder
from probes.tape.format.schema import TABLES
from probes.tape.format.writer import COMPLETE, TapeWriter
from probes.tape.rundir import RunDir
from store import Ingester, StoreError
from tests.factories import make_run
from trainer.checkpoint import attempt_fence as fence
from trainer.exit_codes import EXIT_FENCED


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path, ranks=1, steps=5, end="")


def replace(run: RunDir) -> Path:
    """Move the run away and put a copy in its place; returns where it is now."""
    moved = run.path.with_name("moved")
    run.path.rename(moved)
    shutil.copytree(moved, run.path)
    return moved


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_only_a_folder_with_another_in_its_place_is_replaced(run: RunDir, tmp_path: Path) -> None:
    held = HeldFolder(run.path)
    assert held.problem() == ""
    elsewhere = tmp_path / "elsewhere"
    run.path.rename(elsewhere)
    assert held.problem() == ""  # nothing stands in its place
    run.path.symlink_to(elsewhere)
    assert held.problem() == ""  # it is found there still
    run.path.unlink()
    shutil.copytree(elsewhere, run.path)
    assert f"it is {elsewhere} now" in held.problem()
    shutil.rmtree(elsewhere)
    assert "it was deleted" in held.problem()
    held.close()


def test_a_tape_goes_on_where_it_began(run: RunDir) -> None:
    folder = run.rank_dir(0, 0)
    held = HeldFolder(folder)
    tape = TapeWriter(folder, TABLES["scalars"], rank=0, attempt=0, directory_fd=held.fd)
    tape.append(COMPLETE, 1, 1, 0.5)
    moved = replace(run)
    before = contents(run.path)
    for number in range(tape._capacity + 1):  # into a second segment
        tape.append(COMPLETE, number, 1, 0.5)
    tape.close()
    held.close()
    assert tape.dropped == 0
    assert len(list((moved / folder.relative_to(run.path)).glob("scalars.*.tape"))) == 2
    assert contents(run.path) == before


def test_a_store_of_the_folder_in_its_place_is_not_written(run: RunDir) -> None:
    with Ingester(run) as ingester:
        ingester.tick(thorough=True)
        replace(run)
        before = contents(run.path)
        with pytest.raises(StoreError, match="was replaced while it ran"):
            ingester.tick(thorough=True)
        assert contents(run.path) == before


def test_a_rank_leaves_before_it_saves_into_the_folder_in_its_place(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence, "_held", None)
    fence.hold(run, 0)
    fence.check()
    replace(run)
    with pytest.raises(fence.Fenced, match="was replaced while it ran") as left:
        fence.check()
    assert left.value.code == EXIT_FENCED
