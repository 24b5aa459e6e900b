"""Cache of parsed statements: analyzers run the same queries for each run, and at each tick of a live run.

    connection.execute(parsed(connection, "SELECT max(step) FROM steps WHERE rank = ?"), [3])

Without it, a quarter of the CPU time of a small run's diagnosis is parsing. Pass values as parameters: each literal
value would add another statement to the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection, Statement

__all__ = ["parsed"]

_MAX_STATEMENTS = 500
"""Maximum number of cached statements; a report runs some hundred different ones."""
_statements: dict[str, Statement] = {}


def parsed(connection: DuckDBPyConnection, sql: str) -> str | Statement:
    """Return the parsed statement for `execute`, or the text if it is not one statement. Raises duckdb.Error."""
    statement = _statements.get(sql)
    if statement is None:
        found = connection.extract_statements(sql)
        if len(found) != 1:
            return sql
        if len(_statements) >= _MAX_STATEMENTS:
            _statements.clear()
        _statements[sql] = statement = found[0]
    return statement
