"""Statements that a process has parsed: analyzers ask the same for each run and, of a live one, with each tick.

    connection.execute(parsed(connection, "SELECT max(step) FROM steps WHERE rank = ?"), [3])

On a small run a quarter of the CPU time of a diagnosis was parsing. Values belong in parameters: a text with another
number in it is another statement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection, Statement

__all__ = ["parsed"]

_MOST = 500
"""A report asks some hundred."""
_statements: dict[str, Statement] = {}


def parsed(connection: DuckDBPyConnection, sql: str) -> str | Statement:
    """What `execute` takes in place of the text; the text itself where it is not one statement. Raises duckdb.Error."""
    statement = _statements.get(sql)
    if statement is None:
        found = connection.extract_statements(sql)
        if len(found) != 1:
            return sql
        if len(_statements) >= _MOST:
            _statements.clear()
        _statements[sql] = statement = found[0]
    return statement
