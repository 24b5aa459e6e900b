"""Count out-of-memory kills by the kernel: the killed process cannot report one, and SIGKILL alone is not proof.

    counter = OomCounter()             # before the ranks start
    counter.since()                    # "memory limit of the control group", "memory of the host", or ""

The control group's own count comes first (`memory.events` of version 2, `memory.oom_control` of version 1). The host's
count also rises for other users' processes, so it is only read where the group has none.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["OomCounter"]

ROOT = Path("/sys/fs/cgroup")


class OomCounter:
    """Counts since its creation."""

    def __init__(self) -> None:
        self._group = _count(_group_file())
        self._host = _count(Path("/proc/vmstat"))

    def since(self) -> str:
        """The memory that was exhausted since then; empty if none was, or if there is no counter."""
        group = _count(_group_file())
        if group is not None and self._group is not None:
            return "memory limit of the control group" if group > self._group else ""
        host = _count(Path("/proc/vmstat"))
        return "memory of the host" if host is not None and self._host is not None and host > self._host else ""


def _group_file() -> Path:
    """The file with the count of this process's control group."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    groups = {kind: path for _, kind, path in (line.split(":", 2) for line in lines if line.count(":") >= 2)}
    if "memory" in groups:
        return ROOT / "memory" / groups["memory"].lstrip("/") / "memory.oom_control"
    return ROOT / groups.get("", "/").lstrip("/") / "memory.events"


def _count(path: Path) -> int | None:
    """The `oom_kill` line of a file of counts; None where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
