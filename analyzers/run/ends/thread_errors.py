"""Exceptions that ended a thread other than the training thread. Code that waits for the thread hangs or times out.

finding = with_thread_errors(finding, view, log)
finding.summary                       # "... Thread prefetch of rank 1 ended at step 16 with ValueError: bad record"
check_thread_first(finding)           # "First check loader.py:41 in fill, where thread prefetch ended. "
finding.evidence["thread_errors"]     # [{"rank": 1, "step": 16, "thread": "prefetch", "error": ..., "at": ...}]
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from analyzers.finding import Finding, evidence_of
from analyzers.run.calls.snapshot import AttemptView
from analyzers.run.ends.exceptions import own_frame_text
from analyzers.run.records.event_log import Event, EventLog
from analyzers.wording import counted
from probes.tape import event_kinds

__all__ = ["check_thread_first", "with_thread_errors"]

MAX_TEXT = 200


def with_thread_errors(
    finding: Finding, view: AttemptView, log: EventLog, *, max_age_steps: int | None = None
) -> Finding:
    """Add the newest exception of a thread of each of the finding's ranks. `max_age_steps`: leave out exceptions that
    happened more steps before the finding, because a program may lose threads that nothing waits for.
    """
    last = {event.rank: event for event in log.of(event_kinds.THREAD_EXCEPTION, attempt=view.attempt)}
    errors = [
        _described(last[rank])
        for rank in finding.ranks
        if rank in last and (max_age_steps is None or _is_recent(last[rank], finding, max_age_steps))
    ]
    if not errors:
        return finding
    first = errors[0]
    step = "" if first["step"] is None else f" at step {first['step']}"
    at = f" ({first['at']})" if first["at"] else ""
    others = f", and {counted(len(errors) - 1, 'other rank')} lost a thread, too" if len(errors) > 1 else ""
    text = f" Thread {first['thread']} of rank {first['rank']} ended{step} with {first['error']}{at}{others}."
    return replace(finding, summary=finding.summary + text, evidence={**finding.evidence, "thread_errors": errors})


def check_thread_first(finding: Finding) -> str:
    """A sentence that names the line at which a thread ended, with a trailing space; empty if none is known."""
    errors = evidence_of(finding).get("thread_errors") or ()
    error = next((one for one in errors if one.get("at")), None)
    return f"First check {error['at']}, where thread {error['thread']} ended. " if error else ""


def _is_recent(event: Event, finding: Finding, max_age_steps: int) -> bool:
    if event.step is None or finding.first_step is None:
        return True
    return 0 <= finding.first_step - event.step <= max_age_steps


def _described(event: Event) -> dict[str, Any]:
    message = " ".join(event.text("message").split())
    return {
        "rank": event.rank,
        "step": event.step,
        "thread": event.text("thread"),
        "error": f"{event.text('type')}: {message}"[:MAX_TEXT] if message else event.text("type"),
        "at": own_frame_text(event.text("traceback")),
    }
