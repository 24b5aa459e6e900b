"""The run's events, read once and selected by kind, attempt and step.

    log = EventLog.load(source, (event_kinds.ROLLBACK, event_kinds.BATCH_SKIPPED))
    log.of(event_kinds.ROLLBACK, attempt=0)[0].detail["to_step"]

The events' contents come from the run and may be damaged, so every lookup has a type and a default.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from analyzers.run.records.cached_source import EVENTS_SQL, CachedSource
from analyzers.source import Source

__all__ = ["Event", "EventLog", "parsed_detail"]

MAX_EVENTS = 200_000
"""Events read per run; later ones are ignored."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `rank` -1 is a node process; `detail` is the parsed line."""

    wall_ns: int
    attempt: int
    rank: int
    step: int | None
    kind: str
    detail: dict[str, Any]

    def integer(self, key: str, default: int = -1) -> int:
        """`detail[key]` if it is an int, else the default."""
        value = self.detail.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def text(self, key: str, default: str = "") -> str:
        """`detail[key]` if it is text, else the default."""
        value = self.detail.get(key)
        return value if isinstance(value, str) else default

    def number(self, key: str) -> float | None:
        """`detail[key]` as a float; None if it is missing or not a number."""
        try:
            return float(self.detail[key])
        except (KeyError, TypeError, ValueError):
            return None

    def integers(self, key: str) -> list[int]:
        """The ints in the list `detail[key]`."""
        value = self.detail.get(key)
        return [item for item in value if isinstance(item, int)] if isinstance(value, list) else []

    def texts(self, key: str) -> list[str]:
        """The strings in the list `detail[key]`."""
        value = self.detail.get(key)
        return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


class EventLog:
    """Events ordered by wall time."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._by_kind: dict[str, list[Event]] = {}
        for event in sorted(events, key=lambda event: event.wall_ns):
            self._by_kind.setdefault(event.kind, []).append(event)

    @classmethod
    def load(cls, source: Source, kinds: Sequence[str], attempt: int | None = None) -> EventLog:
        """Read the events of these kinds; empty without a table of events."""
        if not source.has("events"):
            return cls([])
        few = source.few_events() if isinstance(source, CachedSource) else None
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
                event_attempt if event_attempt is not None else -1,
                rank if rank is not None else -1,
                step,
                kind,
                parsed_detail(detail),
            )
            for wall_ns, event_attempt, rank, step, kind, detail in rows
        )

    def all(self) -> list[Event]:
        """Every event, grouped by kind."""
        return [event for events in self._by_kind.values() for event in events]

    def of(self, kind: str, *, attempt: int | None = None, step: int | None = None) -> list[Event]:
        """Events of a kind, filtered by attempt and step if given."""
        return [
            event
            for event in self._by_kind.get(kind, [])
            if (attempt is None or event.attempt == attempt) and (step is None or event.step == step)
        ]


def parsed_detail(detail: Any) -> dict[str, Any]:
    """An event's parsed line; empty if it is not a JSON object."""
    if isinstance(detail, str):
        try:
            detail = json.loads(detail)
        except (ValueError, RecursionError):
            return {}
    return detail if isinstance(detail, dict) else {}
