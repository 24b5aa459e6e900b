"""Count out-of-memory kills by the kernel, since the killed process cannot report them, and SIGKILL alone is no proof.

    counter = OomCounter()             # before the ranks start
    counter.since()                    # "memory limit of the control group", "memory of the host", or ""

The control group's count is preferred (`memory.events` in version 2, `memory.oom_control` in version 1). The host's
count also includes other users' processes, so it is read only if the group has none.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["OomCounter"]

ROOT = Path("/sys/fs/cgroup")


class OomCounter:
    """Counts kills since its creation."""

    def __init__(self) -> None:
        self._group = _count(_group_file())
        self._host = _count(Path("/proc/vmstat"))

    def since(self) -> str:
        """Names the memory that was exhausted since then; empty if none was, or if there is no counter."""
        group = _count(_group_file())
        if group is not None and self._group is not None:
            return "memory limit of the control group" if group > self._group else ""
        host = _count(Path("/proc/vmstat"))
        return "memory of the host" if host is not None and self._host is not None and host > self._host else ""


def _group_file() -> Path:
    """Path of the file with the count of this process's control group."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    groups = {kind: path for _, kind, path in (line.split(":", 2) for line in lines if line.count(":") >= 2)}
    if "memory" in groups:
        return ROOT / "memory" / groups["memory"].lstrip("/") / "memory.oom_control"
    return ROOT / groups.get("", "/").lstrip("/") / "memory.events"


def _count(path: Path) -> int | None:
    """Value of the `oom_kill` line in a file of counters; None without such a line."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
