"""Set aside stores that can be opened but not completely read, and rebuild them from the tapes.

    with Store.open(run) as store: ...
    if store.damage and rebuild_damaged(run): ...        # open it again

DuckDB verifies a block when it reads it, so damage within a store surfaces only in a query that reads that block.
"""

from __future__ import annotations

from pathlib import Path

from probes.tape.rundir import RunDir
from store.database import READER, WAIT_S, StoreCorruptError, StoreError, as_store_error, connect_attached
from store.ddl import quoted
from store.ingest.ingest import Ingester
from store.ingest.rank_folders import folders_by_node

__all__ = ["find_damage", "rebuild_damaged"]


def find_damage(path: Path) -> StoreCorruptError | None:
    """Read every value of a store and return the first error of damage, or None. Raises StoreError if the store cannot
    be opened for another reason.
    """
    import duckdb

    try:
        connection = connect_attached({"store": path}, wait_s=WAIT_S)
    except StoreCorruptError as error:
        return error
    try:
        names = connection.execute("SELECT table_name FROM duckdb_tables() WHERE database_name = 'store'").fetchall()
        for (name,) in names:
            connection.execute(f"SELECT count(*), sum(hash(t)) FROM store.main.{quoted(name)} t").fetchall()
    except duckdb.Error as error:
        store_error = as_store_error(error, path)
        return store_error if isinstance(store_error, StoreCorruptError) else None
    finally:
        connection.close()
    return None


def rebuild_damaged(run: RunDir) -> bool:
    """Set a run's damaged stores aside and rebuild them. Returns False if none is damaged, `watch` is writing, or the
    folder is read-only.
    """
    is_rebuilt = False
    for node, folders in folders_by_node(run).items():
        try:
            with Ingester(run, node, role=READER, threads=2, wait_s=WAIT_S, folders=folders) as ingester:
                if ingester.path.exists() and (error := find_damage(ingester.path)) is not None:
                    ingester.set_aside(error)
                    ingester.catch_up()
                    is_rebuilt = True
        except (StoreError, OSError):
            continue
    return is_rebuilt
