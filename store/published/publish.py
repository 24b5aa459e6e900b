"""Publish the new rows of one node's store to an address.

    publisher = Publisher("s3://lake/rankscope", run, node_rank=0)
    publisher.note(result.rows, until_ns=began)  # after each tick, in the thread that ingests
    rows = publisher.read()                      # at intervals, in the same thread: reads the store
    publisher.write(rows)                        # in another thread: may wait for the network

A failed round is retried before the next one is read, so waiting rows stay in the store instead of memory.
"""

from __future__ import annotations

import json
import posixpath
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes.tape.rundir import RunDir
from store.database import StoreError, as_store_error, connect_attached
from store.ddl import fingerprint, quoted
from store.published.address import open_address
from store.published.layout import (
    GROWING,
    REPLACED,
    SEQUENCE,
    NodeState,
    node_file,
    now_path,
    part_path,
    round_file,
)

__all__ = ["Publisher", "Round"]

ROUND_ROWS = 100_000
"""Maximum rows per table and round: about 15 MB of collectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Rows to publish: pyarrow tables by the name of the store's table."""

    generation: str
    sequence: int
    read_wall_ns: int
    """Time up to which the round completes the node's records (epoch nanoseconds)."""
    new: Mapping[str, Any]
    replaced: Mapping[str, Any]
    is_last: bool
    is_partial: bool
    """True if more rows are waiting in the store."""


