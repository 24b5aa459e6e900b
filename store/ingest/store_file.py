"""Identity, read state and version of an existing store file, for its writer.

known = known_store(connection, path)     # (store_id, generation), or None for an empty file
if known is None:
    known = create(connection)
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from probes.tape import event_kinds
from probes.tape.events import MAX_LINE_BYTES, read_events
from probes.tape.format.schema import SCHEMA_VERSION
from store.database import (
    StoreBusyError,
    StoreCorruptError,
    StoreError,
    StoreForeignError,
    StoreOutdatedError,
    connect_attached,
    log_of,
)
from store.ddl import create_statements, fingerprint
from store.ingest.rank_folders import Folder
from store.ingest.read_positions import ReadState, load

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["check_origin", "create", "identity_of", "known_store", "load_read_only", "remember"]

MAX_REMEMBERED = 64
_remembered: OrderedDict[tuple[object, ...], ReadState] = OrderedDict()
"""Cached read states of unchanged files. Loading a read state takes a quarter of the time in which the store of a small
run is opened.
"""


def identity_of(path: Path) -> tuple[int, ...] | None:
    """Identity of the file, which changes when another process writes or replaces it; None if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def load_read_only(path: Path, wait_s: float, folders: Sequence[Folder]) -> ReadState | None:
    """Load the read state of a store with the current schema; None if it must be opened for writing, created, or set
    aside."""
    import duckdb

    file = _file_of(path)
    if (state := _remembered.get(file)) is not None:
        return state
    try:
        connection = connect_attached({"store": path}, wait_s=wait_s)
    except StoreBusyError:
        raise
    except StoreError:
        return None
    try:
        rows = connection.execute("SELECT schema_version, fingerprint FROM store.main.ingest_meta").fetchall()
        if rows != [(SCHEMA_VERSION, fingerprint())]:
            return None
        check_origin(connection, path, folders, "store.main")
        state = load(connection, "store.main")
    except (duckdb.Error, StoreForeignError):
        return None
    finally:
        connection.close()
    _keep(file, state)
    return state


def remember(path: Path, state: ReadState) -> None:
    """Cache the read state of a store that was just written, for the next reader in this process."""
    _keep(_file_of(path), state)


def _file_of(path: Path) -> tuple[object, ...]:
    return path, identity_of(path), identity_of(log_of(path)), fingerprint()


def _keep(file: tuple[object, ...], state: ReadState) -> None:
    _remembered[file] = state
    if len(_remembered) > MAX_REMEMBERED:
        _remembered.popitem(last=False)


def known_store(connection: DuckDBPyConnection, path: Path) -> tuple[str, int] | None:
    """Return (store_id, generation) of a store that this version can continue, None if the file is empty."""
    import duckdb

    try:
        rows = connection.execute(
            "SELECT schema_version, fingerprint, store_id, generation FROM ingest_meta"
        ).fetchall()
    except (duckdb.CatalogException, duckdb.BinderException):
        (count,) = connection.execute("SELECT count(*) FROM duckdb_tables()").fetchall()[0]
        if not count:
            return None
        raise StoreCorruptError(f"{path} is not a store of rankscope") from None
    if len(rows) != 1:
        raise StoreCorruptError(f"{path} has damaged metadata")
    version, mark, store_id, generation = rows[0]
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} was written with schema {version}, this rankscope reads up to {SCHEMA_VERSION}: update rankscope"
        )
    if mark != fingerprint():
        raise StoreOutdatedError(f"{path} has the tables of another version of rankscope")
    return str(store_id), int(generation)


def check_origin(connection: DuckDBPyConnection, path: Path, folders: Sequence[Folder], schema: str = "main") -> None:
    """Raise StoreForeignError if the store has none of the ranks' processes that the folders have, but others."""
    import duckdb

    try:
        stored = set(connection.execute(f"SELECT attempt, rank, pid, start_ticks FROM {schema}.ranks").fetchall())
    except duckdb.Error:
        return  # damage, which a later query reports
    known = {row[:2] for row in stored}
    is_foreign = False
    for folder in folders:
        found = _processes(folder) if (folder.attempt, folder.rank) in known else []
        if not stored.isdisjoint(found):
            return
        is_foreign = is_foreign or bool(found)
    if is_foreign:
        raise StoreForeignError(f"{path} has the records of another run")


def _processes(folder: Folder) -> list[tuple[int, int, int, int]]:
    """(attempt, rank, pid, start of the process) of the first identities that a rank recorded."""
    try:
        events, _, _ = read_events(folder.path / "events.jsonl", 0, MAX_LINE_BYTES)
    except OSError:
        return []
    return [
        (folder.attempt, folder.rank, event["pid"], event["start_ticks"])
        for event in events
        if event["kind"] == event_kinds.RANK and isinstance(event.get("pid"), int) and "start_ticks" in event
    ]


def create(connection: DuckDBPyConnection) -> tuple[str, int]:
    """Create the tables of a new store; returns its (store_id, generation)."""
    connection.execute("; ".join(create_statements()))  # separate statements would take twice as long
    store_id = uuid.uuid4().hex
    connection.execute("INSERT INTO ingest_meta VALUES ($1, $2, $3, 0)", [SCHEMA_VERSION, fingerprint(), store_id])
    return store_id, 0
