"""`rankscope note`: tags and a note are kept beside the run, and a mistake changes nothing."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from probes.tape.rundir import RunDir
from rankscope.cli import app
from store.runs.run_notes import MAX_TAGS, NAME, RunNotes, read_notes


@pytest.fixture
def runs(tmp_path: Path) -> list[RunDir]:
    return [RunDir.create(tmp_path, name=name, manifest={}) for name in ("a", "b")]


def note(runs: list[RunDir], *arguments: str) -> Result:
    return CliRunner().invoke(app, ["note", *(str(run.path) for run in runs), *arguments])


def test_tags_and_a_text_are_added_kept_and_removed(runs: list[RunDir]) -> None:
    manifest = (runs[0].path / "run.json").read_bytes()
    assert note(runs, "--tag", "baseline", "--tag", "sweep", "--text", "lr 3e-4").exit_code == 0
    assert [read_notes(run) for run in runs] == [RunNotes(tags=("baseline", "sweep"), text="lr 3e-4")] * 2
    assert note(runs[:1], "--untag", "sweep", "--tag", "baseline").exit_code == 0
    assert read_notes(runs[0]) == RunNotes(tags=("baseline",), text="lr 3e-4")
    assert f"{runs[0].run_id}: baseline; lr 3e-4" in note(runs[:1]).output
    assert stat.S_IMODE((runs[0].path / NAME).stat().st_mode) == 0o600
    note(runs[:1], "--untag", "baseline", "--text", "")
    assert not (runs[0].path / NAME).exists()
    assert (runs[0].path / "run.json").read_bytes() == manifest


@pytest.mark.parametrize(
    "arguments",
    [("--tag", "two words"), ("--tag", ""), ("--tag", "x" * 41), ("--text", "x" * 2_001),
     tuple(part for number in range(MAX_TAGS + 1) for part in ("--tag", f"t{number}"))],
    ids=["space", "empty", "long", "text", "many"],
)  # fmt: skip
def test_what_cannot_be_kept_is_one_line_and_changes_nothing(runs: list[RunDir], arguments: tuple[str, ...]) -> None:
    result = note(runs, *arguments)
    assert result.exit_code == 2
    assert not any((run.path / NAME).exists() for run in runs)


def test_a_path_that_is_not_a_run_leaves_all_runs_unchanged(runs: list[RunDir], tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    assert note([*runs, RunDir(tmp_path / "none")], "--tag", "x").exit_code == 2
    assert not any((run.path / NAME).exists() for run in runs)


@pytest.mark.parametrize("content", ["", "[1]", "{", json.dumps({"tags": [1, "x", None], "text": 5}), "[" * 100_000])
def test_a_file_that_is_not_ours_is_no_note(runs: list[RunDir], content: str) -> None:
    (runs[0].path / NAME).write_text(content)
    assert read_notes(runs[0]) == RunNotes(tags=("x",) if '"x"' in content else ())


def test_a_link_is_not_followed(runs: list[RunDir], tmp_path: Path) -> None:
    (tmp_path / "elsewhere.json").write_text('{"text": "secret"}')
    (runs[0].path / NAME).symlink_to(tmp_path / "elsewhere.json")
    assert read_notes(runs[0]) == RunNotes()
