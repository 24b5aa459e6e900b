"""The store's tables as SQL, generated from `probes.tape.format.schema`.

    for statement in create_statements():
        connection.execute(statement)

A table whose records can be open becomes two tables and a view: `<table>_done` only grows, `<table>_open` holds records
that have started and not ended (replaced at each tick), and the view `<table>` shows both. Only the ingester uses the
first two.
"""

from __future__ import annotations

import functools
import hashlib

from probes.tape.format.schema import SCHEMA_VERSION, TABLES, Column, Table

__all__ = ["SEGMENT", "SQL_TYPES", "create_statements", "fingerprint", "finished_table", "quoted", "store_columns"]

SQL_TYPES = {
    "i64": "BIGINT",
    "i32": "INTEGER",
    "bool": "BOOLEAN",
    "f64": "DOUBLE",
    "name": "VARCHAR",
    "text": "VARCHAR",
    "json": "JSON",
    "list_i64": "BIGINT[]",
}
SEGMENT = "_segment"
"""Column of the `_open` tables: the tape segment that an open row was read from."""

_ATTEMPT = Column("attempt", "i32", "1", "number of the worker group's launch, from 0")
_RANK = Column("rank", "i32", "1", "global rank; -1: a node process (watch, launcher)")
_WALL = Column("wall_ns", "i64", "ns", "when the event was written", is_time=True)
_STEP = Column("step", "i64", "1", "training step during which it was written, NULL if none")

_BOOKKEEPING = (
    "CREATE TABLE ingest_meta (schema_version INTEGER, fingerprint VARCHAR, store_id VARCHAR, generation BIGINT)",
    "CREATE TABLE ingest_positions (path VARCHAR, source_table VARCHAR, attempt INTEGER, rank INTEGER, "
    "segment INTEGER, next_place BIGINT, pending BIGINT[], open_digest VARCHAR, dropped BIGINT, done BOOLEAN)",
    "CREATE TABLE ingest_bytes (path VARCHAR, next_byte BIGINT, skipped_lines BIGINT)",
    "CREATE TABLE ingest_anchors (path VARCHAR, wall_minus_mono_ns BIGINT)",
    "CREATE TABLE ingest_problems (path VARCHAR, problem VARCHAR)",
)


def store_columns(table: Table) -> tuple[Column, ...]:
    """Columns of a stored table, in order: attempt, rank, for events time and step, then `table.columns`."""
    if table.source == "event":
        return (_ATTEMPT, _RANK, _WALL, _STEP, *table.columns)
    return (_ATTEMPT, _RANK, *table.columns)


def finished_table(table: Table) -> str:
    """Name of the table to which finished rows are appended."""
    return f"{table.name}_done" if table.can_be_open else table.name


def quoted(name: str) -> str:
    """Quote a name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def create_statements() -> list[str]:
    """SQL statements that create all tables and views of an empty store."""
    statements = list(_BOOKKEEPING)
    for _, table in sorted(TABLES.items()):  # sorted, so that the order of the dict does not change the fingerprint
        columns = ", ".join(f"{quoted(c.name)} {SQL_TYPES[c.type]}" for c in store_columns(table))
        statements.append(f"CREATE TABLE {finished_table(table)} ({columns})")
        if table.can_be_open:
            names = ", ".join(quoted(c.name) for c in store_columns(table))
            statements.append(f"CREATE TABLE {table.name}_open ({columns}, {SEGMENT} VARCHAR)")
            statements.append(
                f"CREATE VIEW {table.name} AS SELECT {names} FROM {table.name}_done "
                f"UNION ALL SELECT {names} FROM {table.name}_open"
            )
    return statements


@functools.cache
def fingerprint() -> str:
    """Hash of all table definitions. A store with another fingerprint is rebuilt from the tapes."""
    return hashlib.sha256(f"{SCHEMA_VERSION}\n{chr(10).join(create_statements())}".encode()).hexdigest()[:16]
