"""Attempts that lost all their records: a power cut seconds after an attempt starts leaves its tapes blank.

1. An attempt may have no rank and no step in the store, but blank or damaged files of its ranks. Such an attempt had
   begun, because ranks reserve their files when they start.
2. If a launcher recorded how its ranks ended, those records are reported instead, and nothing is reported here.
3. The newest attempt of a live run is not judged, because it may just be starting.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from analyzers.deaths.rank_lost import rank_lost
from analyzers.finding import Finding
from analyzers.run.calls.snapshot import SNAPSHOT_EVENTS, AttemptView, attempts
from analyzers.run.ends.restarts import restart_sentence
from analyzers.run.records.event_log import EventLog
from analyzers.run.records.file_problems import file_problems
from analyzers.scope import Scope
from analyzers.source import Source
from analyzers.wording import ranks_text
from probes.tape import event_kinds

__all__ = ["unrecorded_attempts"]

_RANK_FILE = re.compile(r"tapes/attempt-(\d+)/rank-(\d+)/")
_CRASHED = "launcher_lost"
"""Reason in a run's end that a later launcher recorded, because the launcher of the attempt was gone."""


def unrecorded_attempts(source: Source, scope: Scope) -> list[Finding]:
    """Findings of kind `rank_lost`, one for each attempt that began but left no record of any rank."""
    files: dict[int, dict[int, list[str]]] = {}
    for problem in file_problems(source):
        if found := _RANK_FILE.match(problem["path"]):
            files.setdefault(int(found[1]), {}).setdefault(int(found[2]), []).append(problem["path"])
    known = attempts(source)
    lost = sorted(set(files) - set(known))
    if not lost:
        return []
    log = EventLog.load(source, SNAPSHOT_EVENTS) if source.has("events") else None
    all_attempts = sorted({*files, *known})
    return [
        _finding(source, attempt, files[attempt], all_attempts)
        for attempt in lost
        if scope.attempt in (None, attempt)
        and not (scope.is_live and attempt == all_attempts[-1])
        and not (log is not None and _is_explained(log, attempt))
    ]


def _is_explained(log: EventLog, attempt: int) -> bool:
    ends = log.of(event_kinds.RUN_ENDED, attempt=attempt)
    return bool(log.of(event_kinds.RANK_EXIT, attempt=attempt)) or any(end.text("reason") != _CRASHED for end in ends)


def _finding(source: Source, attempt: int, files: dict[int, list[str]], all_attempts: Sequence[int]) -> Finding:
    ranks = sorted(files)
    view = AttemptView(attempt=attempt, ranks={}, world_size=len(ranks))
    summary = (
        f"Records incomplete: {ranks_text(ranks)} began attempt {attempt}, but none of their records survived and "
        "nothing recorded how they ended. Perhaps the machine lost power, or they were killed soon after their start."
    )
    evidence = {"lost_files": sorted(path for paths in files.values() for path in paths)}
    restart = restart_sentence(source, attempt, all_attempts) if source.has("steps") else ""
    return rank_lost(view, "killed_all", summary, evidence, step=None, restart=restart)
