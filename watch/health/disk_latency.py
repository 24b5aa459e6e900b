"""Latency of a host's disks between two readings, from /proc/diskstats.

    latency = DiskLatency(Path("/"))
    latency.read()          # {} the first time
    latency.read()          # {"disk_read_latency_seconds": 0.0004, "disk_write_latency_seconds": 0.0011}

It is what `iostat` calls await: the time of the requests that were completed, in the queue and on the disk, over their
number. Of several disks the slowest is given: the mean over all hides the one that a checkpoint waits for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["DiskLatency"]

_COLUMNS = {"disk_read_latency_seconds": (3, 6), "disk_write_latency_seconds": (7, 10)}
"""{column: fields of /proc/diskstats with the requests completed, and the milliseconds that they took}."""
_NUM_FIELDS = 14
MIN_REQUESTS = 5
"""Minimum requests of a disk between two readings for a meaningful latency."""


class DiskLatency:
    """Reads below `root`; keeps the counters of the reading before."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._before: dict[str, list[int]] = {}

    def read(self) -> Mapping[str, float]:
        """Seconds a request; without those that no disk had enough requests for."""
        now = self._counters()
        before, self._before = self._before, now
        slowest: dict[str, float] = {}
        for disk in now.keys() & before.keys():
            for column, (requests, took) in _COLUMNS.items():
                done = now[disk][requests] - before[disk][requests]
                took_ms = now[disk][took] - before[disk][took]
                if done >= MIN_REQUESTS and took_ms >= 0:  # a disk that was attached again begins at zero
                    slowest[column] = max(slowest.get(column, 0.0), took_ms / done / 1e3)
        return slowest

    def _counters(self) -> dict[str, list[int]]:
        """Disks only: partitions, and what the kernel puts together or makes up (md, dm, loop, ram), have no device."""
        try:
            lines = (self._root / "proc/diskstats").read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            return {}
        found = {}
        for fields in map(str.split, lines):
            if len(fields) < _NUM_FIELDS or not all(map(str.isdecimal, fields[3:_NUM_FIELDS])):
                continue
            if (self._root / "sys/block" / fields[2] / "device").exists():
                found[fields[2]] = [0, 0, 0, *map(int, fields[3:_NUM_FIELDS])]
        return found
