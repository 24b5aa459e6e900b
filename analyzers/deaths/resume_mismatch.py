"""Resume mismatches: the state after a restart is not the one that was saved.

If the checkpoint was saved on the same mesh, each rank compares its parameters, optimizer state, random generators and
next data with the signatures in the checkpoint's manifest right after loading. It records an event if they differ.
"""

from __future__ import annotations

from analyzers.finding import Finding
from analyzers.run.records.event_log import Event, EventLog
from analyzers.scope import Scope
from analyzers.source import Source
from analyzers.wording import counted
from probes.tape import event_kinds

__all__ = ["resume_mismatches"]


def resume_mismatches(source: Source, scope: Scope) -> list[Finding]:
    """Findings of kind `resume_differs`, one per attempt."""
    log = EventLog.load(source, (event_kinds.RESUME_DIFFERS,))
    by_attempt: dict[int, list[Event]] = {}
    for event in log.of(event_kinds.RESUME_DIFFERS, attempt=scope.attempt):
        by_attempt.setdefault(event.attempt, []).append(event)
    return [_finding(attempt, events) for attempt, events in sorted(by_attempt.items())]


def _finding(attempt: int, events: list[Event]) -> Finding:
    parts = sorted({part for event in events for part in event.texts("parts")})
    ranks = tuple(sorted({event.rank for event in events}))
    step = events[0].step
    who = f"rank {ranks[0]}" if len(ranks) == 1 else counted(len(ranks), "rank")
    is_data = parts == ["data"]
    what = "training data that differs" if is_data else "a state that differs"
    where = f" in {' and '.join(parts)}" if parts and not is_data else ""
    return Finding(
        analyzer="resume",
        kind="resume_differs",
        # the user may have edited the data; all ranks read the same data
        severity="warning" if is_data else "critical",
        status="fired",
        ranks=ranks,
        first_step=step,
        last_step=step,
        cause=parts[0] if len(parts) == 1 else "several",
        summary=f"Attempt {attempt} resumed from step {step} with {what} from the checkpoint's{where} ({who}).",
        evidence={"differing_parts": parts},
        advice="resume-differs",
        attempt=attempt,
    )
