"""Read TensorBoard's event files (`events.out.tfevents.*`): scalars by step. Needs the package tensorboard
(`rankscope[trackers]`) for the protobuf classes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from store.readers.programs.rows import MAX_ROWS, Point, ProgramRows, point_of, step_rows
from store.readers.untrusted.external_files import SERIES_BYTES, SourceError, read_whole

NAME = "event file of TensorBoard"
MAX_RECORD_BYTES = 64 << 20
_LENGTH = struct.Struct("<Q")


def recognise(first: bytes) -> bool:
    """Return True if the first record states the version of an event file."""
    return first[8 + 4 : 8 + 4 + 64].find(b"brain.Event:") >= 0


def read(path: Path) -> ProgramRows:
    """Read the scalars up to where the file is damaged."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError:
        raise SourceError("needs the package tensorboard: pip install 'rankscope[trackers]'") from None
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    points: list[Point] = []
    problem = ""
    try:
        for record in _records(read_whole(path, SERIES_BYTES)[0]):
            event = Event()
            event.ParseFromString(record)
            wall_ns = int(event.wall_time * 1e9) if 1e9 < event.wall_time < 1e10 else None
            metrics = {value.tag: number for value in event.summary.value if (number := _scalar(value)) is not None}
            if (point := point_of(event.step, metrics, wall_ns)) is not None:
                points.append(point)
            if len(points) >= MAX_ROWS:
                problem = f"has more than {MAX_ROWS:,} scalars: the rest was not read"
                break
    except (SourceError, DecodeError) as error:
        problem = str(error) if isinstance(error, SourceError) else "is damaged: a record is not an event"
    return ProgramRows(steps=step_rows(points, rank=0), problem=problem)


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a TFRecord file. A record consists of a length, the checksum of the length, the data, and
    the checksum of the data."""
    place = 0
    while place + 12 <= len(data):
        (length,) = _LENGTH.unpack_from(data, place)
        if length > MAX_RECORD_BYTES:
            raise SourceError("is damaged: a record is longer than any event")
        if place + 12 + length > len(data):
            raise SourceError("is cut off within a record")
        yield data[place + 12 : place + 12 + length]
        place += 16 + length


def _scalar(value: Any) -> float | None:
    if value.WhichOneof("value") == "simple_value":
        return float(value.simple_value)
    tensor = value.tensor if value.WhichOneof("value") == "tensor" else None
    if tensor is None or any(dim.size != 1 for dim in tensor.tensor_shape.dim):
        return None
    if tensor.float_val:
        return float(tensor.float_val[0])
    if tensor.double_val:
        return float(tensor.double_val[0])
    if tensor.dtype == 1 and len(tensor.tensor_content) == 4:  # DT_FLOAT
        return float(struct.unpack("<f", tensor.tensor_content)[0])
    return None
