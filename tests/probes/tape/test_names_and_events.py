"""Names and events: one line each, torn lines skipped and counted."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from probes.fail_open import error_counts
from probes.tape.events import EventWriter, read_events
from probes.tape.format import names as names_module
from probes.tape.format.names import NameWriter, read_names


def test_a_name_is_written_once(tmp_path: Path) -> None:
    name = NameWriter(tmp_path / "names.jsonl")
    assert name("") == 0
    first, second = name("all_reduce"), name("blocks.0.mlp")
    assert name("all_reduce") == first != second
    found, skipped = read_names(tmp_path / "names.jsonl")
    assert (found[first], found[second], skipped) == ("all_reduce", "blocks.0.mlp", 0)
    assert len(found) == 3  # with the one for "too many"


def test_after_the_end_there_are_no_new_names(tmp_path: Path) -> None:
    name = NameWriter(tmp_path / "names.jsonl")
    known = name("all_reduce")
    name.close()
    assert (name("all_reduce"), name("broadcast")) == (known, 0)


def test_a_name_that_a_full_disk_cuts_off_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = NameWriter(tmp_path / "names.jsonl")
    real = os.write
    with monkeypatch.context() as full_disk:
        full_disk.setattr(os, "write", lambda fd, data: real(fd, data[:10]))
        with pytest.raises(OSError, match="No space left"):
            name("all_reduce")
    first, second = name("all_reduce"), name("broadcast")
    found, skipped = read_names(tmp_path / "names.jsonl")
    assert (found[first], found[second], skipped) == ("all_reduce", "broadcast", 1)


def test_threads_agree_on_names(tmp_path: Path) -> None:
    name = NameWriter(tmp_path / "names.jsonl")
    results: list[list[int]] = []

    def ask() -> None:
        results.append([name(f"name {i}") for i in range(300)])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result == results[0] for result in results)
    assert len(set(results[0])) == 300
    assert len(read_names(tmp_path / "names.jsonl")[0]) == 301


def test_too_many_names_become_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_module, "MAX_NAMES", 5)
    name = NameWriter(tmp_path / "names.jsonl")
    numbers = [name(f"name {i}") for i in range(10)]
    assert len(set(numbers)) == 5
    assert numbers[-1] == names_module.OVERFLOW_ID


def test_torn_and_odd_names_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "names.jsonl"
    path.write_bytes(b'{"id": 1, "name": "a"}\n[]\n{"id": 2}\n\xff\xfe\n{"id": 3, "na')
    found, skipped = read_names(path)
    assert found == {1: "a"}
    assert skipped == 4
    assert read_names(tmp_path / "none") == ({}, 0)


def test_events_come_back_in_order_and_a_torn_one_waits(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writer = EventWriter(path, attempt=1, rank=3)
    writer.write("checkpoint", step=4, bytes=100, ratio=float("nan"))
    writer.write("rollback", step=5)
    with path.open("ab") as file:
        file.write(b'{"kind": "half')
    events, position, skipped = read_events(path)
    assert [(event["kind"], event["step"], event["rank"]) for event in events] == [
        ("checkpoint", 4, 3),
        ("rollback", 5, 3),
    ]
    assert events[0]["ratio"] == "nan"
    assert skipped == 0
    with path.open("ab") as file:
        file.write(b'"}\n')
    events, end, _ = read_events(path, position)
    assert [event["kind"] for event in events] == ["half"]
    assert end == path.stat().st_size


def test_lines_that_are_no_events_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "a"}\nnot json\n[1]\n{"kind": 3}\n' + "[" * 100_000 + "\n")
    events, _, skipped = read_events(path)
    assert [event["kind"] for event in events] == ["a"]
    assert skipped == 4


def test_an_event_that_cannot_be_written_is_counted(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events.jsonl", attempt=0, rank=0)
    before = error_counts["events"]
    writer.write("huge", text="x" * (2 << 20))
    writer.close()
    writer.write("after the end")
    assert error_counts["events"] == before + 2
    assert (tmp_path / "events.jsonl").read_text() == ""


def test_an_event_is_one_line_of_json(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events.jsonl", attempt=0, rank=-1)
    writer.write("odd", text="two\nlines", path=Path("x"), nested={1: [float("inf")]})
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(line)["nested"] == {"1": ["inf"]}


def test_names_go_on_where_a_former_writer_stopped(tmp_path: Path) -> None:
    path = tmp_path / "names.jsonl"
    first = NameWriter(path)
    number = first("all_reduce")
    first.close()
    second = NameWriter(path)
    assert second("all_reduce") == number
    assert second("all_gather") == number + 1
    second.close()
    assert read_names(path)[0][number + 1] == "all_gather"
