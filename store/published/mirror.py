"""A local copy of a run that nodes publish to a folder or bucket. Every reader can open the copy's folder.

    with Mirror("s3://lake/rankscope/gpt-demo", folder) as mirror:
        mirror.refresh()                 # first everything, then what is new
        Store.open(mirror.run)

The copy has one store per node. While nodes publish, the copy is treated as watched, and readers judge it as of
`recorded_until_ns`, so that late records do not look like a standstill. The content is untrusted: names are checked,
sizes are bounded, and values pass through Parquet into columns of the schema.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import time
from pathlib import Path
from typing import Any

from probes.tape.rundir import RunDir
from store.database import MIRROR, Closing, WriterLock, as_store_error, connect_writer
from store.ddl import quoted
from store.ingest.store_file import create
from store.published.address import AddressError, one_line, open_address
from store.published.copy_time import write_recorded_until
from store.published.layout import GROWING, SEQUENCE, NodeState, node_file, now_path, part_path, round_file
from store.published.listing import RUN_NAME

__all__ = ["SILENT_S", "Mirror"]

SILENT_S = 300.0
"""Seconds without any publication after which a run counts as ended. Source: convention, thirty publication
intervals."""
REFRESH_S = 2.0
LATE_S = 60.0
"""A node is reported as late if its last publication is this many seconds older than another node's."""
MAX_NAMED = 8
MAX_JSON_BYTES = 64 << 20
MAX_PART_BYTES = 1 << 30
TRIES = 3
_NODE = re.compile(r"node-(\d{5})\.json\Z")


