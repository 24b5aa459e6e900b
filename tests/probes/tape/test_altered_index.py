"""An index of checksums with an altered byte: it is named, and no reader fails of it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from probes.tape.rundir import RunDir
from probes.tape.segment_index import SegmentIndex, check_index, index_signature, retired_segments
from store import Store, rebuild
from tests.factories import make_run
from watch.records.tape_sync import TapeSync

ALTERATIONS = 200


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path, ranks=1, steps=10, hang={0: 9})
    syncing = TapeSync(run, is_running=lambda: True)
    syncing.retire({"tapes/attempt-0/rank-00000/gradients.00000.tape": 3})
    syncing.sync(last=True)
    return run


def test_an_altered_byte_is_named(run: RunDir) -> None:
    path, dice = run.node_dir(0) / "segments.jsonl", random.Random(7)
    whole = path.read_bytes()
    assert list(check_index(run.path, path)) == []
    for _ in range(ALTERATIONS):
        place = dice.randrange(len(whole))
        # Half of them what may stand in a number: others rarely leave a line that can be parsed.
        byte = dice.choice(b"0123456789-.eE") if dice.random() < 0.5 else dice.randrange(256)
        path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
        if path.read_bytes() == whole:
            continue
        assert list(check_index(run.path, path)), (place, byte)
        retired_segments(path)
        index_signature(run.path, path)
        SegmentIndex(path).close()


@pytest.mark.parametrize(
    ("field", "altered"),
    [
        (b'"crc":', b'"crc":3e4159265'),
        (b'"extent":', b'"extent":1e999'),
        (b'"extent":', b'"extent":-'),
        (b'"open":[', b'"open":[1e999,'),
        (b'"open":[', b'"open":[-99999,'),
        (b'.tape"', b'.tape\\u0000"'),
        (b'.tape"', b'.tape\\ud800"'),
    ],
)
def test_a_line_that_is_json_and_nonsense_is_damaged(run: RunDir, field: bytes, altered: bytes) -> None:
    path = run.node_dir(0) / "segments.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    (number,) = [number for number, line in enumerate(lines) if b"/steps.00000.tape" in line and b'"open":[8]' in line]
    lines[number] = lines[number].replace(field, altered)
    path.write_bytes(b"".join(lines))
    name = path.relative_to(run.path).as_posix()
    assert dict(check_index(run.path, path)) == {name: f"line {number + 1} is damaged"}
    rebuild(run)
    with Store.open(run) as store:
        assert (f"{name}#checksum", f"line {number + 1} is damaged") in store.rows("SELECT * FROM ingest_problems")


@pytest.mark.parametrize(
    ("before", "after"), [(b'"extent":37', b'"extent":31'), (b"gradients.00000", b"gradients.00001")]
)
def test_an_altered_last_line_of_a_retired_segment_is_named(run: RunDir, before: bytes, after: bytes) -> None:
    """No line follows that would have its digest, and no file is left that it could be compared with."""
    path, segment = run.node_dir(0) / "segments.jsonl", "tapes/attempt-0/rank-00000/gradients.00000.tape"
    TapeSync(run).retire({segment: 37})
    whole = path.read_bytes()
    assert list(check_index(run.path, path)) == []
    assert whole.count(before, whole.rindex(b"{")) == 1
    at = whole.rindex(before)
    path.write_bytes(whole[:at] + after + whole[at + len(before) :])
    number = len(whole.splitlines())
    problem = f"line {number} was altered: its checksum differs"
    assert list(check_index(run.path, path)) == [(path.relative_to(run.path).as_posix(), problem)]
    TapeSync(run).retire({segment: 37})
    assert [found for _, found in check_index(run.path, path)] == [problem], "what follows does not cover it up"
