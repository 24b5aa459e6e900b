"""Timeline of a run: phases and moments, for the page on recovery.

    found = measure(store, now_ns=None)
    found.phases        # (attempt, "training", begin_s, end_s), seconds since the start of the run
    found.moments       # (seconds, attempt, "rollback", "step 40 to 30 from memory: ...")

A phase is one of: start-up, training, repeating steps, silent, down, ending. Phases begin and end at recorded times:
the first and last step of an attempt, and events of the launcher and the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from analyzers.run.calls.snapshot import SNAPSHOT_EVENTS
from analyzers.run.records.event_log import Event, EventLog
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["RunTimeline", "measure"]

SILENT_S = 1.0
"""Shortest time between the last record and a death that is shown as silence."""
_EVENTS = (
    *SNAPSHOT_EVENTS,
    event_kinds.ROLLBACK,
    event_kinds.CHECKPOINT,
    event_kinds.FAULT_INJECTED,
    event_kinds.PREEMPTED,
    event_kinds.RANK,
)
MAX_MOMENTS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimeline:
    """Seconds since `begin_ns` (epoch nanoseconds of the first event)."""

    begin_ns: int
    phases: tuple[tuple[int, str, float, float], ...]
    moments: tuple[tuple[float, int, str, str], ...]


def measure(source: Source, now_ns: int | None = None) -> RunTimeline | None:
    """Measure the timeline; None if no step was recorded. `now_ns` (epoch) is given only while the run is alive."""
    if not source.has("steps"):
        return None
    rows = source.rows(
        "SELECT attempt, min(start_ns), max(start_ns + coalesce(duration_ns, 0)) FROM steps WHERE rank >= 0 "
        "GROUP BY attempt ORDER BY attempt"
    )
    if not rows:
        return None
    log = EventLog.load(source, _EVENTS)
    started = {attempt: _start_ns(log, attempt, first) for attempt, first, _ in rows}
    begin = min(started.values())
    ended = max((event.wall_ns for event in log.of(event_kinds.RUN_ENDED)), default=now_ns or rows[-1][2])
    phases: list[tuple[int, str, float, float]] = []

    def add(attempt: int, phase: str, begin_ns: int, end_ns: int) -> None:
        if end_ns > begin_ns:
            phases.append((attempt, phase, (begin_ns - begin) / 1e9, (end_ns - begin) / 1e9))

    for number, (attempt, first, last) in enumerate(rows):
        add(attempt, "start-up", started[attempt], first)
        add(attempt, "training", first, last)
        for event in log.of(event_kinds.ROLLBACK, attempt=attempt):
            add(attempt, "repeating steps", event.wall_ns, _caught_up_ns(source, event, last))
        followed = number + 1 < len(rows)
        until = started[rows[number + 1][0]] if followed else max(ended, last)
        death_ns = _first_death_ns(log, attempt, last)
        if death_ns is not None and (death_ns - last) / 1e9 >= SILENT_S:
            add(attempt, "silent", last, min(death_ns, until))
            last = min(death_ns, until)
        add(attempt, "down" if followed else "ending", last, until)
    return RunTimeline(begin_ns=begin, phases=tuple(phases), moments=tuple(_moments(log, begin)))


def _start_ns(log: EventLog, attempt: int, first_ns: int) -> int:
    times = [event.wall_ns for event in log.of(event_kinds.RANK, attempt=attempt)]
    times += [event.wall_ns for event in log.of(event_kinds.ATTEMPT_STARTED, attempt=attempt)]
    if attempt == 0:
        times += [event.wall_ns for event in log.of(event_kinds.RUN_STARTED)][:1]
    return min([first_ns, *(wall for wall in times if wall > 0)])


def _first_death_ns(log: EventLog, attempt: int, last_ns: int) -> int | None:
    """Time at which the first process of the attempt ended uncleanly."""
    ends = [event.wall_ns for event in log.of(event_kinds.CULPRIT_KILLED, attempt=attempt)]
    ends += [
        e.wall_ns
        for e in log.of(event_kinds.RANK_EXIT, attempt=attempt)
        if e.text("signal") or e.integer("exit_code", 0)
    ]
    return min((end for end in ends if end >= last_ns), default=None)


def _caught_up_ns(source: Source, event: Event, last_ns: int) -> int:
    """Time at which the step that was rolled back had been trained again."""
    rows = source.rows(
        "SELECT min(start_ns + duration_ns) FROM steps WHERE attempt = ? AND step = ? AND start_ns > ? AND rank >= 0",
        [event.attempt, event.integer("from_step"), event.wall_ns],
    )
    return int(rows[0][0]) if rows and rows[0][0] is not None else last_ns


def _moments(log: EventLog, begin_ns: int) -> list[tuple[float, int, str, str]]:
    found: list[tuple[float, int, str, str]] = []

    def add(event: Event, kind: str, text: str) -> None:
        found.append(((event.wall_ns - begin_ns) / 1e9, event.attempt, kind, text))

    for event in log.of(event_kinds.CHECKPOINT):
        if event.text("tier") == "disk" and event.text("state") == "complete":
            add(event, "checkpoint", f"step {event.step} on disk")
        elif event.text("state") == "loaded":
            add(event, "loaded", f"step {event.step} from {event.text('tier')}")
    for event in log.of(event_kinds.ROLLBACK):
        tier, reason = event.text("tier") or "?", event.text("reason")
        add(event, "rollback", f"step {event.integer('from_step')} to {event.integer('to_step')} from {tier}: {reason}")
    for event in log.of(event_kinds.RANK_EXIT):
        if event.text("signal") or event.integer("exit_code", 0):
            how = event.text("signal") or f"exit code {event.integer('exit_code', 0)}"
            add(event, "rank ended", f"rank {event.integer('exit_rank')}: {how}")
    for event in log.of(event_kinds.CULPRIT_KILLED):
        add(event, "killed by watch", f"rank {event.integer('killed_rank')}: {event.text('reason')}")
    for event in log.of(event_kinds.FAULT_INJECTED):
        add(event, "fault injected", f"{event.text('fault')} on rank {event.rank}")
    for event in log.of(event_kinds.PREEMPTED):
        add(event, "preempted", event.text("signal") or "stop requested")
    return sorted(found)[:MAX_MOMENTS]
