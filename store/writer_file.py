"""The file of a store as its writer opens it: again for each tick, and closed between them to let readers in.

    file = WriterFile(path, threads=1)
    with file.opened(wait_s=1.0) as connection:       # makes the file if there is none
        connection.execute(...)
    file.close()

Most of what opening a small database costs is DuckDB itself, which registers its functions: 20 of 24 ms. So the process
keeps one without a file, and attaches the store to it and detaches it again, with the checkpoint of a close.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from store.database import NO_EXTENSIONS, STORAGE_VERSION, patiently, refuse_odd

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
        """Open the file for the block; an error in it leaves nothing that was not committed. Raises StoreError."""
        import duckdb

        refuse_odd(self._path)
        try:
            connection = self._attached(wait_s)
            yield connection
        except BaseException:
            self.close()
            raise
        try:
            connection.execute("USE memory; DETACH store")
        except duckdb.Error:  # what was committed is in the log, and the next opening takes it into the file
            self.close()

    def close(self) -> None:
        """Free what is kept between two uses."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _attached(self, wait_s: float) -> DuckDBPyConnection:
        import duckdb

        is_first = self._connection is None
        if self._connection is None:
            config = NO_EXTENSIONS | {
                "storage_compatibility_version": STORAGE_VERSION,  # of a new file
                "threads": self._threads,
                "pandas_analyze_sample": 0,  # an object column is text: no guess from its first rows
            }
            self._connection = duckdb.connect(":memory:", config=config)
        connection, literal = self._connection, str(self._path).replace("'", "''")
        attach = f"ATTACH '{literal}' AS store"
        patiently(self._path, wait_s, lambda: connection.execute(attach))
        if is_first:  # DuckDB goes on to allow the files of what is attached
            connection.execute(f"SET temp_directory = '{literal}.tmp'; SET enable_external_access = false")
        return connection.execute("USE store")
