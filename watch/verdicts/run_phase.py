"""Phase of a run (running, ending, ended), from its files and /proc, without its store.

    phase = settled_phase(run)       # waits a few seconds while it is ending
    phase.word                       # "running", "ending", "ended", "unknown"
    phase.ended                      # (1,): ranks whose process has ended

When a rank has just died, the other ranks are still raising errors and the launcher has not recorded the exit code. A
verdict at that time would be wrong, so the phase is `ending` until the records are complete.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from probes.tape import event_kinds
from probes.tape.attempts import is_closed, process_is_alive, rank_is_gone
from probes.tape.events import read_events
from probes.tape.rundir import RunDir

__all__ = ["SETTLE_S", "RunPhase", "run_phase", "settled_phase"]

SETTLE_S = 8.0
"""Maximum seconds to wait for the last records. Source: convention; a launcher polls several times a second and stops
the other ranks within a second or two. After that the run is judged by the existing records.
"""
RECENT_S = 30.0
"""Seconds after the end of a rank within which other ranks may still fail because of it. Source: measured; on a busy
machine a process takes seconds from its last record to its exit, and peers notice only the exit.
"""
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPhase:
    """Phase of the newest attempt. `unknown`: a rank runs on another host, or there is no rank yet."""

    word: Literal["running", "ending", "ended", "unknown"]
    attempt: int = -1
    ended: tuple[int, ...] = ()
    """Ranks with a process that has ended."""


def settled_phase(run: RunDir) -> RunPhase:
    """Wait until the phase is not `ending`, at most `SETTLE_S`, and return it."""
    deadline = time.monotonic() + SETTLE_S
    while (phase := run_phase(run)).word == "ending" and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return phase


def run_phase(run: RunDir) -> RunPhase:
    """Return the current phase."""
    folders = list(run.rank_dirs())
    attempt = max((number for number, _, _ in folders), default=-1)
    files = {rank: folder / "events.jsonl" for number, rank, folder in folders if number == attempt}
    closed = {rank for rank, path in files.items() if is_closed(path)}
    gone = {rank: rank_is_gone(path) for rank, path in files.items() if rank not in closed}
    if not files or None in gone.values():  # no rank has started, or a rank runs on a host that cannot be checked here
        return RunPhase(word="unknown", attempt=attempt, ended=tuple(sorted(closed)))
    ended = tuple(sorted({*closed, *(rank for rank, is_gone in gone.items() if is_gone)}))
    if not ended:
        return RunPhase(word="running", attempt=attempt)
    if closed == files.keys():
        return RunPhase(word="ended", attempt=attempt, ended=ended)
    events = [event for _, folder in run.node_dirs() for event in _events(folder / "events.jsonl")]
    if len(ended) == len(files):
        launched = [path.parent for path in files.values()] + [folder for _, folder in run.node_dirs()]
        word: Literal["ended", "ending"] = "ended" if _launcher_is_done(run, launched, events) else "ending"
        return RunPhase(word=word, attempt=attempt, ended=ended)
    # A rank may have finished long ago while the others still train. Then no further record of its end will come.
    newest_s = max(_ended_at_s(rank, files[rank], rank in closed, events, attempt) for rank in ended)
    is_recent = time.time() - newest_s < RECENT_S
    return RunPhase(word="ending" if is_recent else "running", attempt=attempt, ended=ended)


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        return read_events(path)[0]
    except OSError:
        return []


def _ended_at_s(rank: int, path: Path, is_closed_rank: bool, events: Sequence[dict[str, Any]], attempt: int) -> float:
    """Time of a rank's end (epoch seconds); the current time if it is not recorded."""
    if is_closed_rank:
        try:
            return path.stat().st_mtime
        except OSError:
            return time.time()
    kinds = (event_kinds.RANK_EXIT, event_kinds.RANK_STATE)
    times = [
        event["wall_ns"] / 1e9
        for event in events
        if event["kind"] in kinds
        and event.get("attempt") == attempt
        and rank in (event.get("exit_rank"), event.get("state_rank") if event.get("state") == "dead" else None)
    ]
    return min(times, default=time.time())


def _launcher_is_done(run: RunDir, folders: Sequence[Path], events: Sequence[dict[str, Any]]) -> bool:
    """Return True if the launcher has recorded the end of the run since it started, or is gone."""
    started = [
        event
        for folder in folders
        for event in _events(folder / "events.jsonl")
        if event["kind"] == event_kinds.RUN_STARTED
    ]
    started_ns = max((event["wall_ns"] for event in started), default=0)
    if any(event["kind"] == event_kinds.RUN_ENDED and event["wall_ns"] > started_ns for event in events):
        return True
    pids = [event["launcher_pid"] for event in started if isinstance(event.get("launcher_pid"), int)]
    pid = pids[-1] if pids else run.manifest().get("launcher_pid")
    return not isinstance(pid, int) or pid <= 0 or not process_is_alive(pid)
