"""Reading tapes, names and events that anybody may have written or damaged."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from probes.tape.events import read_events
from probes.tape.format.names import read_names
from probes.tape.format.reader import MAX_SEGMENT_BYTES, TapeError, TooNewError, read_header, read_segment
from probes.tape.format.schema import TABLES
from probes.tape.format.writer import COMPLETE, EMPTY, HEADER_BYTES, HEADER_PREFIX, JSON_OFFSET, MAGIC, OPEN, TapeWriter

FIXTURES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@pytest.fixture
def tape(tmp_path: Path) -> TapeWriter:
    return TapeWriter(tmp_path, TABLES["spans"], rank=1, attempt=0)


def row(tape: TapeWriter, step: int) -> list[float]:
    values = tape.unset_row()
    values[0] = step
    return values


def path_of(tape: TapeWriter, number: int = 0) -> Path:
    return tape._directory / f"spans.{number:05d}.tape"


def header_text(blob: bytes) -> dict[str, Any]:
    length = HEADER_PREFIX.unpack_from(blob)[2]
    text: dict[str, Any] = json.loads(blob[JSON_OFFSET : JSON_OFFSET + length])
    return text


def with_header(blob: bytes, text: object, version: int = 1) -> bytes:
    body = json.dumps(text).encode()
    head = HEADER_PREFIX.pack(MAGIC, version, len(body), 0, 0) + body
    return head.ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES] + blob[HEADER_BYTES:]


def survives(path: Path) -> None:
    """A damaged tape is an error of ours, or gives records that fit into the file."""
    try:
        segment = read_segment(path)
    except TapeError as error:
        message = str(error)
    else:
        assert len(segment.records) == len(segment.indices) <= segment.end <= segment.header.capacity
        assert len(segment.records) * segment.header.record_bytes <= path.stat().st_size
        return
    assert str(path) in message
    assert "\n" not in message


@FIXTURES
@given(blob=st.binary(max_size=6000))
def test_any_bytes(tmp_path: Path, blob: bytes) -> None:
    path = tmp_path / "spans.00000.tape"
    path.write_bytes(blob)
    survives(path)


@FIXTURES
@given(blob=st.binary(max_size=2000))
def test_any_bytes_after_the_magic(tmp_path: Path, blob: bytes) -> None:
    path = tmp_path / "spans.00000.tape"
    path.write_bytes(MAGIC + (1).to_bytes(4, "little") + blob)
    survives(path)


@FIXTURES
@given(data=st.data())
def test_any_value_in_any_header_field_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    tape = _tape_in(tmp_path)
    blob = path_of(tape).read_bytes()
    text = header_text(blob)
    for key in data.draw(st.lists(st.sampled_from(sorted(text)), min_size=1, max_size=3)):
        text[key] = data.draw(JSON_VALUES)
    path = tmp_path / "changed.tape"
    path.write_bytes(with_header(blob, text))
    survives(path)


@FIXTURES
@given(text=JSON_VALUES)
def test_any_json_header_is_read_or_refused(tmp_path: Path, text: object) -> None:
    path = tmp_path / "spans.00000.tape"
    path.write_bytes(with_header(bytes(HEADER_BYTES + 4096), text))
    survives(path)


@FIXTURES
@given(
    fields=st.lists(st.tuples(st.sampled_from(["step", "kind", "state", "odd"]), st.text(max_size=4), st.integers()))
)
def test_any_layout(tmp_path: Path, fields: list[tuple[str, str, int]]) -> None:
    blob = path_of(_tape_in(tmp_path)).read_bytes()
    path = tmp_path / "changed.tape"
    path.write_bytes(with_header(blob, header_text(blob) | {"fields": fields}))
    survives(path)


@FIXTURES
@given(at=st.integers(0, 6000), value=st.integers(0, 255), cut=st.integers(0, 1 << 16))
def test_a_flipped_byte_and_a_cut(tmp_path: Path, at: int, value: int, cut: int) -> None:
    blob = bytearray(path_of(_tape_in(tmp_path)).read_bytes())
    blob[at] = value
    path = tmp_path / "changed.tape"
    path.write_bytes(bytes(blob[:cut]) if cut else bytes(blob))
    survives(path)


def _tape_in(folder: Path) -> TapeWriter:
    for old in folder.glob("*.tape"):
        old.unlink()
    tape = TapeWriter(folder, TABLES["spans"], rank=1, attempt=0)
    for step in range(20):
        tape.append(COMPLETE if step % 3 else OPEN, *row(tape, step))
    return tape


def test_a_header_that_promises_much_costs_no_memory(tape: TapeWriter) -> None:
    tape.append(COMPLETE, *row(tape, 1))
    blob = path_of(tape).read_bytes()
    huge = header_text(blob) | {"capacity": MAX_SEGMENT_BYTES // 48}
    path_of(tape).write_bytes(with_header(blob, huge)[: HEADER_BYTES + 480])
    segment = read_segment(path_of(tape))
    assert segment.truncated
    assert segment.records["step"].tolist() == [1]


def test_a_newer_tape_says_what_to_do(tape: TapeWriter) -> None:
    tape.append(COMPLETE, *row(tape, 1))
    blob = path_of(tape).read_bytes()
    path_of(tape).write_bytes(with_header(blob, header_text(blob), version=2))
    with pytest.raises(TooNewError, match=r"written with schema 2.*update rankscope"):
        read_header(path_of(tape))


def test_a_column_of_another_version_is_left_out(tape: TapeWriter) -> None:
    tape.append(COMPLETE, *row(tape, 7))
    blob = path_of(tape).read_bytes()
    text = header_text(blob)
    text["fields"] = [["later", "i64", 0], *[field for field in text["fields"] if field[0] != "wait_ns"]]
    path_of(tape).write_bytes(with_header(blob, text))
    segment = read_segment(path_of(tape))
    assert "wait_ns" not in (segment.records.dtype.names or ())
    assert segment.records["step"].tolist() == [7]


def test_states(tape: TapeWriter) -> None:
    for step, state in enumerate((COMPLETE, OPEN, EMPTY, 77, COMPLETE)):
        tape.append(state, *row(tape, step))
    segment = read_segment(path_of(tape))
    assert segment.records["step"].tolist() == [0, 1, 4]
    assert segment.indices.tolist() == [0, 1, 4]
    assert segment.pending.tolist() == [1, 2, 3]
    assert segment.end == 5
    assert segment.damaged == 1
    assert not segment.truncated


@pytest.mark.parametrize("window", [None, 1, 100, 1 << 16])
def test_reading_on_from_a_place_with_pending_ones(tape: TapeWriter, window: int | None) -> None:
    for step in range(300):
        tape.append(OPEN if step < 200 else COMPLETE, *row(tape, step))
    first = read_segment(path_of(tape))
    assert (first.end, len(first.pending)) == (300, 200)
    for step in range(0, 200, 2):
        tape.complete(step)
    tape.append(COMPLETE, *row(tape, 300))
    also = np.concatenate([first.pending, first.pending, np.array([-5, 10**9])])
    then = read_segment(path_of(tape), first.end, also, header=first.header, window_bytes=window)
    assert then.end == 301
    assert then.indices.tolist() == [*range(200), 300]
    assert then.records["step"].tolist() == then.indices.tolist()
    assert then.pending.tolist() == list(range(1, 200, 2))
    few = read_segment(path_of(tape), 301, then.pending[:3], header=first.header, window_bytes=window)
    assert (few.end, few.indices.tolist()) == (301, [1, 3, 5])


def test_a_concurrent_reader_never_sees_half_a_record(tmp_path: Path) -> None:
    """Each record repeats its number in several columns; what is COMPLETE must agree with itself."""
    tape = TapeWriter(tmp_path, TABLES["spans"], rank=0, attempt=0)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            slot = tape.append(OPEN, number, number % 1000, 0, 1, number, number, 0)
            tape.rewrite(slot, COMPLETE, number, number % 1000, 0, 1, number, number, number)
            number += 1
            if number % 2000 == 0:
                time.sleep(0)  # let the reader have the interpreter

    thread = threading.Thread(target=write)
    thread.start()
    seen = 0
    try:
        start = time.monotonic()
        while seen <= 20_000 and time.monotonic() - start < 60.0:
            for path in sorted(tmp_path.glob("*.tape"))[-2:]:
                try:
                    records = read_segment(path).records
                except TapeError:
                    continue  # just being made
                done = records[records["state"] == COMPLETE]
                for column in ("start_ns", "end_ns", "wait_ns"):
                    assert (done[column] == done["step"]).all()
                seen += len(done)
    finally:
        stop.set()
        thread.join()
    assert seen > 1000


@FIXTURES
@given(blob=st.binary(max_size=400), lines=st.lists(JSON_VALUES, max_size=5))
def test_names_that_anybody_wrote(tmp_path: Path, blob: bytes, lines: list[object]) -> None:
    path = tmp_path / "names.jsonl"
    path.write_bytes(blob + b"\n" + b"\n".join(json.dumps(line).encode() for line in lines))
    names, skipped = read_names(path)
    assert all(isinstance(number, int) and isinstance(text, str) for number, text in names.items())
    assert skipped >= 0


@pytest.mark.parametrize("number", ["1e999", "NaN", "[]", "null", '"x"', "1e400"])
def test_a_name_with_an_invalid_number_is_skipped(tmp_path: Path, number: str) -> None:
    path = tmp_path / "names.jsonl"
    path.write_text(f'{{"id": {number}, "name": "a"}}\n{{"id": 2, "name": "b"}}\n')
    assert read_names(path) == ({2: "b"}, 1)


@FIXTURES
@given(entries=st.dictionaries(st.integers(1, 1 << 20), st.text(max_size=20)), torn=st.integers(0, 30))
def test_names_come_back_but_for_the_torn_last(tmp_path: Path, entries: dict[int, str], torn: int) -> None:
    path = tmp_path / "names.jsonl"
    blob = b"".join(json.dumps({"id": number, "name": text}).encode() + b"\n" for number, text in entries.items())
    path.write_bytes(blob + b'{"id": 7777777, "name": "tornxxxxxxxxx'[:torn])
    names, skipped = read_names(path)
    assert names == entries
    assert skipped == (1 if torn else 0)


@FIXTURES
@given(lines=st.lists(JSON_VALUES | st.binary(max_size=30), max_size=8), chunks=st.integers(1, 4))
def test_events_that_anybody_wrote(tmp_path: Path, lines: list[object], chunks: int) -> None:
    """Whatever the lines are: each is read or counted, once, however the file grows."""
    path = tmp_path / "events.jsonl"
    path.unlink(missing_ok=True)
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    blob = b"".join(line.replace(b"\n", b" ") + b"\n" for line in encoded)
    blob += b'{"kind": "last"}\n'
    at, events, skipped = 0, [], 0
    for i in range(1, chunks + 1):
        path.write_bytes(blob[: len(blob) * i // chunks])
        found, at, bad = read_events(path, at)
        events += found
        skipped += bad
    assert at == len(blob)
    assert events[-1] == {"kind": "last"}
    assert len(events) + skipped == sum(1 for line in blob.split(b"\n") if line)
