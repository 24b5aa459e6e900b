"""Message framing between a process and its child: a length of eight bytes, then the content.

    write_frame(fd, json.dumps(message).encode(), deadline_s)
    blob = read_frame(fd, deadline_s, max_bytes=1 << 20)

Deadlines are values of `time.monotonic()`; `math.inf` means no deadline. Raises TimeoutError at the deadline, and
EOFError if the other end is closed.
"""

from __future__ import annotations

import math
import os
import select
import struct
import time

__all__ = ["read_frame", "write_frame"]

_LENGTH = struct.Struct(">Q")
_MAX_WRITE = 1 << 16


def write_frame(fd: int, blob: bytes, deadline_s: float) -> None:
    """Write one message to a pipe. The deadline is kept only if the pipe is non-blocking."""
    rest = memoryview(_LENGTH.pack(len(blob)) + blob)
    while rest:
        _wait(fd, select.POLLOUT, deadline_s)
        try:
            rest = rest[os.write(fd, rest[:_MAX_WRITE]) :]
        except BlockingIOError:
            continue


def read_frame(fd: int, deadline_s: float, *, max_bytes: int) -> bytes:
    """Read one message. Raises ValueError if it is longer than `max_bytes`."""
    (size,) = _LENGTH.unpack(_read_exactly(fd, _LENGTH.size, deadline_s))
    if size > max_bytes:
        raise ValueError(f"its answer is larger than {max_bytes >> 20} MiB")
    return _read_exactly(fd, size, deadline_s)


def _read_exactly(fd: int, num_bytes: int, deadline_s: float) -> bytes:
    found = bytearray()
    while len(found) < num_bytes:
        _wait(fd, select.POLLIN, deadline_s)
        if not (part := os.read(fd, min(1 << 20, num_bytes - len(found)))):
            raise EOFError
        found += part
    return bytes(found)


def _wait(fd: int, event: int, deadline_s: float) -> None:
    """Wait until a descriptor is ready. `select.select` would refuse descriptors of 1,024 and more."""
    poll = select.poll()
    poll.register(fd, event)
    left_ms = None if deadline_s == math.inf else math.ceil(1e3 * max(0.0, deadline_s - time.monotonic()))
    if not poll.poll(left_ms):
        raise TimeoutError
