"""Damage to the files of one rank: each case spoils one rank's folder of a run that is otherwise good.

`CASES` is {name: (spoil, words)}: `spoil(folder)` changes the files of a rank, and the report must hold `words` in
what it says of that rank's files; no words: the damage is one that costs only the values it is in.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from probes.tape.format.writer import HEADER_BYTES, HEADER_PREFIX, JSON_OFFSET

Spoil = Callable[[Path], object]
SECRET_TEXT = "what-only-the-reader-may-see"
HUGE = 10**18
TERABYTE = 1 << 40


def tape(folder: Path) -> Path:
    return folder / "steps.00000.tape"


def _write(name: str, blob: bytes) -> Spoil:
    return lambda folder: (folder / name).write_bytes(blob)


def _append(name: str, blob: bytes) -> Spoil:
    def spoil(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.write(blob)

    return spoil


def _event(**fields: Any) -> Spoil:
    line = {"wall_ns": 1, "attempt": 0, "rank": 0, "kind": "note", "step": 1} | fields
    return _append("events.jsonl", json.dumps(line).encode() + b"\n")


def _line(blob: bytes) -> Spoil:
    return _append("events.jsonl", blob + b"\n")


def _patch(at: int, blob: bytes, name: str = "steps.00000.tape") -> Spoil:
    def spoil(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.seek(at)
            file.write(blob)

    return spoil


def _cut(size: int, name: str = "steps.00000.tape") -> Spoil:
    return lambda folder: os.truncate(folder / name, size)


def _header(**fields: Any) -> Spoil:
    """Fields of the header's JSON replaced."""

    def spoil(folder: Path) -> None:
        blob = bytearray(tape(folder).read_bytes())
        magic, version, size, sealed, dropped = HEADER_PREFIX.unpack_from(blob)
        text = json.loads(blob[JSON_OFFSET : JSON_OFFSET + size]) | fields
        fresh = json.dumps(text).encode()
        assert JSON_OFFSET + len(fresh) <= HEADER_BYTES
        HEADER_PREFIX.pack_into(blob, 0, magic, version, len(fresh), sealed, dropped)
        blob[JSON_OFFSET:HEADER_BYTES] = fresh.ljust(HEADER_BYTES - JSON_OFFSET, b"\0")
        tape(folder).write_bytes(blob)

    return spoil


