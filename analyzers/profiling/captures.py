"""The captures of torch's profiler in a run, from its events: the traces, and the differences between ranks.

    for capture in captures(EventLog.load(source, EVENTS)):
        capture["path"], capture["rank"], capture["parts_ms"]
    evidence |= against_peer(log, attempt=0, rank=3)      # {"profile_operators": ["aten::mm in forward +12.3 ms"], ...}

A suspect and its peer profile the same steps. Operators whose self time is longer on the suspect are shown. Operators
whose self time is shorter are not: a slow rank waits less in collectives, for example. An operator that is missing from
the peer's list is assumed to take as long on the peer as the last operator of the list. Thus an excess is never
overstated.

`capture_line(diagnosis.run["captures"][0])` is "rank 3, steps 40 to 44: step 81 ms, compute 60 ms; traces/..."
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analyzers.policy import SHARED
from analyzers.run.records.event_log import Event, EventLog
from analyzers.wording import is_number, number
from probes.tape import event_kinds
from store.readers.traces.trace_operators import BETWEEN

__all__ = ["EVENTS", "against_peer", "capture_line", "captures"]

EVENTS = (event_kinds.PROFILE_REQUESTED, event_kinds.PROFILE_CAPTURED, event_kinds.PROFILE_SUMMARY)
MAX_CAPTURES = 1000
MAX_SHOWN = 3
Key = tuple[str, str, bool]

_PARTS = {"step": "step", "compute": "compute", "exposed": "exposed communication", "copies": "copies", "idle": "idle"}


def captures(log: EventLog) -> list[dict[str, Any]]:
    """Facts of each capture, in the order in which they were written."""
    removed = {path for event in log.of(event_kinds.PROFILE_CAPTURED) for path in event.texts("removed")}
    found = []
    for event in log.of(event_kinds.PROFILE_CAPTURED)[:MAX_CAPTURES]:
        path = event.text("path")
        summary = _summary(log, event.attempt, path)
        parts: Any = summary.detail.get("parts_ms") if summary is not None else None
        found.append(
            {
                "attempt": event.attempt,
                "rank": event.rank,
                "first_step": event.integer("first_step"),
                "last_step": event.integer("last_step"),
                "path": path or None,
                "is_kept": bool(path) and path not in removed,
                "bytes": event.integer("bytes"),
                "reason": event.text("reason"),
                "parts_ms": parts if isinstance(parts, Mapping) else None,
                "problem": (summary.text("problem") or None) if summary is not None else "not read",
                "top_operators": [_text(key, ms) for key, ms in list(_operators(summary).items())[:MAX_SHOWN]],
            }
        )
    return found


def against_peer(log: EventLog, attempt: int, rank: int) -> dict[str, Any]:
    """Evidence from the newest capture of a suspect and its peer; empty unless one request captured both."""
    for request in reversed(log.of(event_kinds.PROFILE_REQUESTED, attempt=attempt)):
        ranks = request.integers("ranks")
        if len(ranks) != 2 or ranks[0] != rank:
            continue
        mine, others = (_of_request(log, attempt, one, request.integer("request")) for one in ranks)
        if mine is None or others is None:
            continue
        found: dict[str, Any] = {
            "profile_trace": mine.text("path"),
            "profile_trace_of_peer": others.text("path"),
            "profile_peer_rank": ranks[1],
            "profile_first_step": mine.integer("first_step"),
            "profile_last_step": mine.integer("last_step"),
        }
        if excess := _excess(mine, others):
            found["profile_operators"] = [_text(key, ms, "+") for key, ms in excess[:MAX_SHOWN]]
        return found
    return {}


def _excess(mine: Event, others: Event) -> list[tuple[Key, float]]:
    """Operators in which the suspect spends more time than its peer, in milliseconds per step, the largest difference
    first."""
    suspects, peers = _operators(mine), _operators(others)
    unlisted_ms = min(peers.values(), default=0.0)
    more = [(key, ms - peers.get(key, unlisted_ms)) for key, ms in suspects.items()]
    least_ms = SHARED.min_change_ratio * sum(suspects.values())
    return sorted(((key, ms) for key, ms in more if ms > least_ms), key=lambda pair: -pair[1])


def _operators(summary: Event | None) -> dict[Key, float]:
    """{(name, phase, on device): milliseconds per step}, the longest first. Invalid rows are skipped."""
    rows: Any = summary.detail.get("operators") if summary is not None else None
    found: dict[Key, float] = {}
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, Mapping) and isinstance(row.get("name"), str) and is_number(row.get("self_ms")):
            phase = row.get("phase")
            key = (row["name"][:200], phase[:40] if isinstance(phase, str) else "", row.get("device") is True)
            found[key] = float(row["self_ms"])
    return found


def _text(key: Key, ms: float, sign: str = "") -> str:
    name, phase, on_device = key
    where = " on the device" if on_device else f" in {phase}" if phase else ""
    name = "Python or waiting between operators" if name == BETWEEN else name
    return f"{name}{where} {ms:{sign}.3g} ms"


def _of_request(log: EventLog, attempt: int, rank: int, request: int) -> Event | None:
    found = [
        event
        for event in log.of(event_kinds.PROFILE_SUMMARY, attempt=attempt)
        if event.integer("capture_rank") == rank and event.integer("request") == request and not event.text("problem")
    ]
    return found[-1] if found else None


def _summary(log: EventLog, attempt: int, path: str) -> Event | None:
    found = [one for one in log.of(event_kinds.PROFILE_SUMMARY, attempt=attempt) if path and one.text("path") == path]
    return found[-1] if found else None


def capture_line(capture: Mapping[str, Any]) -> str:
    """A line with rank, steps, the times of a step's parts, and the trace. If the times are unknown, it says why."""
    steps = f"rank {capture.get('rank')}, steps {capture.get('first_step')} to {capture.get('last_step')}"
    given: Any = capture.get("parts_ms")
    parts: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    known = [f"{text} {number(parts[key])} ms" for key, text in _PARTS.items() if is_number(parts.get(key))]
    problem = capture.get("problem")
    if known:
        text = ", ".join(known) + (f" ({problem})" if problem else "")
    else:
        text = str(problem or "not read")
    where = capture.get("path") if capture.get("is_kept") else "removed, beyond profiler.budget_mb"
    return f"{steps}: {text}. {where}"
