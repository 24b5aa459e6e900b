"""Reads the file that W&B writes offline: LevelDB's log format around W&B's own protobuf messages.

records = wandb_records(folder / "run-demo.wandb")
history(records)[0]["train/loss"]
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from tests.waiting import wait_for

__all__ = ["alerts", "config", "history", "summary", "wandb_file", "wandb_records"]

_BLOCK, _HEADER = 32768, struct.Struct("<IHB")


def wandb_file(folder: Path) -> Path:
    """The only W&B file below a folder."""
    (found,) = folder.rglob("offline-run-*/*.wandb")
    return found


def wandb_records(path: Path) -> list[Any]:
    """All records of a file that is finished: W&B's service writes its last block some time after `finish`."""
    found: list[Any] = wait_for(lambda: _finished(_records(path)), f"last record of {path.name}")
    return found


def _finished(records: list[Any]) -> list[Any]:
    return records if any(record.WhichOneof("record_type") == "exit" for record in records) else []


def _records(path: Path) -> list[Any]:
    """The records so far; those that are split over blocks are joined."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, offset, blob, found = path.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while offset + _HEADER.size <= len(data):
        left = _BLOCK - offset % _BLOCK
        if left < _HEADER.size:
            offset += left
            continue
        _, length, kind = _HEADER.unpack_from(data, offset)
        begin = offset + _HEADER.size
        if begin + length > len(data):
            break  # not written to its end yet
        blob += data[begin : begin + length]
        offset = begin + length
        if kind in (1, 4):  # whole, or the last piece
            record = Record()
            record.ParseFromString(blob)
            found.append(record)
            blob = b""
    return found


def history(records: list[Any]) -> list[dict[str, Any]]:
    """Rows of the history, as they were logged."""
    return [_items(record.history.item) for record in records if record.WhichOneof("record_type") == "history"]


def summary(records: list[Any]) -> dict[str, Any]:
    """Final summary."""
    found: dict[str, Any] = {}
    for record in records:
        if record.WhichOneof("record_type") == "summary":
            found |= _items(record.summary.update)
    return found


def config(records: list[Any]) -> dict[str, Any]:
    """The run's configuration."""
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    return _items(run.config.update)


def alerts(records: list[Any]) -> list[tuple[str, str]]:
    """(level, title) of each."""
    found = [record.alert for record in records if record.WhichOneof("record_type") == "alert"]
    return [(alert.level, alert.title) for alert in found]


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
