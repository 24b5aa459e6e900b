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
from analyzers.policy import SHARED
from analyzers.run.calls.snapshot import AttemptView
from analyzers.run.ends.exceptions import own_frame_text
from analyzers.run.records.event_log import Event, EventLog
from probes.tape import event_kinds

__all__ = ["check_thread_first", "with_thread_errors"]

MAX_TEXT = 200


def with_thread_errors(finding: Finding, view: AttemptView, log: EventLog) -> Finding:
    """Add the newest exception of a thread to a finding on a hang, or on ranks that an exception or exit ended.

    A program may lose threads that nothing waits for. If an exception or exit ended the rank, the thread's exception is
    therefore only added if it happened a few steps before.
    """
    if finding.kind != "hang" and finding.cause not in ("exception", "exit"):
        return finding
    last = {event.rank: event for event in log.of(event_kinds.THREAD_EXCEPTION, attempt=view.attempt)}
    errors = [_described(last[rank]) for rank in finding.ranks if rank in last and _may_matter(last[rank], finding)]
    if not errors:
        return finding
    first = errors[0]
    step = "" if first["step"] is None else f" at step {first['step']}"
    at = f" ({first['at']})" if first["at"] else ""
    others = f", and {len(errors) - 1} other ranks lost a thread, too" if len(errors) > 1 else ""
    text = f" Thread {first['thread']} of rank {first['rank']} ended{step} with {first['error']}{at}{others}."
    return replace(finding, summary=finding.summary + text, evidence={**finding.evidence, "thread_errors": errors})


def check_thread_first(finding: Finding) -> str:
    """A sentence that names the line at which a thread ended, with a trailing space; empty if none is known."""
    errors = evidence_of(finding).get("thread_errors") or ()
    error = next((one for one in errors if one.get("at")), None)
    return f"First check {error['at']}, where thread {error['thread']} ended. " if error else ""


def _may_matter(event: Event, finding: Finding) -> bool:
    if finding.kind == "hang" or event.step is None or finding.first_step is None:
        return True
    return 0 <= finding.first_step - event.step <= SHARED.min_steps


def _described(event: Event) -> dict[str, Any]:
    message = " ".join(event.text("message").split())
    return {
        "rank": event.rank,
        "step": event.step,
        "thread": event.text("thread"),
        "error": f"{event.text('type')}: {message}"[:MAX_TEXT] if message else event.text("type"),
        "at": own_frame_text(event.text("traceback")),
    }