def _records(blob: bytes) -> Spoil:
    """The first records overwritten, whatever they are."""
    return _patch(HEADER_BYTES, blob * (2048 // len(blob)))


def _instead(name: str, make: Callable[[Path], object]) -> Spoil:
    """Something else where a file should be."""

    def spoil(folder: Path) -> None:
        path = folder / name
        path.unlink()
        make(path)

    return spoil


def _linked(target: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


def _socket(path: Path) -> None:
    listening = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket may have 107 bytes
    try:
        listening.bind(path.name)
    finally:
        os.chdir(here)
        listening.close()


def _outside(folder: Path) -> Path:
    """A file outside of the run that a link may lead to: text that must never turn up."""
    path = folder.parents[3] / "outside"
    path.mkdir(exist_ok=True)
    secret = {"id": 1, "name": SECRET_TEXT, "kind": SECRET_TEXT, "wall_ns": 1}
    (path / "secret.jsonl").write_text(json.dumps(secret) + "\n")
    return path / "secret.jsonl"


def _link_out(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        target = _outside(folder)
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return spoil


def _link_tape_out(folder: Path) -> None:
    """A good tape, but outside of the run."""
    target = _outside(folder).with_name("steps.00000.tape")
    shutil.move(tape(folder), target)
    tape(folder).symlink_to(target)


def _link_folder_out(folder: Path) -> None:
    moved = _outside(folder).with_name(folder.name)
    shutil.move(folder, moved)
    folder.symlink_to(moved)


def _file_for_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("x")


def _many_segments(folder: Path) -> None:
    for number in range(1, 300):
        (folder / f"steps.{number:05d}.tape").write_bytes(b"")


LINK, ODD, NO_TAPE = "is a link", "is not a regular file", "not a tape"
BAD_HEADER, SHORTER, STATE = "damaged header", "shorter than its header", "damaged state"
LINE = "1 line is not an event"
NOTHING = ""
_I64 = struct.Struct("<q").pack
DEEP = b"[" * 200_000
MEGABYTE = 1 << 20
CASES: dict[str, tuple[Spoil, str]] = {
    # Tapes.
    "an empty tape": (_cut(0), NOTHING),
    "a tape of three bytes": (_cut(3), "too short"),
    "a tape cut in its header": (_cut(40), "header"),
    "a tape cut behind its header": (_cut(HEADER_BYTES), SHORTER),
    "a tape cut in a record": (_cut(HEADER_BYTES + 77), SHORTER),
    "no magic number": (_patch(0, b"\0"), NO_TAPE),
    "a PNG": (_patch(0, b"\x89PNG\r\n\x1a\n"), NO_TAPE),
    "a pickle instead of a tape": (_write("steps.00000.tape", b"\x80\x04cos\nsystem\n(X\x02\0\0\0idtR."), "tape"),
    "a newer tape": (_patch(8, b"\xff\xff"), "update rankscope"),
    "a header without JSON": (_patch(JSON_OFFSET, b"\0" * 64), BAD_HEADER),
    "a header of deep JSON": (_patch(JSON_OFFSET, b"[" * (HEADER_BYTES - JSON_OFFSET)), BAD_HEADER),
    "a header of invalid UTF-8": (_patch(JSON_OFFSET + 1, b"\xff\xfe\xfd"), BAD_HEADER),
    "a header that claims 4 GB of JSON": (_patch(12, b"\xff\xff\xff\xff"), BAD_HEADER),
    "a table that is none": (_header(table="passwords"), BAD_HEADER),
    "a table that is a path": (_header(table="../../etc/passwd"), BAD_HEADER),
    "records of no bytes": (_header(record_bytes=0), "impossible sizes"),
    "records of 10^18 bytes": (_header(record_bytes=HUGE), "impossible sizes"),
    "10^18 records": (_header(capacity=HUGE), "impossible sizes"),
    "minus one record": (_header(capacity=-1), "impossible sizes"),
    "a number of records that is infinite": (_header(capacity=float("inf")), BAD_HEADER),
    "a number of records that is text": (_header(capacity="many"), BAD_HEADER),
    "fields beyond the record": (_header(fields=[["step", "i64", 4000]]), BAD_HEADER),
    "fields before the record": (_header(fields=[["step", "i64", -8]]), BAD_HEADER),
    "fields that overlap": (_header(fields=[["step", "i64", 0], ["start_ns", "i64", 0], ["loss", "f64", 0]]), NOTHING),
    "fields twice": (_header(fields=[["step", "i64", 0], ["step", "i64", 8]]), BAD_HEADER),
    "fields that are no list": (_header(fields=7), BAD_HEADER),
    "a field of objects": (_header(fields=[["step", "O", 0]]), NOTHING),
    "a state outside the record": (_header(state_offset=1 << 40), BAD_HEADER),
    "another rank's tape": (_header(rank=123456), "its name differs"),
    "rank 10^18": (_header(rank=HUGE), BAD_HEADER),
    "rank minus five": (_header(rank=-5), BAD_HEADER),
    "attempt 10^18": (_header(attempt=HUGE), BAD_HEADER),
    "a clock of 10^18 years": (_header(mono_ns=10**26), BAD_HEADER),
    "a clock that is NaN": (_header(wall_ns=float("nan")), BAD_HEADER),
    "records of 0xff": (_records(b"\xff"), STATE),
    "records of 0x7f": (_records(b"\x7f"), STATE),
    "times of 2^62": (_records(_I64(2**62) + b"\2"), NOTHING),
    "steps of -2^63": (_records(_I64(-(2**63)) + b"\2"), NOTHING),
    "a flipped bit in a state": (_patch(HEADER_BYTES + 5, b"\x40"), NOTHING),
    "a tape of a terabyte": (_cut(TERABYTE), NOTHING),
    "a tape that is a folder": (_instead("steps.00000.tape", Path.mkdir), ODD),
    "a tape that is a FIFO": (_instead("steps.00000.tape", os.mkfifo), ODD),
    "a tape that is a socket": (_instead("steps.00000.tape", _socket), ODD),
    "a tape that is /dev/zero": (_instead("steps.00000.tape", _linked("/dev/zero")), LINK),
    "a tape that leads out of the run": (_link_tape_out, LINK),
    "a tape that leads to itself": (_instead("steps.00000.tape", _linked("steps.00000.tape")), LINK),
    "300 empty segments": (_many_segments, NOTHING),
    # Names.
    "names that are missing": (lambda folder: (folder / "names.jsonl").unlink(), NOTHING),
    "names of invalid UTF-8": (_append("names.jsonl", b'{"id": 1, "name": "\xff\xfe"}\n'), NOTHING),
    "names of deep JSON": (_append("names.jsonl", DEEP + b"\n"), NOTHING),
    "a name's number of 10^18": (_append("names.jsonl", b'{"id": 1000000000000000000, "name": "x"}\n'), NOTHING),
    "a name's number below zero": (_append("names.jsonl", b'{"id": -3, "name": "x"}\n'), NOTHING),
    "a name's number that is infinite": (_append("names.jsonl", b'{"id": Infinity, "name": "x"}\n'), NOTHING),
    "a name twice": (_append("names.jsonl", b'{"id": 2, "id": 3, "name": "\x1b[2J", "name": "<script>"}\n'), NOTHING),
    "a name of 4 MB": (_append("names.jsonl", b'{"id": 2, "name": "' + b"x" * (4 * MEGABYTE) + b'"}\n'), NOTHING),
    "a name of ANSI and HTML": (
        _append("names.jsonl", json.dumps({"id": 2, "name": "\x1b]0;owned\x07<img src=x onerror=alert(1)>"}).encode()),
        NOTHING,
    ),
    "names of a terabyte": (_cut(TERABYTE, "names.jsonl"), NOTHING),
    "names that are a FIFO": (_instead("names.jsonl", os.mkfifo), ODD),
    "names that are a folder": (_instead("names.jsonl", Path.mkdir), ODD),
    "names that lead out of the run": (_link_out("names.jsonl"), LINK),
    "names that are /dev/zero": (_instead("names.jsonl", _linked("/dev/zero")), LINK),
    # Events.
    "a torn last event": (_append("events.jsonl", b'{"kind": "exc'), "torn"),
    "an event of deep JSON": (_line(DEEP), LINE),
    "an event of invalid UTF-8": (_line(b'{"kind": "note", "text": "\xff\xfe"}'), LINE),
    "an event of NUL bytes": (_line(b"\0" * 1000), LINE),
    "an event that is a list": (_line(b"[1, 2]"), LINE),
    "an event whose kind is a list": (_line(b'{"kind": [1]}'), LINE),
    "an event of keys twice": (_line(b'{"kind": "note", "kind": "rank_closed", "step": 1, "step": [2]}'), NOTHING),
    "an event of 2 MB": (_event(text="x" * (2 * MEGABYTE)), NOTHING),
    "an event of NaN": (_line(b'{"kind": "note", "loss": NaN, "wall_ns": Infinity, "step": -Infinity}'), NOTHING),
    "an event of 10^400": (_line(b'{"kind": "note", "wall_ns": 1' + b"0" * 400 + b"}"), NOTHING),
    "an event of a number of 10,000 digits": (_line(b'{"kind": "note", "wall_ns": ' + b"9" * 10_000 + b"}"), LINE),
    "an event of wrong types": (_event(wall_ns="now", step=[], attempt={}, rank="me"), NOTHING),
    "an event of lone surrogates": (_line(b'{"kind": "note", "text": "\\ud800"}'), NOTHING),
    "an event of ANSI and HTML": (_event(kind="\x1b[31m<script>alert(1)</script>"), NOTHING),
    "a rank of 10^18 ranks": (_event(kind="rank", world_size=HUGE, rank=HUGE, node_rank=0), NOTHING),
    "a rank of wrong types": (_event(kind="rank", world_size="all", host=[1], pid={}, device=None, tp=-7), NOTHING),
    "a group of 10^18 members": (_event(kind="process_group", process_group="x", members=HUGE), NOTHING),
    "a group of odd members": (
        _event(kind="process_group", process_group="x", members=[-1, HUGE, None, "a", 1.5, [0]]), NOTHING,
    ),
    "a checkpoint of odd values": (_event(kind="checkpoint", step=-1, bytes=-HUGE, duration_ns="x"), NOTHING),
    "a rank that closed with odd counts": (
        _event(kind="rank_closed", probe_errors=[1], dropped_records={"x": "many"}), NOTHING,
    ),
    "a finding of odd values": (_event(kind="finding", ranks="all", evidence=[1], summary={"a": 1}), NOTHING),
    "a rollback to step 10^30": (_event(kind="rollback", from_step=10**30, to_step=-(10**30)), NOTHING),
    "events of a terabyte": (_cut(TERABYTE, "events.jsonl"), NOTHING),
    "events that are a FIFO": (_instead("events.jsonl", os.mkfifo), ODD),
    "events that are a folder": (_instead("events.jsonl", Path.mkdir), ODD),
    "events that lead out of the run": (_link_out("events.jsonl"), LINK),
    "events that are missing": (lambda folder: (folder / "events.jsonl").unlink(), NOTHING),
    # The folder.
    "a folder that leads out of the run": (_link_folder_out, LINK),
    "a file where the folder should be": (_file_for_folder, "is not a folder"),
    "files of strange names": (
        lambda folder: (folder / "steps.\x1b[31m\n<b>.tape").write_bytes(b"x"), NOTHING,
    ),
}  # fmt: skip
