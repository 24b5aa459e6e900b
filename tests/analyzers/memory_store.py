"""A store in memory for tests of analyzers: the tables of the schema, filled with what a test says.

store = MemoryStore()
store.add("steps", [{"attempt": 0, "rank": 1, "step": 3, "loss": 2.5}])
store.event("rollback", attempt=0, rank=0, step=40, from_step=40, to_step=30)
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import duckdb
import numpy as np

from probes.tape.format.schema import TABLES
from store.ddl import SQL_TYPES, store_columns
from store.reader import _plain
from store.sql.parsed import parsed

_CREATE = "; ".join(
    f"CREATE TABLE {table.name} ("
    + ", ".join(f'"{column.name}" {SQL_TYPES[column.type]}' for column in store_columns(table))
    + ")"
    for table in TABLES.values()
)


_FEW_ROWS = 16
"""Up to which a statement with the values in its text is quicker than columns."""
_NUMBERS = itertools.count()


@functools.cache
def _instance() -> duckdb.DuckDBPyConnection:
    """DuckDB, started once a process, with empty tables to copy: to start it takes longer than most tests.

    Without its optimizer: of a few rows, planning takes longer than answering. A real store has it.
    """
    connection = duckdb.connect(config={"threads": 1})
    connection.execute(f"ATTACH ':memory:' AS empty; USE empty; {_CREATE}; USE memory; PRAGMA disable_optimizer")
    atexit.register(_instance.cache_clear)  # DuckDB's module complains of objects that outlive it
    return connection


def _forget(connection: duckdb.DuckDBPyConnection, name: str) -> None:
    connection.close()
    _instance().execute(f"DETACH {name}")


class MemoryStore:
    """Fits `analyzers.source.Source`. Unset columns are NULL."""

    def __init__(self) -> None:
        self._name = name = f"store{next(_NUMBERS)}"
        _instance().execute(f"ATTACH ':memory:' AS {name}; COPY FROM DATABASE empty TO {name} (SCHEMA)")
        self.connection = _instance().cursor()
        self.connection.execute(f"USE {name}; PRAGMA disable_optimizer")
        self._gone: set[str] = set()
        weakref.finalize(self, _forget, self.connection, name).atexit = False

    def copy(self) -> MemoryStore:
        """Another store with the same rows."""
        made = MemoryStore()
        for table in TABLES.keys() - self._gone:
            made.connection.execute(f"INSERT INTO {table} FROM {self._name}.{table}")
        for table in self._gone:
            made.drop(table)
        return made

    def query(self, sql: str, params: Sequence[Any] = ()) -> dict[str, Any]:
        found = self.connection.execute(parsed(self.connection, sql), list(params)).fetchnumpy()
        return {name: _plain(values) for name, values in found.items()}

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self.connection.execute(parsed(self.connection, sql), list(params)).fetchall()

    def has(self, table: str) -> bool:
        return table in TABLES and table not in self._gone

    def drop(self, table: str) -> None:
        self.connection.execute(f"DROP TABLE {table}")
        self._gone.add(table)

    def add(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert rows, with one statement."""
        if not rows:
            return
        names = list(rows[0])
        if len(rows) > _FEW_ROWS and (whole := _columns(names, rows)):
            self.add_columns(table, **whole)
            return
        values = ", ".join("(" + ", ".join(_literal(row[name]) for name in names) + ")" for row in rows)
        columns = ", ".join(f'"{name}"' for name in names)
        self.connection.execute(f"INSERT INTO {table} ({columns}) VALUES {values}")

    def add_columns(self, table: str, **columns: Any) -> None:
        """Insert whole numpy columns: for big tables."""
        frame = {
            name: column if isinstance(column, np.ma.MaskedArray) else np.ascontiguousarray(column)
            for name, column in columns.items()
        }
        names = ", ".join(f'"{name}"' for name in frame)
        self.connection.register("incoming", frame)
        self.connection.execute(f"INSERT INTO {table} ({names}) SELECT {names} FROM incoming")
        self.connection.unregister("incoming")

    def event(
        self, kind: str, *, attempt: int = 0, rank: int = -1, step: int | None = None, wall_ns: int = 0, **detail: Any
    ) -> None:
        """One event, as `probes.tape.events` writes it."""
        line = {"wall_ns": wall_ns, "attempt": attempt, "rank": rank, "kind": kind, "step": step, **detail}
        row = {"attempt": attempt, "rank": rank, "wall_ns": wall_ns, "step": step, "kind": kind}
        self.add("events", [row | {"detail": json.dumps(line)}])


def _columns(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The rows as numpy columns, with a mask where there are NULLs; None unless each column has values of one type."""
    found: dict[str, Any] = {}
    for name in names:
        values = [row[name] for row in rows]
        known = [value for value in values if value is not None]
        if not known:
            continue  # NULL, as a column that is not named
        (kind, *others) = {type(value) for value in known}
        if others or kind not in (bool, int, float, str):
            return None
        if kind is float and any(map(math.isnan, known)):
            return None  # DuckDB reads a NaN of numpy as NULL
        if kind is int and not -(2**63) <= min(known) <= max(known) < 2**63:
            return None
        if kind is str:
            found[name] = np.array(values, dtype=object)
            continue
        array = np.array([kind() if value is None else value for value in values], dtype=np.dtype(kind))
        is_null = [value is None for value in values]
        found[name] = np.ma.MaskedArray(array, is_null) if any(is_null) else array
    return found


def _literal(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, (float, np.floating)) and not math.isfinite(value):
        return f"'{value}'::DOUBLE"
    if isinstance(value, (int, float, np.number)):
        return repr(float(value)) if isinstance(value, (float, np.floating)) else str(int(value))
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    return "'" + str(value).replace("'", "''") + "'"
