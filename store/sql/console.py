"""Run SQL typed by a user: one read-only statement, with limits on rows and time.

    answer = run(connection, "SELECT rank, median(duration_ns) FROM steps GROUP BY rank", max_rows=1000, limit_s=10)
    answer.names, answer.rows, answer.is_cut

`database.lock_down` has already denied the connection files, network, extensions and settings. This module adds the
remaining limits: read-only statements, a row limit and a time limit.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from store.database import StoreError

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["ConsoleAnswer", "run"]

_NO_ZONES = (
    "a TIMESTAMP WITH TIME ZONE cannot be read without the package pytz: in place of to_timestamp(wall_ns / 1e9) use "
    "make_timestamp(wall_ns // 1000), which is UTC"
)
_READ_ONLY = "SELECT"
"""Type of read-only statements. To DuckDB, DESCRIBE, SHOW, SUMMARIZE and FROM are SELECT statements, too."""
_SYSTEM_TABLE = re.compile(r"Did you mean \"?(pg_|duckdb_|sqlite_|information_schema)")
_EXPLAIN = re.compile(r"\s*EXPLAIN\b(\s+ANALYZE\b)?(?P<options>\s*\([^()]*\))?(?P<rest>.*)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleAnswer:
    """Result of a statement. `is_cut`: the statement has more rows. `took_s`: duration in seconds."""

    names: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    is_cut: bool
    took_s: float
    types: tuple[str, ...] = ()
    """DuckDB type of each column."""


def run(
    connection: DuckDBPyConnection,
    sql: str,
    params: Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    max_rows: int,
    limit_s: float,
) -> ConsoleAnswer:
    """Run one read-only statement. Raises StoreError with a message of DuckDB or of this module."""
    import duckdb

    began = time.monotonic()
    try:
        sql.encode()  # bytes that are not UTF-8 would end the process
    except UnicodeEncodeError as error:
        raise StoreError(f"character {error.start + 1} of the statement is not UTF-8: remove it") from None
    try:
        statements = connection.extract_statements(sql)
    except duckdb.Error as error:
        raise StoreError(_one_line(error)) from None
    if not statements:
        raise StoreError("there is no statement")
    if len(statements) > 1:
        raise StoreError(f"one statement at a time; there are {len(statements)}")
    kind = statements[0].type.name
    if kind == "EXPLAIN":
        kind = _explained_type(connection, statements[0].query)
    if kind != _READ_ONLY:
        raise StoreError(f"{kind} is not allowed: this console is read-only")
    timer = threading.Timer(limit_s, connection.interrupt)
    timer.start()
    try:
        found = connection.execute(statements[0], params)
        names = tuple(str(column[0]) for column in found.description or ())
        types = tuple(str(column[1]) for column in found.description or ())
        rows = found.fetchmany(max_rows + 1)
    except duckdb.InterruptException:
        raise StoreError(f"it took longer than {limit_s:g} s and was cancelled: query fewer steps or ranks") from None
    except duckdb.Error as error:
        if isinstance(error, duckdb.OutOfMemoryException):  # its advice is to change settings, which are locked
            raise StoreError(f"{str(error).partition(chr(10))[0]}: query fewer steps or ranks") from None
        if "'pytz'" in str(error):  # DuckDB needs pytz only for timestamps with a time zone
            raise StoreError(_NO_ZONES) from None
        raise StoreError(_one_line(error)) from None
    finally:
        timer.cancel()
    took_s = time.monotonic() - began
    return ConsoleAnswer(names=names, rows=rows[:max_rows], is_cut=len(rows) > max_rows, took_s=took_s, types=types)


def _one_line(error: Exception) -> str:
    """DuckDB's error in one line: message, similar names and line number, without the excerpt of the statement."""
    text, _, place = str(error).partition("\n\nLINE ")
    line = f" (line {number})" if (number := place.partition(":")[0]).isdecimal() and number != "1" else ""
    parts = [part.strip() for part in text.splitlines() if part.strip()]
    parts = [part for part in parts if not _SYSTEM_TABLE.match(part)]
    return "; ".join(part.rstrip("!") for part in parts)[:2000] + line


def _explained_type(connection: DuckDBPyConnection, sql: str) -> str:
    """Type of the statement after EXPLAIN. It has to be checked: EXPLAIN ANALYZE executes it, and COPY may write to
    attached files.
    """
    import duckdb

    parts = _EXPLAIN.fullmatch(sql)
    for rest in (parts["rest"], (parts["options"] or "") + parts["rest"]) if parts else ():
        try:
            statements = connection.extract_statements(rest)
        except duckdb.Error:
            continue
        if len(statements) == 1:
            return statements[0].type.name
    return "EXPLAIN of this"
