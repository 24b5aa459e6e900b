"""Attempts that ended with a failure, without those that a person or Rankscope stopped on purpose.

    failed_attempts(source, run.manifest())        # [0, 2]: attempt 1 was interrupted by a user

The findings decide: an attempt with a hang or a lost rank (a kill, a crash, a lost node or launcher) failed, however
its other ranks ended. An attempt did not fail if

1. a signal to its launcher or to all its ranks ended it (Ctrl-C, a scheduler's SIGTERM),
2. all its ranks closed their records: finished, stopped by the guard, or asked to save for a node that joins,
3. it was ended to leave out devices on request (`recovery.on_straggler`, `recovery.on_xid`).

A rollback does not end an attempt. If another attempt followed and no record says how the earlier one ended, the
earlier one failed, because a job that is killed as a whole records nothing. The newest attempt may still run. So it
counts only if its launcher recorded the end, or if the caller knows that the attempt is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analyzers.deaths.analyze import deaths_of_attempt
from analyzers.deaths.rank_lost import ON_PURPOSE
from analyzers.hangs.analyze import hang_of_attempt
from analyzers.run.calls.snapshot import SNAPSHOT_EVENTS, AttemptView, attempts, take_snapshot
from analyzers.run.policy import StallPolicy, stall_policy
from analyzers.run.records.event_log import EventLog
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["failed_attempts"]


def failed_attempts(source: Source, manifest: Mapping[str, Any], *, is_over: bool = False) -> list[int]:
    """Numbers of the failed attempts, in order. `is_over`: the run has ended, whether or not that was recorded.

    If the run has no events, every attempt except the newest counts as failed.
    """
    known = attempts(source)
    if not known or not source.has("events"):
        return known[:-1]
    log, policy = EventLog.load(source, SNAPSHOT_EVENTS), stall_policy(manifest)
    ended = {event.attempt for event in log.of(event_kinds.RUN_ENDED)}
    candidates = known if is_over or known[-1] in ended else known[:-1]
    return [
        attempt
        for attempt in candidates
        if _failed(take_snapshot(source, attempt, log), log, policy, is_last=attempt == known[-1])
    ]


def _failed(view: AttemptView, log: EventLog, policy: StallPolicy, *, is_last: bool) -> bool:
    if hang_of_attempt(view, log, policy, is_last=is_last) is not None:
        return True
    if found := deaths_of_attempt(view, log, policy, is_last=is_last):
        return any(finding.cause != ON_PURPOSE for finding in found)
    if is_last or (view.ranks and all(rank.closed for rank in view.ranks.values())):
        return False
    # No hang and no death was found, so the launcher ended the ranks. Either a node whose records are elsewhere failed,
    # or devices were excluded on request (`cause`), which is no failure.
    return not any(event.text("cause") for event in log.of(event_kinds.EXCLUDED, attempt=view.attempt))
