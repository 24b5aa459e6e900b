"""Process states of a node's ranks (running, stopped, dead), from /proc and without torch.

tracker = ProcessTracker()
tracker.poll({3: 4711})        # [ProcessState(rank=3, pid=4711, state="stopped", os_state="T")] on a change
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = [
    "ProcessState",
    "ProcessTracker",
    "is_alive",
    "is_process_of",
    "kill",
    "os_state",
    "processes_of",
    "start_ticks",
]

State = Literal["running", "stopped", "dead"]
UNKNOWN = "?"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """State of one rank's process. `os_state`: the letter in /proc/<pid>/stat, empty if there is no such process."""

    rank: int
    pid: int
    state: State
    os_state: str


class ProcessTracker:
    """Reports changes of state. A process counts as dead if its pid was reused (then the start time differs)."""

    def __init__(self) -> None:
        self._start_ticks: dict[int, str] = {}
        self._last: dict[int, tuple[int, State]] = {}

    def poll(self, pids: Mapping[int, int]) -> list[ProcessState]:
        """Read the states of {rank: pid}; returns those that have changed since the last poll."""
        changes = []
        for rank, pid in pids.items():
            letter, start = os_state(pid)
            if letter == UNKNOWN:
                continue
            if start and self._start_ticks.setdefault(pid, start) != start:
                letter = ""
            stopped = letter == "T" or (letter == "t" and not _is_sampled(pid))
            state: State = "dead" if letter in ("", "Z", "X") else "stopped" if stopped else "running"
            before = self._last.get(rank)
            self._last[rank] = (pid, state)
            if before == (pid, state) or (state == "running" and (before is None or before[0] != pid)):
                continue  # unchanged, or a new process: that one writes an event itself when it starts
            changes.append(ProcessState(rank=rank, pid=pid, state=state, os_state=letter))
        return changes


def _is_sampled(pid: int) -> bool:
    """Return True if the tracer is py-spy, which stops a process only while it reads the stack."""
    try:
        tracer = next(
            line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("TracerPid")
        )
        return Path(f"/proc/{int(tracer.split()[1])}/comm").read_text().strip() == "py-spy"
    except (OSError, StopIteration, ValueError):
        return True  # the tracer ended while its name was read; assume that it was py-spy


def os_state(pid: int) -> tuple[str, str]:
    """Return (state letter, start time in ticks) from /proc/<pid>/stat; ("", "") if there is no such process, and
    (UNKNOWN, "") if that cannot be read now: a lack of file descriptors or memory proves no death.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), fields[19].decode()
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return "", ""
    except OSError:
        return UNKNOWN, ""


def start_ticks(pid: int) -> int:
    """Start time of a process, by which a reused pid is recognised; 0 if there is no such process."""
    return int(os_state(pid)[1] or 0)


def is_alive(pid: int, start_ticks: int = 0) -> bool:
    """Return True if the pid is a running process (not a zombie) that started at `start_ticks` (0: at any time), or if
    this cannot be read now.
    """
    letter, start = os_state(pid)
    return letter not in ("", "Z", "X") and (not start or start_ticks in (0, int(start)))


def kill(pid: int, number: int) -> bool:
    """Send a signal. Returns False if the process has exited or belongs to another user."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def processes_of(folder: Path) -> list[int]:
    """Other processes that have a file below `folder` open: launcher, zygote, watch and ranks of a run.

    They cannot be identified by command line or environment, because a forked process shows those of its parent.
    """
    below = f"{folder.resolve()}{os.sep}"
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and _holds_open(entry / "fd", below):
            found.append(int(entry.name))
    return found


def is_process_of(folder: Path, pid: int) -> bool:
    """Return True if a process has a file below `folder` open or mapped.

    Pids in a run's records may belong to another run: a copied folder has the pids of the original run.
    """
    below = f"{folder.resolve()}{os.sep}"
    try:
        return _holds_open(Path(f"/proc/{pid}/fd"), below) or f" {below}" in Path(f"/proc/{pid}/maps").read_text()
    except (OSError, UnicodeDecodeError):
        return False


def _holds_open(descriptors: Path, below: str) -> bool:
    try:
        names = os.listdir(descriptors)
    except OSError:  # the process exited, or belongs to another user
        return False
    for name in names:
        try:
            if os.readlink(descriptors / name).startswith(below):
                return True
        except OSError:
            continue
    return False
