"""A store in memory: readers of foreign files fill its tables, and analyzers query it like any store.

with MemoryStore() as store:
    store.add("log_events", [{"rank": 3, "kind": "exception", ...}])
    store.rows("SELECT rank FROM log_events")
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from probes.tape.format.schema import TABLES, Column
from store.database import Closing, connect_memory, interruptible
from store.ddl import SQL_TYPES, quoted, store_columns

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["MemoryStore"]

_NUMPY: dict[str, Any] = {"i64": np.int64, "i32": np.int32, "f64": np.float64, "bool": np.bool_}
BATCH_ROWS = 50_000
_CREATE = "; ".join(
    f"CREATE TABLE {quoted(table.name)} ("
    + ", ".join(f"{quoted(column.name)} {SQL_TYPES[column.type]}" for column in store_columns(table))
    + ")"
    for table in TABLES.values()
)
_NUMBERS = itertools.count()


@functools.cache
def _instance(pid: int) -> DuckDBPyConnection:
    """In-memory DuckDB with empty tables, which each store copies. It is started once per process, because its start
    takes as long as judging a small log.
    """
    connection = connect_memory()
    connection.execute(f"ATTACH ':memory:' AS empty; USE empty; {_CREATE}; USE memory")
    atexit.register(_instance.cache_clear)  # DuckDB's module prints an error for objects that outlive it
    return connection


def _forget(connection: DuckDBPyConnection, name: str) -> None:
    connection.execute(f"USE memory; DETACH {name}")
    connection.close()


class MemoryStore(Closing):
    """Implements `analyzers.source.Source`. A table that was never filled is empty, and `has` returns False for it."""

    def __init__(self) -> None:
        name = f"store{next(_NUMBERS)}"
        self._connection = _instance(os.getpid()).cursor()
        self._connection.execute(f"ATTACH ':memory:' AS {name}; COPY FROM DATABASE empty TO {name} (SCHEMA)")
        self._connection.execute(f"USE {name}")
        self._filled: set[str] = set()
        self._free = weakref.finalize(self, _forget, self._connection, name)
        self._free.atexit = False

    def add(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows. Missing columns are NULL, a missing `attempt` is 0."""
        named = {name for row in rows for name in row} | {"attempt"}
        columns = [column for column in store_columns(TABLES[table]) if column.name in named]
        names = ", ".join(quoted(column.name) for column in columns)
        self._filled.add(table)
        for first in range(0, len(rows), BATCH_ROWS):
            batch = rows[first : first + BATCH_ROWS]
            arrays = {column.name: _array(column, batch) for column in columns}
            nans = {f"{c.name} is nan": _is_nan(arrays[c.name]) for c in columns if c.type == "f64"}
            arrays |= nans
            picked = ", ".join(_picked(column) for column in columns)
            self._connection.register("batch_rows", arrays)
            try:
                with interruptible():
                    self._connection.execute(f"INSERT INTO {quoted(table)} ({names}) SELECT {picked} FROM batch_rows")
            finally:
                self._connection.unregister("batch_rows")

    def add_columns(self, table: str, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Append rows given as one array per column. Missing columns are NULL, a missing `attempt` is 0."""
        self._filled.add(table)
        num_rows = len(next(iter(columns.values())))
        self._connection.register("batch_rows", {"attempt": np.zeros(num_rows, dtype=np.int32), **columns})
        names = ", ".join(map(quoted, ("attempt", *columns)))
        try:
            with interruptible():
                self._connection.execute(f"INSERT INTO {quoted(table)} ({names}) SELECT {names} FROM batch_rows")
        finally:
            self._connection.unregister("batch_rows")

    def query(self, sql: str, params: Sequence[Any] = ()) -> dict[str, npt.NDArray[Any]]:
        """Return the result as one array per column."""
        with interruptible():
            found: dict[str, npt.NDArray[Any]] = self._connection.execute(sql, params).fetchnumpy()
        return found

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the result as tuples."""
        with interruptible():
            found: list[tuple[Any, ...]] = self._connection.execute(sql, params).fetchall()
        return found

    def has(self, table: str) -> bool:
        """Return True if rows of the table were added."""
        return table in self._filled

    def interrupt(self) -> None:
        """Cancel a query that runs in another thread."""
        self._connection.interrupt()

    def close(self) -> None:
        """Free the memory."""
        self._free()


def _picked(column: Column) -> str:
    name = quoted(column.name)
    value = f"CAST({name} AS {SQL_TYPES[column.type]})"
    if column.type != "f64":
        return value
    # The value is NULL for a NaN, and also if it is missing, so a separate column marks NaN.
    return f"CASE WHEN {quoted(f'{column.name} is nan')} THEN CAST('nan' AS DOUBLE) ELSE {value} END"


def _is_nan(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = np.isnan(np.ma.getdata(values)) & ~np.ma.getmaskarray(values)
    return found


def _array(column: Column, rows: Sequence[Mapping[str, Any]]) -> npt.NDArray[Any]:
    default = 0 if column.name == "attempt" else None
    values = [row.get(column.name, default) for row in rows]
    if column.type in _NUMPY:
        mask = np.array([value is None for value in values], dtype=bool)
        zero = _NUMPY[column.type](0)
        data = np.array([zero if value is None else value for value in values], dtype=_NUMPY[column.type])
        return np.ma.MaskedArray(data, mask) if mask.any() else data
    array = np.empty(len(values), dtype=object)
    array[:] = [json.dumps(value) if column.type == "json" and value is not None else value for value in values]
    return array
