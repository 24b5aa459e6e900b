"""Copy rows of a former store into a new one if their tapes are retired.

    carry_over(Path("telemetry.duckdb.quarantine"), Path("telemetry.duckdb"))

All tables that both stores have are copied, in their common columns, with the read positions. Later records are then
ingested from the tapes as usual, so nothing is stored twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from store.database import WAIT_S, StoreError, attach_for_writing, connect_attached, connect_writer, log_of, translated
from store.ddl import quoted
from store.ingest.store_file import create

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["carry_over"]

_META = "ingest_meta"


def carry_over(former: Path, fresh: Path) -> dict[str, int]:
    """Make the store `fresh` with the rows of `former`; returns the number of finished ones by table.

    Raises StoreError; then there is no `fresh`.
    """
    import duckdb

    rows: dict[str, int] = {}
    try:
        connection = connect_writer(fresh, wait_s=WAIT_S, threads=1)
        create(connection)
        connection.close()
        connection = connect_attached({"former": former}, wait_s=WAIT_S)
        try:
            attach_for_writing(connection, "fresh", fresh)
            for table, columns in _common_columns(connection).items():
                names = ", ".join(quoted(column) for column in columns)
                target, source = f"fresh.main.{quoted(table)}", f"former.main.{quoted(table)}"
                ((number,),) = connection.execute(
                    f"INSERT INTO {target} ({names}) SELECT {names} FROM {source}"
                ).fetchall()
                if not table.startswith("ingest_") and not table.endswith("_open"):
                    rows[table.removesuffix("_done")] = int(number)
        finally:
            connection.close()
    except (duckdb.Error, ValueError) as error:
        fresh.unlink(missing_ok=True)
        log_of(fresh).unlink(missing_ok=True)
        if isinstance(error, StoreError):
            raise
        raise translated(error, former) from error
    return rows


def _common_columns(connection: DuckDBPyConnection) -> dict[str, list[str]]:
    """Columns by table, of the tables that both stores have."""
    rows = connection.execute(
        "SELECT c.table_name, c.column_name FROM duckdb_columns() c "
        "JOIN duckdb_tables() t USING (database_name, schema_name, table_name) WHERE c.schema_name = 'main' "
        f"AND c.database_name IN ('former', 'fresh') AND c.table_name <> '{_META}' "
        "GROUP BY ALL HAVING count(*) = 2 ORDER BY ALL"
    ).fetchall()
    found: dict[str, list[str]] = {}
    for table, column in rows:
        found.setdefault(str(table), []).append(str(column))
    return found
