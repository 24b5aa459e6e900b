"""Events that a disk does not take: written once it does, or saved elsewhere and brought back."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from probes.fail_open import error_counts
from probes.tape import unwritten
from probes.tape.events import EventWriter, read_events
from probes.tape.unwritten import restore_unwritten, save_unwritten

FULL = Path("/dev/full")


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def refused(path: Path, steps: range) -> EventWriter:
    """A writer whose disk is full, with an event a step."""
    path.touch()
    writer = EventWriter(path, attempt=0, rank=1)
    _point(writer, FULL)
    for step in steps:
        writer.write("rollback", step=step)
    return writer


def _point(writer: EventWriter, path: Path) -> None:
    fd = os.open(path, os.O_RDWR | os.O_APPEND)
    os.dup2(fd, writer._file._fd)
    os.close(fd)
    found = os.fstat(writer._file._fd)
    writer._file._identity = (found.st_dev, found.st_ino)


def _steps(path: Path) -> list[int]:
    events, _, skipped = read_events(path)
    assert skipped == 0
    return [event["step"] for event in events]


def test_events_refused_by_a_full_disk_are_written_once_it_has_room(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    before = error_counts["events"]
    writer = refused(path, range(3))
    assert writer.has_unwritten
    assert error_counts["events"] == before + 3
    assert _steps(path) == []
    _point(writer, path)
    writer.retry()
    assert not writer.has_unwritten
    writer.write("rollback", step=3)
    writer.close()
    assert _steps(path) == [0, 1, 2, 3]
    assert writer.saved_to is None


def test_events_that_are_never_written_are_saved_and_restored_once(tmp_path: Path, temporary_folder: Path) -> None:
    path, other = tmp_path / "events.jsonl", tmp_path / "other.jsonl"
    writer = refused(path, range(2))
    writer.close()
    assert writer.saved_to is not None
    assert temporary_folder in writer.saved_to.parents
    assert writer.saved_to.stat().st_mode & 0o077 == 0
    other.touch()
    assert restore_unwritten([other]) == 0
    assert restore_unwritten([path, tmp_path / "missing.jsonl"]) == 1
    assert _steps(path) == [0, 1]
    assert restore_unwritten([path]) == 0
    assert not writer.saved_to.exists()


def test_two_processes_save_into_one_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    refused(path, range(2)).close()
    refused(path, range(2, 4)).close()
    restore_unwritten([path])
    assert _steps(path) == [0, 1, 2, 3]


def test_saved_events_stay_while_the_disk_is_full(tmp_path: Path) -> None:
    link = tmp_path / "events.jsonl"
    saved = save_unwritten(FULL, [b"{}\n"])
    assert saved is not None
    assert restore_unwritten([FULL]) == 0
    assert saved.read_bytes() == b"{}\n"
    link.symlink_to(FULL)
    assert restore_unwritten([link]) == 0  # a link may lead out of the run


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, temporary_folder: Path) -> None:
    path = tmp_path / "events.jsonl"
    folder = temporary_folder / f"rankscope-unwritten-{os.getuid()}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    writer = refused(path, range(2))
    writer.close()
    assert writer.saved_to is None
    assert restore_unwritten([path]) == 0


def test_unwritten_events_are_kept_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probes.tape.events.MAX_UNWRITTEN_BYTES", 1000)
    path = tmp_path / "events.jsonl"
    writer = refused(path, range(100))
    _point(writer, path)
    writer.close()
    steps = _steps(path)
    assert steps == list(range(len(steps))), "the first ones are kept: they say what began it"
    assert 0 < path.stat().st_size <= 1000
    assert unwritten.MAX_UNWRITTEN_BYTES > 1000
