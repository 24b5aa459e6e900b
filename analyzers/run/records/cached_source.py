"""A source that caches the answers to short queries for one diagnosis.

    cached = CachedSource(store)
    cached.rows("SELECT 1 FROM steps LIMIT 1")    # some thirty analyses ask whether there are steps
    cached.few_events()                          # and some twenty read events of one kind or another

For a small run nearly half of a diagnosis's queries are repetitions, and planning a query takes longer than running it.
A cached answer does not change during the diagnosis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from analyzers.source import Source

__all__ = ["EVENTS_SQL", "CachedSource"]

_MAX_ROWS = 1_000
"""Maximum number of rows of a cached answer of `rows`: longer answers are few and large."""
_MAX_VALUES = 20_000
"""Maximum number of values (rows times columns) of a cached answer of `query`."""
EVENTS_SQL = "SELECT wall_ns, attempt, rank, step, kind, detail FROM events"
EventRows = list[tuple[Any, ...]]


class CachedSource:
    """Short answers are cached; each caller gets its own copy."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._answers: dict[tuple[str, str], list[tuple[Any, ...]]] = {}
        self._columns: dict[tuple[str, str], dict[str, npt.NDArray[Any]]] = {}
        self._events: tuple[EventRows | None] | None = None

    def query(self, sql: str, params: Sequence[Any] = ()) -> dict[str, npt.NDArray[Any]]:
        question = (sql, repr(params))
        if (found := self._columns.get(question)) is None:
            found = self._source.query(sql, params)
            if sum(values.size for values in found.values()) > _MAX_VALUES:
                return found
            self._columns[question] = found
        return {name: values.copy() for name, values in found.items()}

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        question = (sql, repr(params))
        if (known := self._answers.get(question)) is not None:
            return list(known)
        found = self._source.rows(sql, params)
        if len(found) <= _MAX_ROWS:
            self._answers[question] = list(found)
        return found

    def few_events(self) -> EventRows | None:
        """All rows of `EVENTS_SQL`, oldest first; None if there are too many to cache."""
        if self._events is None:
            found = self._source.rows(f"{EVENTS_SQL} ORDER BY wall_ns LIMIT {_MAX_ROWS + 1}")
            self._events = (found if len(found) <= _MAX_ROWS else None,)
        return self._events[0]

    def has_values(self, table: str) -> dict[str, bool]:
        """{column: whether it has a value}. Only the first `_MAX_ROWS` rows are read. If the table may have more rows,
        columns without a value in the rows read are left out."""
        counted = self.query(f"SELECT count(*) AS num_rows, count(COLUMNS(*)) FROM (FROM {table} LIMIT {_MAX_ROWS})")
        is_long = counted.pop("num_rows")[0] == _MAX_ROWS
        return {name: bool(num[0]) for name, num in counted.items() if num[0] or not is_long}

    def has(self, table: str) -> bool:
        return self._source.has(table)

    def interrupt(self) -> None:
        """Interrupt the query of another thread if the source supports it, since a plug-in's query may never end."""
        if (stop := getattr(self._source, "interrupt", None)) is not None:
            stop()
