"""The fence: only the newest attempt of a run may write what later attempts read.

    attempt = claim(run)      # the launcher, before it starts ranks; torchrun: rank 0
    hold(run, attempt)        # each rank, once
    check()                   # before a rename that later attempts would see; raises Fenced

A claim is a file `attempts/00003.json` made with O_EXCL and synced: two launchers never get one number, and a number
is never given twice. A rank is fenced as soon as a later claim exists.

Looking first and renaming then leaves a moment in between, in which a process can be stopped for hours. So:

1. scratch files carry the attempt in their name (`scratch`), and `check` comes after they are made, before the rename,
2. a new attempt removes the scratch files of all others (`sweep`) before it looks at what there is.

Who passed the check before the claim has then either renamed before the sweep, or finds nothing to rename.
What a process holds is a fact of the process: it lives in this module, and code that never held anything is not fenced.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from pathlib import Path
from typing import Any

from probes.rundir import RunDir
from trainer.exit_codes import EXIT_FENCED
from trainer.recovery.processes import os_state

__all__ = ["Fenced", "check", "claim", "claims", "held_attempt", "hold", "scratch", "sweep"]

_CLAIM = re.compile(r"(\d{5,9})\.json")
_held: tuple[Path, int] | None = None


class Fenced(SystemExit):
    """A later attempt has taken over. No Exception: whoever puts up with a failed save must not put up with this."""

    def __init__(self, attempt: int, newest: int) -> None:
        super().__init__(EXIT_FENCED)
        self.attempt = attempt
        self.newest = newest

    def __str__(self) -> str:
        return f"attempt {self.attempt} is over: attempt {self.newest} has taken the run; this process leaves"


def claim(run: RunDir, **detail: Any) -> int:
    """Take the next attempt's number, durably. Raises OSError if the run's folder cannot be written."""
    folder = _folder(run)
    folder.mkdir(exist_ok=True)
    taken = [*_numbers(folder), *(attempt for attempt, _, _ in run.rank_dirs())]
    number = max(taken, default=-1) + 1
    while True:
        try:
            fd = os.open(folder / f"{number:05d}.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            break
        except FileExistsError:
            number += 1
    who = {"wall_ns": time.time_ns(), "host": socket.gethostname(), "pid": os.getpid()}
    who["start_ticks"] = int(os_state(os.getpid())[1] or 0)
    with open(fd, "w", encoding="utf-8") as file:
        json.dump(who | detail, file)
        file.flush()
        os.fsync(file.fileno())
    directory = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return number


def claims(run: RunDir) -> dict[int, dict[str, Any]]:
    """{attempt: who took it: host, pid, start_ticks, ...}; empty for a claim that was torn by a crash."""
    found: dict[int, dict[str, Any]] = {}
    for number in sorted(_numbers(_folder(run))):
        try:
            loaded = json.loads((_folder(run) / f"{number:05d}.json").read_bytes()[: 1 << 20])
        except (OSError, ValueError, RecursionError):
            loaded = {}
        found[number] = loaded if isinstance(loaded, dict) else {}
    return found


def hold(run: RunDir, attempt: int) -> None:
    """Say which attempt this process belongs to."""
    global _held
    _held = (_folder(run), attempt)


def held_attempt() -> int:
    """The attempt of this process; 0 if it holds none."""
    return _held[1] if _held else 0


def check() -> None:
    """Raise Fenced if this process's attempt is over. A folder that cannot be read is no proof of that."""
    if _held is None:
        return
    folder, attempt = _held
    newest = max(_numbers(folder), default=attempt)
    if newest > attempt:
        raise Fenced(attempt, newest)


def scratch(path: Path) -> Path:
    """The name under which this attempt prepares `path`, in the same folder: `ledger.json.a0.tmp`."""
    return path.with_name(f"{path.name}.a{held_attempt()}.tmp")


def sweep(folder: Path) -> None:
    """Remove every scratch file and folder in `folder`: what older attempts prepared can no longer be renamed."""
    for path in folder.glob("*.tmp"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _folder(run: RunDir) -> Path:
    return run.path / "attempts"


def _numbers(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [int(match[1]) for match in map(_CLAIM.fullmatch, names) if match]
