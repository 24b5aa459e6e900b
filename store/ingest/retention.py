"""Remove records older than a window from a store and its tapes: calls become totals, ingested segments are deleted.

    cutoff_ns = time.time_ns() - 3600 * 10**9
    retired = ingester.retire(cutoff_ns)         # segments that may be removed now: {path: number of records}

1. Calls of steps that ended before the cutoff become one row per step, group and operation in `collective_totals`.
   Every `KEPT_STEPS`-th step keeps its calls, so that analyses of calls cover the whole run.
2. A segment may be removed if all of it is in the store and the next segment was begun before the cutoff. Records that
   its writer left open stay open in the store. A damaged segment is kept. The store keeps the calls of the newest steps
   and all open records unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from probes.tape.format.reader import TapeError, read_header
from probes.tape.rundir import RunDir
from store.ingest.rank_folders import NodeFolders
from store.ingest.read_positions import ReadState

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["KEPT_STEPS", "fold_calls", "retirable"]

KEPT_STEPS = 64
_FOLDED = """
    FROM collectives_done c JOIN (
        SELECT attempt, coalesce(min(step) FILTER (issue_ns >= $1), max(step) + 1) AS first_kept
        FROM collectives_done GROUP BY attempt) USING (attempt)
    WHERE c.step < first_kept AND c.step % $2 <> 0 AND c.issue_ns < $1
"""


def fold_calls(connection: DuckDBPyConnection, before_ns: int) -> int:
    """Replace the calls of steps that ended before `before_ns` with totals, in one transaction. Returns the number of
    replaced calls.
    """
    values = [before_ns, KEPT_STEPS]
    connection.execute("BEGIN")
    connection.execute(
        "CREATE TEMP TABLE folded AS SELECT c.rowid AS place, c.attempt, rank, step, process_group, op, phase, bytes, "
        f"end_ns - issue_ns AS duration_ns, wait_ns {_FOLDED}",
        values,
    )
    connection.execute(
        "INSERT INTO collective_totals (attempt, rank, step, process_group, op, phase, calls, bytes, duration_ns, "
        "wait_ns) SELECT attempt, rank, step, process_group, op, phase, count(*), sum(bytes), sum(duration_ns), "
        "sum(wait_ns) FROM folded GROUP BY ALL"
    )
    connection.execute("DELETE FROM collectives_done WHERE rowid IN (SELECT place FROM folded)")
    ((number,),) = connection.execute("SELECT count(*) FROM folded").fetchall()
    connection.execute("DROP TABLE folded")
    connection.execute("COMMIT")
    if number:
        connection.execute("CHECKPOINT")  # free the blocks of the deleted rows
    return int(number)


def retirable(run: RunDir, folders: NodeFolders, state: ReadState, before_ns: int) -> Iterator[tuple[str, int]]:
    """Yield (path, number of records) of segments that are completely in the store and ended before `before_ns`
    (epoch nanoseconds).
    """
    for folder in folders.all():
        for (table, _, path), (next_table, _, next_path) in pairwise(folders.segments(folder)):
            position = state.segments.get(path)
            # A segment can go once it is read to its end: a record that is still open two segments later stays open in
            # the store, too. A damaged file is kept as evidence.
            if next_table != table or position is None or not position.done or path in state.problems:
                continue
            try:
                header = read_header(run.path / next_path)
            except (TapeError, OSError):
                continue
            if header.mono_ns + header.wall_minus_mono_ns < before_ns:
                yield path, position.next_place
