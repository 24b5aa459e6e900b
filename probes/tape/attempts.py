"""Attempts of a run: each start of its ranks durably claims a unique number.

    attempt = claim(run)                        # in the process that starts the ranks, once
    attempt = claim(run, launch="torchrun-4711-0") # in each rank alone: all ranks of a launch get the same number

A claim is a file `attempts/00003.json` that appears atomically, with its content, under an unused name. So two
launchers never get the same number, and ranks that cannot communicate yet agree on theirs.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

from .event_kinds import RANK
from .events import read_events
from .files.safe_open import open_plain, sync_folder
from .format.schema import UNSET
from .rundir import CREATED, RunDir

__all__ = [
    "all_ended", "claim", "claims", "is_closed", "newest", "pids_of_rank", "process_is_alive",
    "rank_is_gone", "start_ticks",
]  # fmt: skip

_CLAIM = re.compile(r"(\d{5,9})\.json")
MAX_BYTES = 1 << 20
_LAST_BYTES = 1 << 14


def claim(run: RunDir, *, launch: str = "", **detail: Any) -> int:
    """Take the next attempt's number, or the one that was taken for this `launch`.

    Raises OSError if the run's folder cannot be written.
    """
    folder = _folder(run)
    folder.mkdir(exist_ok=True)
    who = {"wall_ns": time.time_ns(), "host": socket.gethostname(), "pid": os.getpid(), "start_ticks": start_ticks()}
    fresh = folder / f".claim-{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"
    with open(fresh, "w", encoding="utf-8") as file:
        created = {CREATED: made} if (made := run.created_ns()) else {}  # to recognise a run.json of another run
        json.dump(who | created | ({"launch": launch} if launch else {}) | detail, file)
        file.flush()
        os.fsync(file.fileno())
    try:
        while True:
            taken = [attempt for attempt, _, _ in run.rank_dirs()] if not launch else []
            for number, claimed in claims(run).items():
                if launch and claimed.get("launch") == launch:
                    return number
                taken.append(number)
            number = max(taken, default=-1) + 1
            try:
                os.link(fresh, folder / f"{number:05d}.json")  # atomic: the name appears together with the content
            except FileExistsError:
                continue
            break
    finally:
        fresh.unlink(missing_ok=True)
    sync_folder(folder)
    return number


def claims(run: RunDir) -> dict[int, dict[str, Any]]:
    """{attempt: facts of the process that claimed it: host, pid, start_ticks, ...}; no facts if a crash left an
    incomplete file."""
    found: dict[int, dict[str, Any]] = {}
    for number in sorted(_numbers(_folder(run))):
        try:
            loaded = json.loads((_folder(run) / f"{number:05d}.json").read_bytes()[:MAX_BYTES])
        except (OSError, ValueError, RecursionError):
            loaded = {}
        found[number] = loaded if isinstance(loaded, dict) else {}
    return found


def newest(run: RunDir, default: int) -> int:
    """Number of the newest attempt; `default` if there is none or the folder cannot be read."""
    return max(_numbers(_folder(run)), default=default)


def all_ended(run: RunDir) -> bool:
    """Return True if no rank of the newest attempt can write: its tapes are closed, or its process has ended.

    For a rank on another host only closed tapes can be seen.
    """
    folders = list(run.rank_dirs())
    last = max((attempt for attempt, _, _ in folders), default=-1)
    event_files = [folder / "events.jsonl" for attempt, _, folder in folders if attempt == last]
    return last >= 0 and all(is_closed(events) or rank_is_gone(events) for events in event_files)


def rank_is_gone(events: Path) -> bool | None:
    """Return True if the process that wrote a rank's first event has ended; None if unknown, as for another host."""
    try:
        with open(open_plain(events), "rb") as file:
            first = json.loads(file.readline(MAX_BYTES))
        if first.get("host") != socket.gethostname():
            return None
        return not process_is_alive(int(first["pid"]), int(first["start_ticks"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def pids_of_rank(events: Path) -> list[int]:
    """Pids in a rank's events. The last one is the rank's; earlier ones are of processes that started it."""
    found, _, _ = read_events(events)
    return [event["pid"] for event in found if event["kind"] == RANK and isinstance(event.get("pid"), int)]


def process_is_alive(pid: int, started_ticks: int = 0) -> bool:
    """Return True if a process with this pid runs here and is not a zombie; `started_ticks` 0: started at any time."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0] not in (b"Z", b"X") and started_ticks in (0, int(fields[19]))
    except (OSError, IndexError, ValueError):
        return False


def is_closed(events: Path) -> bool:
    """Return True if `rank_closed` is among a rank's last events. Only the end of the file is read."""
    try:
        with open(open_plain(events), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            return b'"kind":"rank_closed"' in file.read(_LAST_BYTES)
    except OSError:
        return False


def _folder(run: RunDir) -> Path:
    return run.path / "attempts"


def _numbers(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [int(match[1]) for match in map(_CLAIM.fullmatch, names) if match]


def start_ticks(pid: int | str = "self") -> int:
    """Start time of a process (default: this one) in clock ticks since boot; UNSET if /proc does not show it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        return int(UNSET["i64"])
