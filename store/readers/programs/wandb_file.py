"""Read the history from W&B's local file of a run (`run-ID.wandb`, also offline). The file holds wandb's messages in
LevelDB's log format, so the package wandb is needed (`rankscope[trackers]`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from store.readers.programs.rows import Point, ProgramRows, step_rows
from store.readers.programs.wandb_history import history_point
from store.readers.untrusted.external_files import SERIES_BYTES, SourceError, read_whole

NAME = "run of W&B (.wandb)"
_MAGIC = b":W&B"
_BLOCK, _HEADER = 32768, struct.Struct("<IHB")
_WHOLE, _FIRST, _LAST = 1, 2, 4


def recognise(first: bytes) -> bool:
    """Return True for the magic bytes of such a file."""
    return first.startswith(_MAGIC)


def read(path: Path) -> ProgramRows:
    """Read the history up to where the file is damaged; the file of a killed run ends within a record."""
    try:
        from wandb.proto.wandb_internal_pb2 import Record
    except ImportError:
        raise SourceError("needs the package wandb: pip install 'rankscope[trackers]'") from None
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    points: list[Point] = []
    rows = ProgramRows()
    try:
        for data in _records(read_whole(path, SERIES_BYTES)[0]):
            record = Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history" and (point := history_point(_items(record.history))) is not None:
                points.append(point)
            if kind == "exit":
                code = record.exit.exit_code
                how = ("process_terminated", {"exitcode": code}) if code else ("finished", dict[str, int]())
                text = f"the run ended with exit code {code}"
                rows.log_events.append({"kind": how[0], "line": 0, "message": text, "fields": how[1]})
    except DecodeError:
        rows.problem = "is damaged: a record is not a W&B message"
    rows.steps = step_rows(points, rank=0)
    return rows


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of LevelDB's log format, in which long records are split at the ends of blocks."""
    place, whole = 7, b""
    while place + _HEADER.size <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER.size:
            place += left
            continue
        _, length, kind = _HEADER.unpack_from(data, place)
        begin = place + _HEADER.size
        if begin + length > len(data):
            return
        whole = data[begin : begin + length] if kind in (_WHOLE, _FIRST) else whole + data[begin : begin + length]
        place = begin + length
        if kind in (_WHOLE, _LAST):
            yield whole
            whole = b""


def _items(history: Any) -> dict[str, object]:
    found: dict[str, object] = {}
    for item in history.item:
        try:
            found[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
        except ValueError:
            continue
    if "_step" not in found and history.HasField("step"):
        found["_step"] = history.step.num
    return found