class Publisher:
    """Publisher of one node's rows. Raises AddressError for an invalid address."""

    def __init__(self, address: str, run: RunDir, *, node_rank: int) -> None:
        self.address = address
        self._files, self._root = open_address(address)
        self._run, self._node_rank, self._store = run, node_rank, run.store(node_rank)
        self._store_id: object = None
        self._generation, self._sequence = "", 0
        self._waiting: Counter[str] = Counter()
        self._places: dict[str, int] = {}  # table with waiting rows -> rowid of the first row to publish
        self._noted_until_ns = self._read_until_ns = 0
        # Only `write` uses the following attributes.
        self._written_generation = ""
        self._replaced: dict[str, Any] = {}
        self._replaced_in: dict[str, int] = {}

    @property
    def is_drained(self) -> bool:
        """True if all rows up to the last tick have been read, so that older calls may be replaced with totals."""
        return self._store_id is not None and not any(self._waiting.values())

    def restart(self) -> None:
        """Publish everything in the store again, as a new generation, starting with the next round."""
        self._store_id = None

    def note(self, rows: Mapping[str, int], *, until_ns: int | None = None) -> None:
        """Count rows that a tick has appended. The store is then complete up to `until_ns` (epoch nanoseconds; None:
        more records are waiting).
        """
        self._noted_until_ns = until_ns or self._noted_until_ns
        self._waiting.update({name: count for name, count in rows.items() if name in GROWING})

    def read(self, *, is_last: bool = False) -> Round:
        """Read waiting rows, at most `ROUND_ROWS` per table. Raises StoreError."""
        import duckdb

        began_ns = time.time_ns()
        connection = connect_attached({"store": self._store}, wait_s=1.0)
        new, replaced, places = {}, {}, {}
        try:
            self._begin(connection)
            for name, count in self._waiting.items():
                if count:
                    place = self._places.get(name)
                    place = _place_of_newest(connection, GROWING[name], count) if place is None else place
                    new[GROWING[name]] = _rows(connection, GROWING[name], place)
                    places[name] = place + ROUND_ROWS
            for stored in REPLACED:
                replaced[stored] = connection.sql(f"SELECT * FROM store.main.{quoted(stored)}").to_arrow_table()
        except duckdb.Error as error:
            raise as_store_error(error, self._store) from error
        finally:
            connection.close()
        for name, place in places.items():
            self._waiting[name] -= min(new[GROWING[name]].num_rows, self._waiting[name])
            self._places[name] = place
            if not self._waiting[name]:
                del self._places[name]
        self._sequence += 1
        is_partial = any(self._waiting.values())
        if not is_partial:
            self._read_until_ns = self._noted_until_ns or began_ns
        return Round(
            generation=self._generation,
            sequence=self._sequence,
            read_wall_ns=self._read_until_ns or began_ns,
            new=new,
            replaced=replaced,
            is_last=is_last and not is_partial,
            is_partial=is_partial,
        )

    def _begin(self, connection: Any) -> None:
        """If the store was replaced since the last round, start a new generation: all rows of the store are waiting."""
        ((store_id,),) = connection.execute("SELECT max(store_id) FROM store.main.ingest_meta").fetchall()
        if store_id == self._store_id:
            return
        counts = {
            name: connection.execute(f"SELECT count(*) FROM store.main.{quoted(stored)}").fetchall()[0][0]
            for name, stored in GROWING.items()
        }
        self._waiting, self._places = Counter(counts), {}
        self._generation, self._sequence, self._store_id = uuid.uuid4().hex, 0, store_id

    def write(self, rows: Round) -> None:
        """Write a round. An object is written before any object that refers to it. Raises OSError."""
        run, place = posixpath.join(self._root, self._run.run_id), (self._node_rank, rows.generation)
        if self._written_generation != rows.generation:
            self._put_bytes(f"{run}/run.json", json.dumps(self._run.manifest(), default=str).encode())
            self._replaced, self._replaced_in = {}, {}
            self._written_generation = rows.generation
        for table, part in rows.new.items():
            self._put(part_path(run, *place, table, rows.sequence), part, rows.sequence)
        for table, now in rows.replaced.items():
            before = self._replaced.get(table)
            if (before is None and now.num_rows == 0) or (before is not None and now.equals(before)):
                continue
            self._put(now_path(run, *place, table, rows.sequence), now, rows.sequence)
            self._replaced[table], self._replaced_in[table] = now, rows.sequence
        counts = {table: part.num_rows for table, part in rows.new.items()}
        self._put_bytes(round_file(run, *place, rows.sequence), json.dumps({"rows": counts}).encode())
        state = NodeState(
            generation=rows.generation,
            sequence=rows.sequence,
            replaced=dict(self._replaced_in),
            published_wall_ns=rows.read_wall_ns,
            is_last=rows.is_last,
            fingerprint=fingerprint(),
        )
        self._put_bytes(node_file(run, self._node_rank), json.dumps(state.to_json()).encode())

    def _put(self, path: str, rows: Any, sequence: int) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        sink = pa.BufferOutputStream()
        pq.write_table(rows.replace_schema_metadata({SEQUENCE: str(sequence)}), sink, compression="zstd")
        self._put_bytes(path, sink.getvalue())

    def _put_bytes(self, path: str, content: Any) -> None:
        """Write an object atomically: buckets do so anyway, folders need a rename. All nodes write run.json."""
        is_local = self._files.type_name == "local"
        fresh = f"{path}.{self._node_rank}.part" if is_local else path
        if is_local:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        with self._files.open_output_stream(fresh) as stream:
            stream.write(content)
        if is_local:
            self._files.move(fresh, path)


def _place_of_newest(connection: Any, stored: str, count: int) -> int:
    """First rowid of the newest `count` rows. Raises StoreError if there are fewer.

    Retention deletes older calls, which leaves gaps in the rowids, but not among waiting rows (`Publisher.is_drained`).
    """
    table = f"store.main.{quoted(stored)}"
    ((total, newest),) = connection.execute(f"SELECT count(*), max(rowid) FROM {table}").fetchall()
    if total == count:
        return 0
    if total > count:
        place = int(newest) + 1 - count
        ((num_newer,),) = connection.execute(f"SELECT count(*) FROM {table} WHERE rowid >= ?", [place]).fetchall()
        if num_newer == count:
            return place
        select = f"SELECT rowid FROM {table} ORDER BY rowid DESC LIMIT 1 OFFSET ?"
        ((place,),) = connection.execute(select, [count - 1]).fetchall()
        return int(place)
    raise StoreError(f"{stored} has {total} rows, and {count} wait to be published")


def _rows(connection: Any, stored: str, place: int) -> Any:
    """Rows of the next `ROUND_ROWS` rowids, in order of appending."""
    select = f"SELECT * FROM store.main.{quoted(stored)} WHERE rowid >= ? AND rowid < ? ORDER BY rowid"
    return connection.sql(select, params=[place, place + ROUND_ROWS]).to_arrow_table()
