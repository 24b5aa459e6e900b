"""Tapes: what is written is read, whoever dies and whatever is full in between."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.tape.format.reader import read_segment, segment_paths
from probes.tape.format.schema import TABLES, UNSET, Column, Table
from probes.tape.format.writer import COMPLETE, HEADER_BYTES, OPEN, TapeWriter

_ROW = (7, 11, 1.5, 2.5, 0)  # step, parameter, norm, max_abs, nonfinite_count

SMALL = Table("gradients", "", "tape", TABLES["gradients"].columns, segment_bytes=HEADER_BYTES + 40 * 10)


def _writer(folder: Path, table: Table = TABLES["gradients"]) -> TapeWriter:
    return TapeWriter(folder, table, rank=2, attempt=1)


def _steps(folder: Path) -> list[int]:
    return [int(step) for path in segment_paths(folder, "gradients") for step in read_segment(path).records["step"]]


def test_round_trip(tmp_path: Path) -> None:
    tape = _writer(tmp_path)
    tape.append(COMPLETE, *_ROW)
    tape.append(OPEN, 8, 0, UNSET["f64"], float("inf"), UNSET["i64"])
    (path,) = segment_paths(tmp_path, "gradients")
    segment = read_segment(path)
    first, second = segment.records
    assert [first[c.name].item() for c in TABLES["gradients"].columns] == list(_ROW)
    assert (first["state"], second["state"]) == (COMPLETE, OPEN)
    assert second["norm"].tobytes() == np.float64(UNSET["f64"]).tobytes()  # not recorded, which is not NaN
    assert second["max_abs"] == float("inf")
    assert (segment.header.rank, segment.header.attempt) == (2, 1)
    assert list(segment.pending) == [1]


@given(
    st.lists(
        st.tuples(
            st.integers(-(2**63), 2**63 - 1),
            st.integers(0, 2**32 - 1),
            st.floats(allow_nan=False),
            st.floats(allow_nan=False),
            st.integers(-(2**63), 2**63 - 1),
        ),
        max_size=30,
    )
)
def test_any_values_come_back(tmp_path_factory: pytest.TempPathFactory, values: list[tuple[float, ...]]) -> None:
    folder = tmp_path_factory.mktemp("tape")
    tape = _writer(folder, SMALL)
    for row in values:
        tape.append(COMPLETE, *row)
    found = [
        tuple(record[c.name].item() for c in SMALL.columns)
        for path in segment_paths(folder, "gradients")
        for record in read_segment(path).records
    ]
    assert found == values


def test_rewrite_set_and_complete_in_place(tmp_path: Path) -> None:
    tape = _writer(tmp_path)
    slot = tape.append(OPEN, *_ROW)
    tape.set(slot, "max_abs", 9.0)
    tape.complete(slot)
    other = tape.append(OPEN, *_ROW)
    tape.rewrite(other, COMPLETE, 70, 1, 2.0, 3.0, 4)
    first, second = read_segment(segment_paths(tmp_path, "gradients")[0]).records
    assert (first["max_abs"], first["step"], first["state"]) == (9.0, 7, COMPLETE)
    assert (second["step"], second["nonfinite_count"], second["state"]) == (70, 4, COMPLETE)


def test_a_finisher_stores_neighbours_and_completes(tmp_path: Path) -> None:
    tape = TapeWriter(tmp_path, TABLES["collectives"], rank=0, attempt=0)
    slot = tape.append(OPEN, *tape.unset_row())
    tape.finisher("end_ns", "wait_ns")(slot, 12, 34)
    (record,) = read_segment(segment_paths(tmp_path, "collectives")[0]).records
    assert (record["end_ns"], record["wait_ns"], record["state"]) == (12, 34, COMPLETE)
    assert record["issue_ns"] == UNSET["i64"]
    with pytest.raises(ValueError, match="not adjacent"):
        tape.finisher("end_ns", "peer")


def test_an_opener_stores_what_an_append_does(tmp_path: Path) -> None:
    tape = TapeWriter(tmp_path, TABLES["collectives"], rank=0, attempt=0)
    row = [*range(1, 14), True, False]
    pack, open_record = tape.opener("step", "seq", "bytes", "issue_ns")
    assert tape.append(OPEN, *row) == 0
    assert open_record(pack(*row[4:]), *row[:4]) == 1
    per_segment = tape._capacity
    for _ in range(per_segment):
        slot = open_record(pack(*row[4:]), *row[:4])
    tape.close()
    assert open_record(pack(*row[4:]), *row[:4]) == -1
    first, second = (read_segment(path).records for path in segment_paths(tmp_path, "collectives"))
    assert first[0] == first[1] == second[0] == second[slot - per_segment]
    assert first[0]["state"] == OPEN
    with pytest.raises(ValueError, match="not the first"):
        tape.opener("seq", "step")


def test_segments_roll_and_are_sealed(tmp_path: Path) -> None:
    tape = _writer(tmp_path, SMALL)
    per_segment = read_capacity(tmp_path, tape)
    slots = [tape.append(OPEN, step, 1, 0.0, 0.0, 0) for step in range(1, 3 * per_segment)]
    assert _steps(tmp_path) == list(range(3 * per_segment))
    paths = segment_paths(tmp_path, "gradients")
    assert [read_segment(path).header.sealed for path in paths] == [True, True, False]
    tape.complete(slots[per_segment])  # in the segment before the current one: still within reach
    tape.complete(slots[0])  # two segments ago: its end stays unknown
    states = [state for path in paths for state in read_segment(path).records["state"]]
    assert states[per_segment + 1] == COMPLETE
    assert states[1] == OPEN
    tape.close()
    assert read_segment(paths[-1]).header.sealed
    assert tape.append(COMPLETE, *_ROW) == -1


def read_capacity(folder: Path, tape: TapeWriter) -> int:
    """Capacity of a segment; writes step 0 to make the first."""
    tape.append(COMPLETE, 0, 1, 0.0, 0.0, 0)
    return read_segment(segment_paths(folder, "gradients")[0]).header.capacity


def test_concurrent_threads_lose_no_record(tmp_path: Path) -> None:
    # A thread may be suspended in the middle for some ten milliseconds, in which the others fill 10 000 records: well
    # within two segments of the size that is used.
    tape = _writer(tmp_path)
    count, threads = 13_000, 4

    def write(thread: int) -> None:
        for i in range(count):
            tape.append(COMPLETE, thread * count + i, 1, 0.0, 0.0, 0)

    workers = [threading.Thread(target=write, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(_steps(tmp_path)) == list(range(count * threads))
    assert len(segment_paths(tmp_path, "gradients")) > 1
    assert tape.dropped == 0


def test_a_full_disk_drops_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tape = _writer(tmp_path, SMALL)
    capacity = read_capacity(tmp_path, tape)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for step in range(1, capacity + 5):
        tape.append(COMPLETE, step, 1, 0.0, 0.0, 0)
    assert tape.dropped == 5
    other = _writer(tmp_path, TABLES["spans"])  # another tape of the rank: one line names the disk
    assert other.append(COMPLETE, *[0] * len(TABLES["spans"].columns)) == -1
    (line,) = caplog.messages
    assert line.endswith(f"{tmp_path}: No space left on device")
    (path,) = segment_paths(tmp_path, "gradients")  # the refused one is not left behind, half made
    assert read_segment(path).header.dropped == 5
    monkeypatch.undo()
    for step in range(2000, 4000):  # it tries again after a while, not at each record
        tape.append(COMPLETE, step, 1, 0.0, 0.0, 0)
    assert _steps(tmp_path)[-1] == 3999
    assert len(_steps(tmp_path)) + tape.dropped == capacity + 5 + 2000


def test_a_concurrent_reader_sees_whole_records(tmp_path: Path) -> None:
    tape = _writer(tmp_path)
    tape.append(COMPLETE, 0, 1, 0.0, 0.0, 0)
    (path,) = segment_paths(tmp_path, "gradients")
    stop = threading.Event()

    def write() -> None:
        step = 1
        while not stop.is_set():
            tape.append(COMPLETE, step, step % 97, float(step), float(step), step)
            step += 1

    writer = threading.Thread(target=write)
    writer.start()
    position, seen, deadline = 0, 0, time.monotonic() + 60
    try:
        while writer.is_alive() and seen < 5_000 and time.monotonic() < deadline:
            segment = read_segment(path, position)
            records = segment.records
            assert (records["norm"] == records["step"]).all()
            assert (records["nonfinite_count"] == records["step"]).all()
            seen += len(records)
            position = segment.end
    finally:
        stop.set()
        writer.join()
    assert seen >= 5_000


_VICTIM = """
import sys
from pathlib import Path
from probes.tape.format.schema import TABLES
from probes.tape.format.writer import COMPLETE, TapeWriter
tape = TapeWriter(Path(sys.argv[1]), TABLES["gradients"], rank=0, attempt=0)
for step in range(10**9):
    tape.append(COMPLETE, step, 1, 0.0, 0.0, step)
    if step % 1000 == 0:
        print(step, flush=True)
