"""A log in another encoding, in colours or in JSON lines is read as the text that it holds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from store.readers.logs.plain_text import plain_chunks
from store.readers.logs.scan import read_log

TEXT = """\
Traceback (most recent call last):
  File "/app/fit.py", line 7, in <module>
    run()
  File "/app/corpus.py", line 31, in row
    return self.table[key]
KeyError: 'label'
"""


def _events(path: Path) -> list[tuple[str, str]]:
    return [(event.kind, str(event.fields.get("type"))) for event in read_log(path).events]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"])
def test_other_encodings(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "job.log"
    path.write_bytes(TEXT.encode(encoding))
    assert ("exception", "KeyError") in _events(path)


def test_a_packed_log_with_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "job.log.gz"
    path.write_bytes(gzip.compress(TEXT.replace("\n", "\r\n").encode()))
    assert ("exception", "KeyError") in _events(path)


def test_colours_within_a_word_that_a_rule_looks_for(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text(TEXT.replace("most recent", "\x1b[01;31m\x1b[Kmost\x1b[m\x1b[K recent"), encoding="utf-8")
    assert ("exception", "KeyError") in _events(path)


@pytest.mark.parametrize("size", range(1, 12))
def test_a_colour_that_two_chunks_share(size: int) -> None:
    data = b"a \x1b[1;31mred\x1b[0m word\n" * 3
    chunks = (data[i : i + size] for i in range(0, len(data), size))
    assert b"".join(plain_chunks(chunks)) == b"a red word\n" * 3


@pytest.mark.parametrize(("key", "end"), [("log", "\n"), ("message", ""), ("MESSAGE", "")])
def test_json_lines_with_a_text_each(tmp_path: Path, key: str, end: str) -> None:
    path = tmp_path / "job.log"
    path.write_text(
        "".join(json.dumps({key: line + end, "time": "2026-03-01T10:00:00Z"}) + "\n" for line in TEXT.splitlines()),
        encoding="utf-8",
    )
    events = read_log(path).events
    assert [(event.kind, event.fields["type"]) for event in events if event.fields.get("traceback")] == [
        ("exception", "KeyError")
    ]
    assert events[0].wall_ns is not None


def test_a_line_that_docker_split_is_one_again() -> None:
    parts = [{"log": "half of "}, {"log": "a line\n"}, {"log": "another\n"}]
    data = "".join(json.dumps(part) + "\n" for part in parts).encode()
    assert b"".join(plain_chunks(iter([data]))) == b"half of a line\nanother\n"


def test_json_lines_of_steps_are_left_as_they_are() -> None:
    data = b'{"epoch": 1, "loss": "3.1", "num_updates": "100"}\n' * 4
    assert b"".join(plain_chunks(iter([data]))) == data


GLUED = """\
[1,mpirank:0,algo-1]<stdout>:step 7 loss 2.1[1,mpirank:1,algo-1]<stdout>:step 7 loss 2.2
[1,mpirank:3,algo-1]<stderr>:Traceback (most recent call last):[1,mpirank:0,algo-1]<stdout>:step 8 loss 2.0
[1,mpirank:3,algo-1]<stderr>:  File "/opt/fit.py", line 88, in <module>[1,mpirank:1,algo-1]<stdout>:step 8 loss 2.1
[1,mpirank:3,algo-1]<stderr>:    main()
[1,mpirank:3,algo-1]<stderr>:ValueError: bad record 17[1,mpirank:0,algo-1]<stdout>:step 9 loss 1.9
"""


def test_records_of_mpirun_glued_in_one_line_are_lines_of_their_ranks(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text(GLUED)
    log = read_log(path)
    error = next(event for event in log.events if event.kind == "exception")
    assert (error.rank, error.line, error.fields["message"]) == (3, 2, "bad record 17")
    found = sorted((step.prefix.rank, step.step_line.step) for step in log.steps)
    assert found == [
        (0, 7),
        (0, 8),
        (0, 9),
        (1, 7),
        (1, 8),
    ]
    assert log.num_lines == 5
    assert log.printed == {0, 1, 3}


@pytest.mark.parametrize("before", ["", "INFO:trainer: "])
def test_a_trainer_s_values_stay_where_a_text_stands_beside_them(before: str) -> None:
    lines = "".join(f'{before}{{"msg": "train", "step": {i}, "loss": {2 - i / 9:.2f}}}\n' for i in range(5)).encode()
    assert b"".join(plain_chunks(iter([lines]))) == lines
