"""Copy a store into a new file with secrets redacted in all of its texts.

    copy_store(Path("runs/demo/telemetry.duckdb"), Path("/tmp/x/telemetry.duckdb"), redact, first_step=None)

The copy is written row by row into a new file, so the original of a redacted text is nowhere in it, not even in free
space.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from store.database import WAIT_S, as_store_error, connect_attached
from store.ddl import quoted

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["copy_store"]

_TEXTS = ("VARCHAR", "JSON")
_FETCH_ROWS = 10_000
_STORAGE_VERSION = "v1.4.0"
_BY_STEP = ("steps", "spans", "collectives", "gradients", "scalars")


def copy_store(source: Path, target: Path, redact: Callable[[str], str], *, first_step: int | None = None) -> None:
    """Copy every table. With `first_step`, rows of earlier steps are left out. Raises StoreError."""
    import duckdb

    connection = connect_attached({"original": source}, wait_s=WAIT_S)
    try:
        literal = str(target).replace("'", "''")
        connection.execute(f"ATTACH '{literal}' AS copy (STORAGE_VERSION '{_STORAGE_VERSION}')")
        connection.execute("CREATE TABLE memory.main.redacted (before VARCHAR, after VARCHAR)")
        for table, columns in _tables(connection).items():
            _copy_table(connection, table, columns, redact, first_step)
        connection.execute("CHECKPOINT copy")
    except duckdb.Error as error:
        raise as_store_error(error, source) from error
    finally:
        connection.close()


def _tables(connection: DuckDBPyConnection) -> dict[str, list[tuple[str, str]]]:
    """Return {table: (column, type)}, without views: a view in an untrusted file may compute anything."""
    rows = connection.execute(
        "SELECT c.table_name, c.column_name, c.data_type FROM duckdb_columns() c "
        "JOIN duckdb_tables() t USING (database_name, schema_name, table_name) "
        "WHERE c.database_name = 'original' AND c.schema_name = 'main' ORDER BY c.table_name, c.column_index"
    ).fetchall()
    found: dict[str, list[tuple[str, str]]] = {}
    for table, column, kind in rows:
        found.setdefault(table, []).append((column, kind))
    return found


def _copy_table(
    connection: DuckDBPyConnection,
    table: str,
    columns: list[tuple[str, str]],
    redact: Callable[[str], str],
    first_step: int | None,
) -> None:
    name = f"original.main.{quoted(table)}"
    picked = []
    for column, kind in columns:
        if kind in _TEXTS and _redact_column(connection, name, column, redact):
            after = f"(SELECT after FROM memory.main.redacted WHERE before = CAST(t.{quoted(column)} AS VARCHAR))"
            picked.append(f"coalesce(CAST({after} AS {kind}), t.{quoted(column)}) AS {quoted(column)}")
        else:
            picked.append(f"t.{quoted(column)}")
    where = ""
    if first_step is not None and table.removesuffix("_done") in _BY_STEP and "step" in dict(columns):
        where = f" WHERE t.step IS NULL OR t.step >= {int(first_step)}"
    connection.execute(f"CREATE TABLE copy.main.{quoted(table)} AS SELECT {', '.join(picked)} FROM {name} t{where}")


def _redact_column(connection: DuckDBPyConnection, name: str, column: str, redact: Callable[[str], str]) -> bool:
    """Collect the texts of a column that contain a secret. Returns True if there are any."""
    cursor = connection.cursor()
    cursor.execute(f"SELECT DISTINCT CAST({quoted(column)} AS VARCHAR) FROM {name} WHERE {quoted(column)} IS NOT NULL")
    has_secrets = False
    while rows := cursor.fetchmany(_FETCH_ROWS):
        changed = [(text, after) for (text,) in rows if (after := redact(text)) != text]
        if changed:
            connection.executemany(
                "INSERT INTO memory.main.redacted SELECT ?, ? WHERE NOT EXISTS "
                "(SELECT 1 FROM memory.main.redacted WHERE before = ?)",
                [(before, after, before) for before, after in changed],
            )
            has_secrets = True
    return has_secrets
