"""A store's file as its writer uses it: opened at each tick, and closed in between so that readers can open it.

    file = WriterFile(path, threads=1)
    with file.opened(wait_s=1.0) as connection:       # creates the file if there is none
        connection.execute(...)
    file.close()

Opening a small database takes 24 ms, of which DuckDB spends 20 on registering its functions. The process therefore
keeps an in-memory database and attaches the store to it at each tick. Detaching the store checkpoints it, like closing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from store.database import NO_EXTENSIONS, STORAGE_VERSION, require_regular_file, retry_until_free

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["WriterFile"]


class WriterFile:
    """SQL stored in the file can neither read nor write another file."""

    def __init__(self, path: Path, *, threads: int) -> None:
        self._path, self._threads = path, threads
        self._connection: DuckDBPyConnection | None = None

    @contextmanager
    def opened(self, *, wait_s: float) -> Iterator[DuckDBPyConnection]:
        """Open the file for the duration of the block. If the block raises, uncommitted changes are lost. Raises
        StoreError.
        """
        import duckdb

        require_regular_file(self._path)
        try:
            connection = self._attached(wait_s)
            yield connection
        except BaseException:
            self.close()
            raise
        try:
            connection.execute("USE memory; DETACH store")
        except duckdb.Error:  # committed changes are in the write-ahead log, and the next opening applies this log
            self.close()

    def close(self) -> None:
        """Close the in-memory database."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _attached(self, wait_s: float) -> DuckDBPyConnection:
        import duckdb

        is_first = self._connection is None
        if self._connection is None:
            config = NO_EXTENSIONS | {
                "storage_compatibility_version": STORAGE_VERSION,  # a new file
                "threads": self._threads,
                "pandas_analyze_sample": 0,  # object columns are text: do not infer their type from the first rows
            }
            self._connection = duckdb.connect(":memory:", config=config)
        connection, literal = self._connection, str(self._path).replace("'", "''")
        attach = f"ATTACH '{literal}' AS store"
        retry_until_free(self._path, wait_s, lambda: connection.execute(attach))
        if is_first:  # from now on DuckDB may access only attached databases and the temporary folder
            connection.execute(f"SET temp_directory = '{literal}.tmp'; SET enable_external_access = false")
        return connection.execute("USE store")
