"""A source that asks the store each short question once, for the length of one diagnosis.

    asked = Remembered(store)
    asked.rows("SELECT 1 FROM steps LIMIT 1")    # some thirty analyses ask whether there are steps
    asked.few_events()                           # and some twenty read events of one kind or another

Of a small run nearly half of the questions of a diagnosis were asked before, and planning one takes longer than
answering it. A diagnosis is of the records as they were when it began to ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from analyzers.source import Source

__all__ = ["EVENTS_SQL", "Remembered"]

_MAX_ROWS = 1_000
"""Longer answers are not kept: they are few, and large."""
EVENTS_SQL = "SELECT wall_ns, attempt, rank, step, kind, detail FROM events"
EventRows = list[tuple[Any, ...]]


class Remembered:
    """Answers of `rows` are kept; those of `query` are arrays that may be large, and are seldom asked twice."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._answers: dict[tuple[str, str], list[tuple[Any, ...]]] = {}
        self._events: tuple[EventRows | None] | None = None

    def query(self, sql: str, params: Sequence[Any] = ()) -> dict[str, npt.NDArray[Any]]:
        return self._source.query(sql, params)

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        question = (sql, repr(params))
        if (known := self._answers.get(question)) is not None:
            return list(known)
        found = self._source.rows(sql, params)
        if len(found) <= _MAX_ROWS:
            self._answers[question] = list(found)
        return found

    def few_events(self) -> EventRows | None:
        """All rows of `EVENTS_SQL`, oldest first; None where they are too many to be kept."""
        if self._events is None:
            found = self._source.rows(f"{EVENTS_SQL} ORDER BY wall_ns LIMIT {_MAX_ROWS + 1}")
            self._events = (found if len(found) <= _MAX_ROWS else None,)
        return self._events[0]

    def has(self, table: str) -> bool:
        return self._source.has(table)

    def interrupt(self) -> None:
        """End the query that another thread runs, where the source can: a plug-in's may never end."""
        if (stop := getattr(self._source, "interrupt", None)) is not None:
            stop()
