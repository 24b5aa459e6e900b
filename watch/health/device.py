"""Protocols of health sources, and their readings.

    for source in (Host(run.path), *nvml_sources()):
        for reading in source.read():
            reading.device, reading.values["power_watts"]

A source reads one or more devices. A value that a device does not support is omitted, never zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["HOST", "Reading", "ReadingError", "Source", "Xid", "XidSource"]

HOST = "host"
"""`device` of readings of the host."""


class ReadingError(RuntimeError):
    """A source cannot be read at the moment; the message is one line."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of a device: NVML UUID (or `HOST`), and columns of table `health`."""

    device: str
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Xid:
    """An error that the driver reported: its number, and the UUID of the device."""

    code: int
    device: str


class Source(Protocol):
    """Reads devices repeatedly. `name` is for messages."""

    name: str

    def read(self) -> Sequence[Reading]:
        """Return the newest readings. May block, since it has a separate thread. Raises ReadingError."""


class XidSource(Protocol):
    """Waits for XID errors."""

    def wait(self, timeout_s: float) -> Sequence[Xid]:
        """Wait for errors for up to `timeout_s` seconds, and return as soon as there is one. Raises ReadingError if no
        more can be received.
        """
