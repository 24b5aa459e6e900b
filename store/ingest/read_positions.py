"""Read positions of the files, saved in the same transaction as their rows, so that each row is stored exactly once.

state = load(connection)
save(connection, changes)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["EventPosition", "ReadState", "SegmentPosition", "load", "save", "texts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPosition:
    """Read position in one tape segment.

    Records below `next_place` are in the store, except the `pending` ones: when last read, these were still open, or
    claimed and not written. `open_digest` shows whether open records in the store still match the tape. `done`: the
    segment is complete.
    """

    path: str
    table: str
    attempt: int
    rank: int
    number: int
    next_place: int = 0
    pending: tuple[int, ...] = ()
    open_digest: str = ""
    dropped: int = 0
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPosition:
    """Read position in one events file."""

    path: str
    next_byte: int = 0
    skipped_lines: int = 0


@dataclass(slots=True)
class ReadState:
    """Read positions and known problems of all files in the store. Paths are relative to the run's folder."""

    segments: dict[str, SegmentPosition] = field(default_factory=dict)
    events: dict[str, EventPosition] = field(default_factory=dict)
    anchors: dict[str, int] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    store_id: str = ""
    generation: int = -1

    def updated(self, changes: ReadState) -> ReadState:
        """Return this state with the changes of a committed transaction. An empty problem text removes the problem."""
        problems = self.problems | changes.problems
        return ReadState(
            segments=self.segments | changes.segments,
            events=self.events | changes.events,
            anchors=self.anchors | changes.anchors,
            problems={path: text for path, text in problems.items() if text},
            store_id=changes.store_id,
            generation=changes.generation,
        )

    def holds(self, path: str, extents: Mapping[str, tuple[int, tuple[int, ...]]]) -> bool:
        """Return True if the store has all that the index of checksums covers of a file (`indexed_extents`). Names are
        in the rows of the records that refer to them."""
        if path not in extents:
            return False
        extent, open_places = extents[path]
        if path.endswith(".tape"):
            known = self.segments.get(path)
            pending = {place for place in known.pending if place < extent} if known else set()
            return known is not None and known.next_place >= extent and pending <= {*open_places}
        folder, _, name = path.rpartition("/")
        if name == "events.jsonl":
            events = self.events.get(path)
            return events is not None and events.next_byte >= extent and not events.skipped_lines
        tapes = [other for other in extents if other.startswith(f"{folder}/") and other.endswith(".tape")]
        return bool(tapes) and all(self.holds(tape, extents) for tape in tapes)


def load(connection: DuckDBPyConnection, schema: str = "main") -> ReadState:
    """Load the read state of a store. `schema`: the database schema that holds its tables."""

    def rows(text: str) -> list[tuple[Any, ...]]:
        return connection.execute(text.format(schema)).fetchall()

    state = ReadState()
    ((state.store_id, state.generation),) = rows("SELECT store_id, generation FROM {}.ingest_meta")
    for path, table, attempt, rank, number, place, pending, digest, dropped, done in rows(
        "SELECT * FROM {}.ingest_positions"
    ):
        state.segments[path] = SegmentPosition(
            path=path,
            table=table,
            attempt=attempt,
            rank=rank,
            number=number,
            next_place=place,
            pending=tuple(pending),
            open_digest=digest,
            dropped=dropped,
            done=done,
        )
    for path, byte, skipped in rows("SELECT * FROM {}.ingest_bytes"):
        state.events[path] = EventPosition(path=path, next_byte=byte, skipped_lines=skipped)
    state.anchors = dict(rows("SELECT * FROM {}.ingest_anchors"))
    state.problems = dict(rows("SELECT * FROM {}.ingest_problems"))
    return state


def save(connection: DuckDBPyConnection, changes: ReadState) -> None:
    """Write the changes within the caller's transaction."""
    segments = list(changes.segments.values())
    _replace(
        connection,
        "ingest_positions",
        {
            "path": texts(p.path for p in segments),
            "source_table": texts(p.table for p in segments),
            "attempt": np.array([p.attempt for p in segments], dtype=np.int32),
            "rank": np.array([p.rank for p in segments], dtype=np.int32),
            "segment": np.array([p.number for p in segments], dtype=np.int32),
            "next_place": np.array([p.next_place for p in segments], dtype=np.int64),
            "pending": texts(str(list(p.pending)) for p in segments),
            "open_digest": texts(p.open_digest for p in segments),
            "dropped": np.array([p.dropped for p in segments], dtype=np.int64),
            "done": np.array([p.done for p in segments], dtype=np.bool_),
        },
    )
    events = list(changes.events.values())
    _replace(
        connection,
        "ingest_bytes",
        {
            "path": texts(p.path for p in events),
            "next_byte": np.array([p.next_byte for p in events], dtype=np.int64),
            "skipped_lines": np.array([p.skipped_lines for p in events], dtype=np.int64),
        },
    )
    _replace(
        connection,
        "ingest_anchors",
        {"path": texts(changes.anchors), "anchor": np.array(list(changes.anchors.values()), dtype=np.int64)},
    )
    _replace(connection, "ingest_problems", {"path": texts(changes.problems), "text": texts(changes.problems.values())})
    if changes.problems:
        connection.execute("DELETE FROM ingest_problems WHERE problem = ''")
    connection.execute("UPDATE ingest_meta SET generation = $1", [changes.generation])


def _replace(connection: DuckDBPyConnection, table: str, columns: dict[str, Any]) -> None:
    """Replace the rows with these paths."""
    if not len(columns["path"]):
        return
    connection.register("changed", columns)
    try:
        connection.execute(f"DELETE FROM {table} WHERE path IN (SELECT path FROM changed)")
        connection.execute(f"INSERT INTO {table} SELECT * FROM changed")
    finally:
        connection.unregister("changed")


def texts(values: Iterable[str]) -> np.ndarray[tuple[int], np.dtype[np.object_]]:
    """Return the texts as an array of objects; by default numpy would make fixed-width strings."""
    listed = list(values)
    array = np.empty(len(listed), dtype=object)
    array[:] = listed
    return array
