"""Python stacks of processes that were started without Rankscope, through py-spy.

    stacks = [take(pid) for pid in ranks_here()]

py-spy reads the memory of the process: it needs no cooperation, and works while a rank is blocked in a collective. It
needs permission to trace (root, CAP_SYS_PTRACE, or kernel.yama.ptrace_scope = 0 and the same user).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from analyzers.hangs.stacks import Stack
from watch.processes import os_state

__all__ = ["StacksError", "program", "ranks_here", "take", "take_threads"]

DUMP_S = 20.0


class StacksError(ValueError):
    """No stacks can be taken at all; the message is one line."""


def ranks_here() -> list[int]:
    """Processes on this machine with RANK in their environment. Their children are left out.

    Data workers inherit their rank's environment, so a process does not count if its parent is a rank.
    """
    ranks = {pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _rank(pid) is not None}
    return sorted(pid for pid in ranks if _parent(pid) not in ranks and pid != os.getpid())


def take(pid: int) -> Stack:
    """Take the stack of a process's main thread. Raises StacksError if py-spy is not installed."""
    return take_threads(pid)[0]


def take_threads(pid: int) -> tuple[Stack, list[Any]]:
    """Return the stack of the main thread, and py-spy's JSON of all threads. Raises StacksError as `take` does."""
    state, rank = os_state(pid)[0], _rank(pid)
    if not state:
        return Stack(pid=pid, problem="no such process"), []
    # py-spy normally stops the process while it reads. A process in state T is stopped already and does not change, so
    # it is read with --nonblocking.
    command = [program(), "dump", "--json", "--pid", str(pid), *(["--nonblocking"] if state in ("T", "t") else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DUMP_S, check=False)
        threads = json.loads(done.stdout) if done.returncode == 0 else None
        problem = "" if threads is not None else _reason(done.stderr)
    except subprocess.TimeoutExpired:
        threads, problem = None, f"py-spy did not answer within {DUMP_S:.0f} s"
    except ValueError:
        threads, problem = None, "py-spy's output cannot be parsed"
    threads = threads if isinstance(threads, list) else []
    frames = _frames(threads) if threads else ()
    return Stack(pid=pid, rank=rank, frames=frames, os_state=state, problem=problem), threads


def program() -> str:
    """Path of py-spy. Raises StacksError if it is not installed."""
    # py-spy may be installed in Python's virtual environment without that being on PATH.
    installed = Path(sys.executable).with_name("py-spy")
    found = str(installed) if installed.exists() else shutil.which("py-spy")
    if found is None:
        raise StacksError("py-spy is not installed: pip install 'rankscope[stacks]'")
    return found


def _reason(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "ermission" in text:
        return "no permission to trace it: run `sudo rankscope stacks ...`, or see `rankscope doctor`"
    return lines[-1][:200] if lines else "py-spy failed"


def _frames(threads: list[Any]) -> tuple[str, ...]:
    """Frames of the main thread, innermost first, as `folder/file:line function`."""
    main = next((thread for thread in threads if thread.get("thread_name") == "MainThread"), None) or threads[0]
    return tuple(
        f"{'/'.join(str(frame['filename']).split('/')[-2:])}:{frame['line']} {frame['name']}"
        for frame in main["frames"]
    )


def _rank(pid: int) -> int | None:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    value = next((entry[5:] for entry in entries if entry.startswith(b"RANK=")), b"")
    return int(value) if value.isdigit() else None


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0
