"""Readings of the host from /proc, cgroups and the file system of the run.

    Host(run.path).read()[0].values["cpu_utilization_ratio"]

In a container, memory and CPUs are those within its cgroup's limits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from watch.health.device import HOST, Reading
from watch.health.host_counters import host_counters

__all__ = ["Host"]

_COLUMNS = {"disk_read_latency_seconds": (3, 6), "disk_write_latency_seconds": (7, 10)}
"""{column: fields of /proc/diskstats for completed requests, and for the milliseconds that they took}."""
_NUM_FIELDS = 14
MIN_REQUESTS = 5
"""Minimum number of requests between two readings for a meaningful latency."""

_CGROUP = Path("sys/fs/cgroup")


class Host:
    """Reads files below `root`. `run_path`: the run's folder. The file system of this folder is measured."""

    name = HOST

    def __init__(self, run_path: Path, root: Path = Path("/")) -> None:
        self._run_path, self._root = run_path, root
        self._disks = DiskLatency(root)
        self._busy: tuple[int, int] | None = None  # (busy, total) jiffies at the last reading

    def read(self) -> Sequence[Reading]:
        """Return one reading. Values that the kernel does not provide are omitted."""
        values: dict[str, float] = {"num_cpus": len(os.sched_getaffinity(0))}
        values |= self._cpu()
        values |= self._memory()
        values |= self._paging()
        values |= self._network()
        values |= host_counters(self._root)
        values |= self._disks.read()
        try:
            disk = os.statvfs(self._run_path)
            values["disk_free_bytes"] = disk.f_bavail * disk.f_frsize
        except OSError:
            pass
        load = self._text("proc/loadavg").split()
        if load:
            values["load_1m"] = float(load[0])
        return [Reading(HOST, values)]

    def _text(self, path: str | Path) -> str:
        try:
            return (self._root / path).read_text(encoding="ascii", errors="replace")
        except OSError:
            return ""

    def _cpu(self) -> Mapping[str, float]:
        """Busy share since the last reading; empty for the first reading."""
        line = self._text("proc/stat").partition("\n")[0].split()
        if len(line) < 6 or line[0] != "cpu":
            return {}
        jiffies = [int(part) for part in line[1:9]]  # guest time is left out, because user time includes it
        total, idle = sum(jiffies), jiffies[3] + jiffies[4]  # the columns `idle` and `iowait`
        before, self._busy = self._busy, (total - idle, total)
        if before is None or total <= before[1]:
            return {}
        return {"cpu_utilization_ratio": (total - idle - before[0]) / (total - before[1])}

    def _memory(self) -> Mapping[str, float]:
        kib = {
            key: int(rest.split()[0])
            for key, _, rest in (line.partition(":") for line in self._text("proc/meminfo").splitlines())
            if rest.split() and rest.split()[0].isdecimal()
        }
        if "MemTotal" not in kib or "MemAvailable" not in kib:
            return {}
        total, used = kib["MemTotal"] << 10, (kib["MemTotal"] - kib["MemAvailable"]) << 10
        limit = self._text(_CGROUP / "memory.max").strip()
        current = self._text(_CGROUP / "memory.current").strip()
        if limit.isdecimal() and current.isdecimal() and int(limit) < total:
            cache = next(
                (int(line.split()[1]) for line in self._text(_CGROUP / "memory.stat").splitlines()
                 if line.startswith("inactive_file ")), 0
            )  # fmt: skip
            total, used = int(limit), max(0, int(current) - cache)
        return {"memory_used_bytes": used, "memory_total_bytes": total}

    def _paging(self) -> Mapping[str, float]:
        counts = dict(line.split() for line in self._text("proc/vmstat").splitlines() if len(line.split()) == 2)
        try:
            return {"swapped_pages_total": int(counts["pswpin"]) + int(counts["pswpout"])}
        except (KeyError, ValueError):
            return {}

    def _network(self) -> Mapping[str, float]:
        """Errors and drops of all interfaces except loopback, in both directions."""
        total, has_interface = 0, False
        for line in self._text("proc/net/dev").splitlines()[2:]:
            name, _, rest = line.partition(":")
            fields = rest.split()
            if name.strip() == "lo" or len(fields) < 12:
                continue
            has_interface = True
            total += sum(int(fields[i]) for i in (2, 3, 10, 11))  # errors and drops of receiving, then of sending
        return {"network_errors_total": total} if has_interface else {}


class DiskLatency:
    """Disk latency since the previous reading. Reads files below `root`.

    It is iostat's await: the time of completed requests in the queue and on the disk, divided by their number. The
    maximum over all disks is used, because the mean would hide the slow disk that a checkpoint waits for.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._before: dict[str, list[int]] = {}

    def read(self) -> Mapping[str, float]:
        """Seconds per request. Columns are omitted if no disk had enough requests."""
        now = self._counters()
        before, self._before = self._before, now
        slowest: dict[str, float] = {}
        for disk in now.keys() & before.keys():
            for column, (requests, millis) in _COLUMNS.items():
                done = now[disk][requests] - before[disk][requests]
                took_ms = now[disk][millis] - before[disk][millis]
                if done >= MIN_REQUESTS and took_ms >= 0:  # negative if the disk was re-attached: counters restart at 0
                    slowest[column] = max(slowest.get(column, 0.0), took_ms / done / 1e3)
        return slowest

    def _counters(self) -> dict[str, list[int]]:
        """Counters of physical disks: partitions and virtual devices (md, dm, loop, ram) have no `device` entry."""
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
