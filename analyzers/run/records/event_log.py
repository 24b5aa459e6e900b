"""The run's events, read once and selected by kind, attempt and step.

    log = EventLog.load(source, (event_kinds.ROLLBACK, event_kinds.BATCH_SKIPPED))
    log.of(event_kinds.ROLLBACK, attempt=0)[0].detail["to_step"]

The content of an event was written by the run and may be damaged: every look-up has a type and a default.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from analyzers.run.records.remembered import EVENTS_SQL, Remembered
from analyzers.source import Source

__all__ = ["Event", "EventLog", "parsed_detail"]

MAX_EVENTS = 200_000
"""Events read of one run; of a run that writes more the rest is ignored."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `rank` -1 is a node process; `detail` is the whole line as it was written."""

    wall_ns: int
    attempt: int
    rank: int
    step: int | None
    kind: str
    detail: dict[str, Any]

    def integer(self, key: str, default: int = -1) -> int:
        """`detail[key]` as an int, or the default where it is something else."""
        value = self.detail.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def text(self, key: str, default: str = "") -> str:
        """`detail[key]` as text, or the default where it is something else."""
        value = self.detail.get(key)
        return value if isinstance(value, str) else default

    def number(self, key: str) -> float | None:
        """`detail[key]` as a float; None where it is missing or no number."""
        try:
            return float(self.detail[key])
        except (KeyError, TypeError, ValueError):
            return None

    def integers(self, key: str) -> list[int]:
        """`detail[key]` as a list of ints; what is no int is left out."""
        value = self.detail.get(key)
        return [item for item in value if isinstance(item, int)] if isinstance(value, list) else []

    def texts(self, key: str) -> list[str]:
        """`detail[key]` as a list of text; what is no text is left out."""
        value = self.detail.get(key)
        return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


class EventLog:
    """Events in the order of their wall clocks."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._by_kind: dict[str, list[Event]] = {}
        for event in sorted(events, key=lambda event: event.wall_ns):
            self._by_kind.setdefault(event.kind, []).append(event)

    @classmethod
    def load(cls, source: Source, kinds: Sequence[str], attempt: int | None = None) -> EventLog:
        """Read the events of these kinds; none where there is no table of events."""
        if not source.has("events"):
            return cls([])
        few = source.few_events() if isinstance(source, Remembered) else None
        if few is None:
            marks = ", ".join("?" * len(kinds))
            only = "" if attempt is None else " AND attempt = ?"
            sql = f"{EVENTS_SQL} WHERE kind IN ({marks}){only} ORDER BY wall_ns LIMIT {MAX_EVENTS}"
            rows = source.rows(sql, [*kinds] if attempt is None else [*kinds, attempt])
        else:
            rows = [row for row in few if row[4] in kinds and attempt in (None, row[1])]
        return cls(
            Event(
                wall_ns or 0,
                found if found is not None else -1,
                rank if rank is not None else -1,
                step,
                kind,
                parsed_detail(detail),
            )
            for wall_ns, found, rank, step, kind, detail in rows
        )

    def all(self) -> list[Event]:
        """Every event, of one kind after the other."""
        return [event for events in self._by_kind.values() for event in events]

    def of(self, kind: str, *, attempt: int | None = None, step: int | None = None) -> list[Event]:
        """Events of a kind, of one attempt and one step if those are given."""
        return [
            event
            for event in self._by_kind.get(kind, [])
            if (attempt is None or event.attempt == attempt) and (step is None or event.step == step)
        ]


def parsed_detail(detail: Any) -> dict[str, Any]:
    """An event's whole line; empty if it is no JSON object."""
    if isinstance(detail, str):
        try:
            detail = json.loads(detail)
        except (ValueError, RecursionError):
            return {}
    return detail if isinstance(detail, dict) else {}