"""


def test_sigkill_loses_no_record(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    victim = subprocess.Popen(
        [sys.executable, "-c", _VICTIM, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert victim.stdout is not None
    told = 0
    for line in victim.stdout:
        told = int(line)
        if told >= 5000:
            break
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    victim.stdout.close()
    steps = _steps(tmp_path)
    assert len(steps) > told
    assert steps == list(range(len(steps)))


def test_wide_fields_come_first() -> None:
    columns = (
        Column("flag", "bool", "", ""),
        Column("count", "i64", "", ""),
        Column("name", "name", "", ""),
    )
    table = Table("t", "", "tape", columns)
    from probes.tape.format.writer import record_layout

    layout, order = record_layout(table)
    assert [column.name for column in order] == ["count", "name", "flag"]
    assert layout.size % 8 == 0


def test_a_writer_that_comes_after_another_goes_on_behind_it(tmp_path: Path) -> None:
    for step in (1, 2):
        writer = TapeWriter(tmp_path, TABLES["gradients"], rank=0, attempt=0)
        writer.append(COMPLETE, step, 0, 1.0, 1.0, 0)
        writer.close()
    steps = [int(read_segment(path).records["step"][0]) for path in segment_paths(tmp_path, "gradients")]
    assert steps == [1, 2]
