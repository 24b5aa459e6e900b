"""Read a store: one connection over all nodes' files, whose queries can access no other files and no network.

    with Store.open(run) as store:
        columns = store.query("SELECT step, duration_ns FROM steps WHERE rank = ? ORDER BY step", [3])
        np.median(columns["duration_ns"])

Every table of the schema exists; it is empty if nothing was recorded. Close the store soon, because `watch` cannot
write while it is open. Nothing is lost: `watch` catches up later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from probes.tape.format.schema import TABLES
from probes.tape.rundir import RunDir
from store.catch_up import stores_up_to_date
from store.database import (
    WAIT_S,
    Closing,
    StoreCorruptError,
    StoreError,
    as_store_error,
    connect_attached,
    interruptible,
    lock_down,
)
from store.ddl import quoted
from store.sql.console import ConsoleAnswer
from store.sql.console import run as run_console
from store.sql.parsed import parsed
from store.views import make_views

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["WAIT_S", "Store"]

Params = Sequence[Any] | Mapping[str, Any] | None


class Store(Closing):
    """SQL over a run's records. Made by `Store.open`."""

    def __init__(
        self,
        connection: DuckDBPyConnection,
        name: str,
        *,
        stand_ins: frozenset[str] = frozenset(),
        scratch: contextlib.ExitStack | None = None,
        copies: Mapping[str, str] | None = None,
        file: str = "",
        is_whole: bool = False,
    ) -> None:
        self._connection = connection
        self._name = name
        self._file = file or name  # path to show in errors about damaged files
        self._stand_ins = stand_ins  # empty tables in place of tables of the schema that none of the files has
        self._is_whole = is_whole  # True if every table of the schema exists, as itself or as a stand-in
        self._scratch = scratch
        self._copies = dict(copies or {})  # relation that a session replaces -> table that replaces it
        self._sessions: list[Store] = []
        self._tables: tuple[str, ...] | None = None
        self._damage: StoreCorruptError | None = None

    @classmethod
    def open(
        cls,
        run: RunDir,
        *,
        catch_up: bool = True,
        include_newest: bool = False,
        node: int | None = None,
        wait_s: float = WAIT_S,
        memory_bytes: int | None = None,
        spills: bool = False,
        threads: int | None = None,
    ) -> Store:
        """Open the store of a run, live or dead. Raises StoreError.

        `catch_up`: first ingest records that are in the ranks' files but not in the store. If the run's folder is
        read-only, they are ingested into a temporary copy. A running `watch` does this itself, until
        `catch_up.FINAL_POLL_S` after all ranks have ended. `include_newest`: while `watch` is running, ingest its
        newest records into a temporary copy. `node`: without `catch_up`, open the store of this node alone, so that no
        other node's writer waits. `memory_bytes`: DuckDB's memory limit; with `spills`, queries that exceed it spill to
        a temporary folder. `threads`: number of DuckDB threads, by default one per core.
        """
        with contextlib.ExitStack() as scratch:
            paths = stores_up_to_date(run, scratch, wait_s, include_newest=include_newest) if catch_up else run.stores()
            paths = paths if node is None or catch_up else [path for path in paths if path == run.store(node)]
            if not paths:
                raise StoreError(f"{run.path} has no store yet: neither a watch nor a reader has built one")
            try:
                connection = connect_attached(_named(paths), wait_s=wait_s, threads=threads)
            except StoreCorruptError:
                # A writer that is killed during a checkpoint of DuckDB leaves a log that does not match its file.
                # Catching up again removes the log, or rebuilds the store from the tapes.
                if not catch_up:
                    raise
                paths = stores_up_to_date(run, scratch, wait_s, include_newest=include_newest)
                connection = connect_attached(_named(paths), wait_s=wait_s, threads=threads)
            try:
                # A store opened without catching up (by a live process) mostly gets few queries.
                stand_ins = make_views(connection, paths, is_queried_often=catch_up)
                spill_to = Path(scratch.enter_context(TemporaryDirectory(prefix="rankscope-"))) if spills else None
                lock_down(connection, memory_bytes=memory_bytes, spill_to=spill_to)
            except BaseException:
                connection.close()
                raise
            file = str(paths[0]) if len(paths) == 1 and paths[0].parent == run.path else ""
            return cls(
                connection, str(run.path), stand_ins=stand_ins, scratch=scratch.pop_all(), file=file, is_whole=True
            )

    def query(self, sql: str, params: Params = None) -> dict[str, npt.NDArray[Any]]:
        """Return the result's columns as plain numpy arrays, never masked ones. Raises StoreError.

        NULL is NaN in a number column (integers with a NULL become float64, exact up to 2^53: take differences of
        times in SQL), None in a text, list, JSON or bool column (dtype object), NaT in a timestamp. To tell a NULL
        from a recorded NaN, ask for `x IS NULL`. `sum` of integers is HUGEINT, which arrives as float64: cast it.
        """
        found = self._execute(sql, params, "fetchnumpy")
        return {name: _plain(values) for name, values in found.items()}

    def rows(self, sql: str, params: Params = None) -> list[tuple[Any, ...]]:
        """Return the result's rows as tuples of Python values, None for NULL. Raises StoreError."""
        found: list[tuple[Any, ...]] = self._execute(sql, params, "fetchall")
        return found

    def batches(self, sql: str, params: Params = None, *, batch_rows: int = 100_000) -> Any:
        """Iterate over the result in pyarrow record batches, for results larger than memory. Raises StoreError, and
        ImportError without pyarrow."""
        import duckdb

        try:  # a relation is computed as it is read; `execute` would hold the whole result in memory
            return self._connection.sql(sql, params=params).to_arrow_reader(batch_rows)
        except duckdb.Error as error:
            raise self._translated(error) from error

    def session(self, **relations: str) -> Store:
        """Open a second session on the same files, in which each named relation is replaced by the result of a query.

            few = store.session(steps="SELECT * FROM steps WHERE step % 100 = 0")
            few.rows("SELECT count(*) FROM events, main.steps")     # every hundredth step, also as main.steps

        The result is copied once, within the memory and spill limits of the store, and freed when the store is
        closed. All other relations are the same as in this session. Raises StoreError.
        """
        import duckdb

        copies = dict(self._copies)
        cursor = self._connection.cursor()
        try:
            self._connection.execute("CREATE SCHEMA IF NOT EXISTS memory.sessions")
            for relation, select in relations.items():
                copies[relation] = f"memory.sessions.{quoted(f'{relation}_{uuid4().hex}')}"
                with interruptible():
                    self._connection.execute(f"CREATE TABLE {copies[relation]} AS {select}")
            for relation, copy in copies.items():  # a temporary view takes precedence over the views of `main`
                cursor.execute(f"CREATE TEMP VIEW {quoted(relation)} AS SELECT * FROM {copy}")
        except duckdb.Error as error:
            cursor.close()
            raise self._translated(error) from error
        session = Store(
            cursor,
            self._name,
            stand_ins=self._stand_ins - relations.keys(),
            copies=copies,
            file=self._file,
            is_whole=self._is_whole,
        )
        self._sessions.append(session)
        return session

    def interrupt(self) -> None:
        """Interrupt a query that runs in another thread; it raises StoreError there."""
        self._connection.interrupt()

    def typed(self, sql: str, params: Params = None, *, max_rows: int = 1_000, limit_s: float = 15.0) -> ConsoleAnswer:
        """Run one read-only statement that a user typed, and return at most `max_rows` rows. Raises StoreError."""
        return run_console(self._connection, sql, params, max_rows=max_rows, limit_s=limit_s)

    @property
    def damage(self) -> StoreCorruptError | None:
        """The first damaged file that a query found, or None."""
        found = (store.damage for store in self._sessions)
        return self._damage or next((damage for damage in found if damage), None)

    def has(self, table: str) -> bool:
        """Return True if a file of the run has this table (it may be empty)."""
        is_there = (self._is_whole and table in TABLES) or table in self.tables()
        return is_there and table not in self._stand_ins

    def tables(self) -> tuple[str, ...]:
        """Return the sorted names of all tables and views, as of the first call."""
        if self._tables is None:
            names = self.rows(
                "SELECT table_name FROM information_schema.tables WHERE table_catalog = current_database() "
                "AND table_schema = 'main' GROUP BY table_name ORDER BY table_name"
            )
            self._tables = tuple(str(name) for (name,) in names)
        return self._tables

    def close(self) -> None:
        """Close the connection and its sessions, so that writers get access to the files."""
        for session in self._sessions:
            session.close()
        self._connection.close()
        if self._scratch is not None:
            self._scratch.close()

    def _execute(self, sql: str, params: Params, fetch: str) -> Any:
        import duckdb

        try:
            with interruptible():
                return getattr(self._connection.execute(parsed(self._connection, sql), params), fetch)()
        except duckdb.Error as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> StoreError:
        store_error = as_store_error(error, self._name)
        if isinstance(store_error, StoreCorruptError):
            store_error = as_store_error(error, self._file)
            assert isinstance(store_error, StoreCorruptError)
            self._damage = self._damage or store_error
        return store_error


def _named(paths: Sequence[Path]) -> dict[str, Path]:
    return {f"n{i}": path for i, path in enumerate(paths)}


def _plain(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if not isinstance(values, np.ma.MaskedArray):
        return values
    mask = np.ma.getmaskarray(values)
    if not mask.any():
        return np.asarray(values.data)
    kind = values.dtype.kind
    if kind in "iuf":
        return np.where(mask, np.nan, values.data.astype(np.float64, copy=False))
    if kind in "mM":
        plain = values.data.copy()
        plain[mask] = np.array("NaT", dtype=plain.dtype)
        return plain
    plain = values.data.astype(object)
    plain[mask] = None
    return plain
