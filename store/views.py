"""Views over the stores of all nodes: each table of the schema once, whichever version of Rankscope wrote a file.

absent = make_views(connection, paths)     # the files are attached as n0, n1, ...
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from probes.tape.format.schema import TABLES, Table
from store.database import as_store_error
from store.ddl import SQL_TYPES, fingerprint, finished_table, quoted, store_columns
from store.derived.global_norms import make_global_norms
from store.derived.node_clocks import node_clocks

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["columns_of", "has_global_norms", "make_views", "show_files"]

_FEW_ROWS = 10_000
"""Maximum total rows for which tables are copied into memory: copying takes no longer than creating the views, and a
verdict (some 200 queries) then takes a third less time.
"""
_QUERIED_OFTEN = 10
"""Multiple of `_FEW_ROWS` up to which tables are copied for many queries: copying 100,000 rows takes 0.03 s more than
creating the views, and each query then takes 0.001 s less, as it isn't planned over views.
"""
_COPY_MEMORY = "512MB"
"""Memory for the copies. A table that needs more stays in its file, where its texts may take a thousandth of that."""
_OPTIMIZERS = frozenset({"deliminator", "filter_pushdown", "unused_columns"})
"""Optimizer passes that DuckDB keeps for queries over few rows: without them a join may compare all pairs of rows. The
other passes take longer than they save.
"""
_JOIN_OPTIMIZERS = frozenset({"build_side_probe_side", "join_order"})
"""Further passes for more rows, of which a join of three tables in an unlucky order would compare all pairs."""
_WITH_GLOBAL_NORMS = """
SELECT s.* REPLACE (
    CASE WHEN g.replaces THEN g.grad_norm ELSE coalesce(s.grad_norm, g.grad_norm) END AS grad_norm)
