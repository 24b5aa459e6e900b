"""A last line that a full disk, a kill or a power cut left torn: it is reported, and swallows nothing that follows."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from probes.tape import event_kinds
from probes.tape.events import EventWriter, read_events
from probes.tape.rundir import NODE_RANK
from probes.tape.segment_index import SegmentIndex, check_index
from probes.tape.unwritten import restore_unwritten, save_unwritten
from store import Store
from tests.factories import make_run

TORN = b'{"wall_ns": 1, "kind": "watch_sto'
BLANK = bytes(100)


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


@pytest.mark.parametrize("tail", [TORN, BLANK], ids=["torn", "blank"])
def test_the_first_event_of_a_new_writer_is_kept(tmp_path: Path, tail: bytes) -> None:
    run = make_run(tmp_path, ranks=1, steps=3)
    path = run.node_dir(0) / "events.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b'{"wall_ns":1,"attempt":0,"rank":-1,"kind":"note","step":1}\n' + tail)
    writer = EventWriter(path, attempt=0, rank=NODE_RANK)
    writer.write(event_kinds.RUN_STARTED, node_rank=0)
    writer.write(event_kinds.WATCH_STARTED, pid=1)
    writer.close()
    events, end, skipped = read_events(path)
    assert [event["kind"] for event in events] == ["note", "run_started", "watch_started"]
    assert (end, skipped) == (path.stat().st_size, 1)
    with Store.open(run) as store:
        problems = [text for _, text in store.rows("SELECT * FROM ingest_problems")]
        assert problems == ["1 line is not an event, or is a copy of one"]
        assert store.rows("SELECT count(*) FROM events WHERE kind = 'run_started'") == [(1,)]


def test_a_writer_goes_on_behind_what_another_left_torn(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writer = EventWriter(path, attempt=0, rank=NODE_RANK)
    for step in range(2):
        writer.write_any("note", step=step)
        with path.open("ab") as other:
            other.write(TORN)
    writer.write_any("note", step=2)
    events, _, skipped = read_events(path)
    assert ([event["step"] for event in events], skipped) == ([0, 1, 2], 2)


def test_whole_files_get_no_empty_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for _ in range(2):
        writer = EventWriter(path, attempt=0, rank=NODE_RANK)
        writer.write_any("note")
        writer.close()
    save_unwritten(path, [b'{"kind":"saved"}\n'])
    restore_unwritten([path])
    assert b"" not in path.read_bytes().split(b"\n")[:-1]


def test_a_restored_event_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(TORN)
    saved = save_unwritten(path, [b'{"kind":"first"}\n', TORN])
    assert saved == save_unwritten(path, [b'{"kind":"second"}\n'])
    assert restore_unwritten([path]) == 1
    events, _, skipped = read_events(path)
    assert ([event["kind"] for event in events], skipped) == (["first", "second"], 2)


@pytest.mark.parametrize("kept", [-1, -30, 0])
def test_an_index_goes_on_behind_its_torn_line(tmp_path: Path, kept: int) -> None:
    """Torn before its newline a line is whole; `kept` 0: the tail is blank."""
    path = tmp_path / "segments.jsonl"
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        (tmp_path / name).write_text(f"{name}\n")
    index = SegmentIndex(path)
    index.add(tmp_path, "a.jsonl")
    index.add(tmp_path, "b.jsonl")
    index.close()
    path.write_bytes(path.read_bytes()[:kept] if kept else path.read_bytes() + BLANK)
    torn = dict(check_index(tmp_path, path))
    assert torn == {"segments.jsonl": "its last line is torn" if kept else "its end is blank"}
    index = SegmentIndex(path)
    for name in ("b.jsonl", "c.jsonl"):
        index.add(tmp_path, name)
    index.close()
    number = 2 if kept else 3
    damaged = {} if kept == -1 else {"segments.jsonl": f"line {number} is damaged"}
    assert dict(check_index(tmp_path, path)) == damaged
    for name in ("b.jsonl", "c.jsonl"):
        (tmp_path / name).unlink()
    assert {"b.jsonl", "c.jsonl"} <= set(dict(check_index(tmp_path, path))), "both are noted"


def test_a_segment_is_not_retired_by_a_torn_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = SegmentIndex(tmp_path / "segments.jsonl")
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:20]))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        index.retire("steps.00000.tape", 5)