class Mirror(Closing):
    """Copies the run to `scratch/<name of the run>`. Raises AddressError with one line."""

    def __init__(self, address: str, scratch: Path) -> None:
        self.address = address
        self._files, self._root = open_address(address)
        name = posixpath.basename(self._root)
        if not RUN_NAME.match(name):
            raise AddressError(f"{address}: name a run, {address.rstrip('/')}/RUN")
        self.run = RunDir(scratch / name)
        self.run.path.mkdir(parents=True, exist_ok=True)
        self.states: dict[int, NodeState] = {}
        self._locks: dict[int, WriterLock] = {}
        self._refreshed_s = float("-inf")

    @property
    def recorded_until_ns(self) -> int:
        """Time up to which the records of all nodes are present (epoch nanoseconds): the minimum over the nodes. Nodes
        are ignored if they left after publishing everything, or if they have been silent for `SILENT_S` while others
        published.
        """
        newest_ns = max(state.published_wall_ns for state in self.states.values())
        times = [state.published_wall_ns for state in self.states.values() if not state.is_last]
        return min((when_ns for when_ns in times if newest_ns - when_ns < SILENT_S * 1e9), default=newest_ns)

    @property
    def is_live(self) -> bool:
        """True if some node has not ended and the newest publication of any node is recent."""
        newest_ns = max((state.published_wall_ns for state in self.states.values()), default=0)
        is_over = all(state.is_last for state in self.states.values())
        return not is_over and time.time_ns() - newest_ns < SILENT_S * 1e9

    @property
    def note(self) -> str:
        """One sentence on how recent the records are; empty for a run that has ended and is complete."""
        if all(state.is_last for state in self.states.values()):
            return ""
        now_ns = time.time_ns()
        ages_s = {
            node: max(0.0, (now_ns - state.published_wall_ns) / 1e9)
            for node, state in self.states.items()
            if not state.is_last
        }
        late = sorted(node for node, age_s in ages_s.items() if age_s - min(ages_s.values()) > LATE_S)
        note = f"records of all {len(self.states)} nodes until {max(ages_s.values()):.0f} s ago"
        if not late:
            return note
        named = ", ".join(f"node {node} ({ages_s[node]:.0f} s ago)" for node in late[:MAX_NAMED])
        more = f" and {len(late) - MAX_NAMED} more" if len(late) > MAX_NAMED else ""
        others = max(age_s for node, age_s in ages_s.items() if node not in late)
        return f"{note}; no recent publication from {named}{more}; other nodes: {others:.0f} s ago"

    def refresh(self) -> int:
        """Copy what is new; return the number of objects read. Raises AddressError, StoreError."""
        try:
            nodes = self._nodes()
            self._refresh_manifest()
            num_read = sum(self._refresh_node(node) for node in nodes)
        except (OSError, ValueError) as error:  # StoreError is a ValueError
            if isinstance(error, AddressError):
                raise
            raise AddressError(f"{self.address}: {one_line(error)}") from None
        write_recorded_until(self.run, self.recorded_until_ns)
        self._update_locks()
        self._refreshed_s = time.monotonic()
        return num_read

    def refresh_if_old(self) -> None:
        """Refresh if the last refresh was more than `REFRESH_S` ago. Raises AddressError, StoreError."""
        if time.monotonic() - self._refreshed_s > REFRESH_S:
            self.refresh()

    def close(self) -> None:
        """Release the locks that mark the copy as live."""
        for lock in self._locks.values():
            lock.close()
        self._locks.clear()

    def _update_locks(self) -> None:
        """Hold the stores' locks while the run is live. Readers take a store for watched if a mirror has locked it."""
        if not self.is_live:
            self.close()
            return
        for node in self.states.keys() - self._locks.keys():
            self._locks[node] = WriterLock(self.run.store(node), role=MIRROR)

    def _nodes(self) -> list[int]:
        from pyarrow import fs

        found = self._files.get_file_info(fs.FileSelector(self._root, allow_not_found=True))
        nodes = sorted(int(match[1]) for info in found if (match := _NODE.match(info.base_name)))
        if not nodes:
            runs = sorted(info.base_name for info in found if info.type == fs.FileType.Directory)
            shown = f"; runs there: {', '.join(runs[:5])}" if runs else ""
            raise AddressError(f"{self.address}: no run is published there{shown}")
        return nodes

    def _refresh_manifest(self) -> None:
        """Copy run.json if it has changed, and keep its modification time, by which the newest run is found."""
        path, source = self.run.path / "run.json", f"{self._root}/run.json"
        content = self._read(source)
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
            wall_ns = self._files.get_file_info(source).mtime_ns or time.time_ns()
            os.utime(path, ns=(wall_ns, wall_ns))

    def _refresh_node(self, node: int) -> int:
        for is_last_try in (False,) * (TRIES - 1) + (True,):
            state = NodeState.from_json(json.loads(self._read(node_file(self._root, node))))
            try:
                return self._follow(node, state)
            except (FileNotFoundError, _ReplacedError):  # the node has replaced an object while it was read
                if is_last_try:
                    raise
        return 0

    def _follow(self, node: int, state: NodeState) -> int:
        known, path = self.states.get(node), self.run.store(node)
        if known == state:
            return 0
        if known is not None and known.generation == state.generation:
            num_read = self._copy_rounds(path, node, state, known)
        else:  # write a new copy; readers see the former one until the new one is complete
            fresh = path.with_name(f".fresh-{path.name}")
            fresh.unlink(missing_ok=True)
            num_read = self._copy_rounds(fresh, node, state, None)
            fresh.replace(path)
        self.states[node] = state
        return num_read

    def _copy_rounds(self, path: Path, node: int, state: NodeState, known: NodeState | None) -> int:
        """Insert the rounds published since `known` in one transaction; return the number of objects read."""
        import duckdb

        connection = connect_writer(path, wait_s=10.0, threads=2)
        num_read, place = 0, (self._root, node, state.generation)
        try:
            if known is None:
                create(connection)
            connection.execute("BEGIN")
            for sequence in range(known.sequence + 1 if known else 1, state.sequence + 1):
                listed = json.loads(self._read(round_file(*place, sequence)))["rows"]
                for table in (name for name in GROWING.values() if name in listed):
                    rows = self._rows(part_path(*place, table, sequence), sequence)
                    if rows.num_rows != listed[table]:
                        raise ValueError(f"part {sequence} of {table} of node {node} lacks rows")
                    _insert(connection, table, rows)
                    num_read += 1
            for table, sequence in state.replaced.items():
                if known is None or known.replaced.get(table) != sequence:
                    rows = self._rows(now_path(*place, table, sequence), sequence)
                    connection.execute(f"DELETE FROM {quoted(table)}")
                    _insert(connection, table, rows)
                    num_read += 1
            connection.execute("COMMIT")
        except duckdb.Error as error:
            raise as_store_error(error, path) from error
        except (KeyError, TypeError) as error:
            raise ValueError(f"a row count of node {node} cannot be read ({type(error).__name__})") from None
        finally:
            connection.close()
        return num_read

    def _rows(self, path: str, sequence: int) -> Any:
        """Read a Parquet object. Raises FileNotFoundError, and _ReplacedError if another round wrote it."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        content = self._read(path, MAX_PART_BYTES)
        parquet = pq.ParquetFile(pa.BufferReader(content))
        footer = parquet.metadata
        if sum(footer.row_group(i).total_byte_size for i in range(footer.num_row_groups)) > MAX_PART_BYTES:
            raise ValueError(f"{path} is too large")
        if (footer.metadata or {}).get(SEQUENCE) != str(sequence).encode():
            raise _ReplacedError(f"{path} does not belong to round {sequence}")
        return parquet.read()

    def _read(self, path: str, limit_bytes: int = MAX_JSON_BYTES) -> bytes:
        with self._files.open_input_file(path) as file:
            if file.size() > limit_bytes:
                raise ValueError(f"{path} has {file.size()} bytes")
            return bytes(file.read())


class _ReplacedError(ValueError):
    """An object belongs to a different round than the node's state."""


def _insert(connection: Any, table: str, rows: Any) -> None:
    connection.register("published", rows)
    connection.execute(f"INSERT INTO {quoted(table)} BY NAME SELECT * FROM published")
    connection.unregister("published")
