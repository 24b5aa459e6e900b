"""Copy the rows of a former store into a new one; the tapes of the oldest rows may have been removed.

    carry_over(Path("telemetry.duckdb.quarantine"), Path("telemetry.duckdb"))

All tables that both stores have are copied, in their common columns, with the read positions. Later records are then
ingested from the tapes as usual, so nothing is stored twice.
"""

from __future__ import annotations

from pathlib import Path

from store.database import (
    WAIT_S,
    StoreError,
    as_store_error,
    connect_attached,
    connect_writer,
    log_of,
    require_regular_file,
)
from store.ddl import quoted
from store.ingest.store_file import create
from store.views import columns_of

__all__ = ["carry_over"]

_META = "ingest_meta"


def carry_over(former: Path, fresh: Path) -> dict[str, int]:
    """Create the store `fresh` with the rows of `former`. Returns the number of finished rows by table.

    Raises StoreError; `fresh` then does not exist.
    """
    import duckdb

    rows: dict[str, int] = {}
    try:
        connection = connect_writer(fresh, wait_s=WAIT_S, threads=1)
        create(connection)
        connection.close()
        connection = connect_attached({"former": former}, wait_s=WAIT_S)
        try:
            require_regular_file(fresh)
            literal = str(fresh).replace("'", "''")
            connection.execute(f"ATTACH '{literal}' AS fresh")
            schemas = columns_of(connection)
            for table in sorted(name for database, name in schemas if database == "former" and name != _META):
                columns = schemas["former", table] & schemas.get(("fresh", table), set())
                names = ", ".join(quoted(column) for column in sorted(columns))
                if not names:
                    continue
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
        raise as_store_error(error, former) from error
    return rows