FROM ({steps}) s LEFT JOIN global_norms g ON g.attempt = s.attempt AND g.step = s.step
"""


def make_views(
    connection: DuckDBPyConnection, paths: Sequence[Path], *, is_queried_often: bool = False
) -> frozenset[str]:
    """Create one view per table over all nodes, or a copy if there are few rows. A column that a store of another
    version lacks is NULL. Times are by the first node's clock. `is_queried_often`: copy more rows, for many queries.

    Only the files' tables are read, never their views: a view in an untrusted file may compute anything.

    Returns the tables that are missing in every file; the views of these are empty.
    """
    import duckdb

    absent, empty = set(), list[str]()
    queries, made = dict[str, str](), dict[str, str]()
    try:
        sizes = _sizes_of(connection)
        schemas = None if _all_of_this_version(connection, len(paths), sizes.keys()) else columns_of(connection)
        num_rows = sum(sizes.values())
        copies = num_rows <= _FEW_ROWS * (_QUERIED_OFTEN if is_queried_often else 1)
        clocks = node_clocks(connection, paths, sizes.keys())
        if copies:
            ((spill_to,),) = connection.execute("SELECT current_setting('temp_directory')").fetchall()
            connection.execute(f"SET memory_limit = '{_COPY_MEMORY}'; SET temp_directory = ''")
        for table in TABLES.values():
            typed = [(quoted(c.name), f"CAST(NULL AS {SQL_TYPES[c.type]})", c.name) for c in store_columns(table)]
            dated = {c.name for c in store_columns(table) if c.is_time or c.name == "clock_offset_ns"}
            selects, is_there = [], False
            for i in range(len(paths)):
                columns = {name for _, _, name in typed} if schemas is None else _common_columns(table, schemas, i)
                if columns:
                    is_there = True
                    shown = {
                        name: f"{quoted(name)} - ({clocks[i].ahead_sql}) AS {quoted(name)}"
                        for name in (dated & columns if i in clocks and "attempt" in columns else ())
                    }
                    picked = ", ".join(
                        shown.get(name, q) if name in columns else f"{null} AS {q}" for q, null, name in typed
                    )
                    for part in _parts_of(table, schemas, i):
                        if not copies or sizes.get((f"n{i}", part)) != 0:
                            selects.append(f"SELECT {picked} FROM n{i}.main.{quoted(part)}")
            if not is_there:
                absent.add(table.name)
            if copies and not selects:
                types = ", ".join(f"{quoted(c.name)} {SQL_TYPES[c.type]}" for c in store_columns(table))
                empty.append(f"CREATE TABLE {quoted(table.name)} ({types})")
                continue
            if not selects:
                selects.append("SELECT " + ", ".join(f"{null} AS {q}" for q, null, _ in typed) + " WHERE false")
            queries[table.name] = " UNION ALL ".join(selects)
            made[table.name] = _create(connection, quoted(table.name), queries[table.name], copies=copies)
        connection.execute(";".join(empty))
        listed = [i for i in range(len(paths)) if schemas is None or (f"n{i}", "ingest_problems") in schemas]
        problems = [f"SELECT path, problem FROM n{i}.main.ingest_problems" for i in listed]
        for i, clock in clocks.items():
            problems.append(f"SELECT {_literal(paths[i].name)} AS path, {_literal(clock.problem)} AS problem")
        none = "SELECT '' AS path, '' AS problem WHERE false"
        connection.execute(f"CREATE VIEW ingest_problems AS {' UNION ALL '.join(problems or [none])}")
        if "steps" in made and has_global_norms(connection):
            connection.execute(f"DROP {made['steps']} steps")
            _create(connection, "steps", _WITH_GLOBAL_NORMS.format(steps=queries["steps"]), copies=copies)
        if copies:
            passes = connection.execute("SELECT name FROM duckdb_optimizers()").fetchall()
            kept = _OPTIMIZERS if num_rows <= _FEW_ROWS else _OPTIMIZERS | _JOIN_OPTIMIZERS
            left_out = ",".join(name for (name,) in passes if name not in kept)
            # One thread: for so few rows, waking a second one costs more than it saves.
            connection.execute(f"SET disabled_optimizers = '{left_out}'; SET threads = 1")
            connection.execute("RESET memory_limit")
            connection.execute("SET temp_directory = ?", [spill_to])
    except duckdb.Error as error:
        raise as_store_error(error, ", ".join(map(str, paths))) from error
    return frozenset(absent)


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _create(connection: DuckDBPyConnection, name: str, query: str, *, copies: bool) -> str:
    """Create a table with the query's rows, or a view; return "TABLE" or "VIEW". Damaged rows always get a view, so
    that each query reports the damage.
    """
    import duckdb

    if copies:
        try:
            connection.execute(f"CREATE TABLE {name} AS {query}")
        except duckdb.InterruptException:
            raise
        except duckdb.Error:
            pass
        else:
            return "TABLE"
    connection.execute(f"CREATE VIEW {name} AS {query}")
    return "VIEW"


def _sizes_of(connection: DuckDBPyConnection) -> dict[tuple[str, str], int]:
    """Number of rows of each table, by file and table name."""
    rows = connection.execute(
        "SELECT database_name, table_name, estimated_size FROM duckdb_tables() WHERE schema_name = 'main'"
    ).fetchall()
    return {(database, table): size or 0 for database, table, size in rows}


def has_global_norms(connection: DuckDBPyConnection) -> bool:
    """Create the table of global norms. Returns False if there are none, or if columns have unexpected types."""
    import duckdb

    try:
        return make_global_norms(connection)
    except duckdb.InterruptException:
        raise
    except duckdb.Error:
        return False


def show_files(connection: DuckDBPyConnection, paths: Sequence[Path]) -> bool:
    """Return True if the views show the files as they are: none of their rows was copied or computed, and all of their
    columns are the files' own.
    """
    tables = _sizes_of(connection).keys()
    if any(database == "memory" for database, _ in tables) or node_clocks(connection, paths, tables):
        return False
    return _all_of_this_version(connection, len(paths), tables)


def _all_of_this_version(connection: DuckDBPyConnection, num_files: int, tables: Collection[tuple[str, str]]) -> bool:
    """Return True if every file has the tables of this version, so that the slow look-up of columns can be skipped."""
    import duckdb

    needed = {"ingest_meta", "ingest_problems"}
    for table in TABLES.values():
        needed |= {finished_table(table), f"{table.name}_open"} if table.can_be_open else {table.name}
    if not all((f"n{i}", name) in tables for i in range(num_files) for name in needed):
        return False  # a file is of an older version, or has a view instead of a table
    try:
        selects = [f"SELECT fingerprint FROM n{i}.main.ingest_meta" for i in range(num_files)]
        return connection.execute(" UNION ALL ".join(selects)).fetchall() == [(fingerprint(),)] * num_files
    except (duckdb.CatalogException, duckdb.BinderException):
        return False


def columns_of(connection: DuckDBPyConnection) -> dict[tuple[str, str], set[str]]:
    """Columns of each table, by file and table name."""
    rows = connection.execute(
        "SELECT c.database_name, c.table_name, c.column_name FROM duckdb_columns() c "
        "JOIN duckdb_tables() t USING (database_name, schema_name, table_name) WHERE c.schema_name = 'main'"
    ).fetchall()
    schemas: dict[tuple[str, str], set[str]] = {}
    for database, table, column in rows:
        schemas.setdefault((database, table), set()).add(column)
    return schemas


def _parts_of(table: Table, schemas: dict[tuple[str, str], set[str]] | None, index: int) -> list[str]:
    """Names of the tables in the file that hold the rows of `table`. There are two if open rows are stored separately,
    otherwise one. Empty if the file has no such table. `schemas`: from `columns_of`; None if all files are of this
    version.
    """
    parts = [finished_table(table), f"{table.name}_open"] if table.can_be_open else [table.name]
    if schemas is None or all((f"n{index}", part) in schemas for part in parts):
        return parts
    return [table.name] if (f"n{index}", table.name) in schemas else []


def _common_columns(table: Table, schemas: dict[tuple[str, str], set[str]], index: int) -> set[str]:
    parts = _parts_of(table, schemas, index)
    return set.intersection(*(schemas[f"n{index}", part] for part in parts)) if parts else set()
