"""Convert NCCL's calls to rows of `collectives`, so that analyzers see them like any backend's calls.

    derived = NcclCalls(connection)
    derived.take(batch)                    # complete calls, as they go into nccl_calls
    derived.finish(once_open, still_open)  # after all rows of the tick are in the store

A call is a temporary row while it is in flight, and a permanent one once its kernel has ended. Some calls never get a
recorded end (copy engines, NCCL before 2.26, communicators destroyed early). They are kept in `nccl_calls` only,
because as rows without an end they would look in flight. Calls of groups that the Python wrapper records are also kept
there only.

A communicator gets the label of its process group (`groups_of_communicators`), stored in table `nccl_groups`. Step and
phase are those in which the host enqueued the call. For a call in flight, `issue_ns` is the time at which the host
enqueued it. For a call that has ended, `issue_ns` is the start of its kernel on the device, and `end_ns` adds the
duration by the device's timer. The enqueue time would be misleading there: the host runs ahead of the device, and a
call queued behind other kernels is not waiting for a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from store.ingest.columns import Batch, insert
from store.ingest.nccl_groups import Communicator, Group, groups_of_communicators
from store.ingest.read_positions import texts

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["NcclCalls"]

_OPS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "AlltoAll": "all_to_all",
    "Gather": "gather",
    "Scatter": "scatter",
    "Send": "send",
    "Recv": "recv",
}
_DTYPES = {
    "ncclInt8": ("int8", 1),
    "ncclUint8": ("uint8", 1),
    "ncclInt32": ("int32", 4),
    "ncclUint32": ("uint32", 4),
    "ncclInt64": ("int64", 8),
    "ncclUint64": ("uint64", 8),
    "ncclFloat16": ("float16", 2),
    "ncclFloat32": ("float32", 4),
    "ncclFloat64": ("float64", 8),
    "ncclBfloat16": ("bfloat16", 2),
    "ncclFloat8e4m3": ("float8_e4m3fn", 1),
    "ncclFloat8e5m2": ("float8_e5m2", 1),
}
_PER_RANK = ("ReduceScatter", "AlltoAll", "Scatter")
"""Operations in which NCCL's count is per rank, while the input holds that many elements for each rank."""

# Steps and spans that can contain a call of this tick: the last one that began before the first call, and all later
# ones.
_NEAR = """
SELECT t.attempt, t.rank, t.start_ns, {columns} FROM {table} t
JOIN (SELECT attempt, rank, min(enqueue_ns) AS first_ns, max(enqueue_ns) AS last_ns FROM {calls} GROUP BY ALL) c
  ON t.attempt = c.attempt AND t.rank = c.rank AND t.start_ns <= c.last_ns
LEFT JOIN (
  SELECT t.attempt, t.rank, max(t.start_ns) AS start_ns FROM {table} t
  JOIN (SELECT attempt, rank, min(enqueue_ns) AS first_ns FROM {calls} GROUP BY ALL) c
    ON t.attempt = c.attempt AND t.rank = c.rank AND t.start_ns <= c.first_ns
  GROUP BY ALL) f ON t.attempt = f.attempt AND t.rank = f.rank
WHERE t.start_ns >= coalesce(f.start_ns, t.start_ns)
"""
_ROWS = """
SELECT c.attempt, c.rank, s.step, c.seq,
  c.count * d.size * CASE WHEN c.function IN ({per_rank}) THEN g.num_ranks ELSE 1 END AS bytes,
  {issue} AS issue_ns, {end} AS end_ns, NULL::BIGINT AS wait_ns, g.process_group,
  coalesce(o.op, lower(c.function)) AS op, coalesce(d.name, c.dtype) AS dtype, NULL::VARCHAR AS shape,
  CASE WHEN p.end_ns IS NULL OR p.end_ns >= c.enqueue_ns THEN p.kind END AS phase, NULL::VARCHAR AS caller,
  CASE WHEN c.peer IS NULL THEN NULL
       WHEN len(g.members) > 0 THEN g.members[c.peer + 1]
       WHEN g.num_ranks = g.world_size THEN c.peer END::INTEGER AS peer,
  TRUE AS is_async, NULL::BOOLEAN AS nonfinite {segment}
FROM {calls} c
JOIN nccl_own_groups g ON g.attempt = c.attempt AND g.rank = c.rank AND g.communicator = c.communicator
LEFT JOIN nccl_ops o ON o.function = c.function
LEFT JOIN nccl_dtypes d ON d.dtype = c.dtype
ASOF LEFT JOIN ({steps}) s ON s.attempt = c.attempt AND s.rank = c.rank AND s.start_ns <= c.enqueue_ns
ASOF LEFT JOIN ({spans}) p ON p.attempt = c.attempt AND p.rank = c.rank AND p.start_ns <= c.enqueue_ns
WHERE {condition}
"""

_STARTED = "coalesce(c.kernel_start_ns, c.enqueue_ns)"
# Prefer the GPU's timer: the host observes starts and ends with different delays.
_ENDED = (
    f"CASE WHEN c.gpu_end_ns >= c.gpu_start_ns THEN {_STARTED} + c.gpu_end_ns - c.gpu_start_ns ELSE c.kernel_end_ns END"
)

# The device runs a communicator's calls in order, except within one group call and for messages to different peers.
# So a call without an observed end is over once a later call of the same kind, enqueued after its launch, has ended.
_LATER = """
SELECT 1 FROM nccl_calls_done d WHERE d.attempt = c.attempt AND d.rank = c.rank AND d.communicator = c.communicator
  AND d.call > c.call AND d.enqueue_ns >= c.launched_ns AND d.kernel_end_ns IS NOT NULL
  AND d.peer IS NOT DISTINCT FROM c.peer AND (c.peer IS NULL OR d.function = c.function)
"""


class NcclCalls:
    """Collects the complete calls of one tick and turns them into rows of `collectives`."""

    def __init__(self, connection: DuckDBPyConnection) -> None:
        self._connection = connection
        self._has_new = False

    def take(self, batch: Batch) -> None:
        """Add complete calls."""
        if not self._has_new:
            self._connection.execute("CREATE OR REPLACE TEMP TABLE nccl_new AS SELECT * FROM nccl_calls_done LIMIT 0")
            self._has_new = True
        insert(self._connection, batch, "nccl_new")

    def finish(self, once_open: Sequence[str], still_open: Sequence[str]) -> int:
        """Append rows for complete calls, and replace the rows of calls in flight. Returns the number of appended rows.

        `once_open`: segments of which the stored open calls are out of date; `still_open`: segments that have open
        calls now.
        """
        connection = self._connection
        for paths in (once_open, still_open):
            if paths:
                _register_paths(connection, paths)
                connection.execute("DELETE FROM collectives_open WHERE _segment IN (SELECT path FROM nccl_paths)")
        if not self._has_new and not still_open:
            return 0
        _register_lookups(connection)
        _describe_groups(connection)
        appended = 0
        if self._has_new:
            (count,) = connection.execute(
                f"INSERT INTO collectives_done BY NAME {_query('nccl_new', 'c.kernel_end_ns IS NOT NULL')}"
            ).fetchall()[0]
            appended = int(count)
            connection.execute("DROP TABLE nccl_new")
            self._has_new = False
        if still_open:
            _register_paths(connection, still_open)
            condition = f"g.is_alive AND c._segment IN (SELECT path FROM nccl_paths) AND NOT EXISTS ({_LATER})"
            connection.execute(
                f"INSERT INTO collectives_open BY NAME {_query('nccl_calls_open', condition, is_open=True)}"
            )
        for name in ("nccl_ops", "nccl_dtypes", "nccl_paths"):
            connection.unregister(name)
        return appended


def _describe_groups(connection: DuckDBPyConnection) -> None:
    """Rewrite table `nccl_groups`, and the temporary table of the communicators of which the calls become rows."""
    rows = connection.execute(
        "SELECT attempt, rank, communicator, comm_hash, comm_name, num_ranks, comm_rank, created_ns, "
        "finalized_ns IS NULL FROM nccl_communicators ORDER BY attempt, rank, communicator"
    ).fetchall()
    communicators = [Communicator(*row) for row in rows]
    rows = connection.execute(
        "SELECT attempt, rank, process_group, description, group_name, members, recorded_by = 'nccl_plugin' "
        "FROM process_groups WHERE members IS NOT NULL ORDER BY wall_ns"
    ).fetchall()
    groups = [
        Group(attempt, rank, label, description, name, tuple(members), bool(is_from_plugin))
        for attempt, rank, label, description, name, members, is_from_plugin in rows
    ]
    sizes = dict(connection.execute("SELECT attempt, max(world_size) FROM ranks GROUP BY attempt").fetchall())
    found = list(groups_of_communicators(communicators, groups))
    columns = {
        "attempt": np.array([comm.attempt for comm, *_ in found], dtype=np.int32),
        "rank": np.array([comm.rank for comm, *_ in found], dtype=np.int32),
        "communicator": np.array([comm.communicator for comm, *_ in found], dtype=np.int32),
        "created_ns": np.array([comm.created_ns or 0 for comm, *_ in found], dtype=np.int64),
        "process_group": texts(label for _, label, _, _ in found),
        "members": texts(str(list(members)) for _, _, members, _ in found),
        # Unknown sizes are -1 in one column and -2 in the other, so that they never compare equal.
        "num_ranks": np.array([comm.num_ranks or -1 for comm, *_ in found], dtype=np.int32),
        "world_size": np.array([sizes.get(comm.attempt) or -2 for comm, *_ in found], dtype=np.int32),
        "is_alive": np.array([comm.is_alive for comm, *_ in found], dtype=bool),
        "is_from_plugin": np.array([is_from_plugin for *_, is_from_plugin in found], dtype=bool),
    }
    connection.register("nccl_groups_text", columns)
    connection.execute("DELETE FROM nccl_groups")
    connection.execute(
        "INSERT INTO nccl_groups BY NAME SELECT attempt, rank, created_ns, communicator, process_group, "
        "CAST(members AS BIGINT[]) AS members, is_alive FROM nccl_groups_text"
    )
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE nccl_own_groups AS SELECT attempt, rank, communicator, process_group, "
        "CAST(members AS BIGINT[]) AS members, nullif(num_ranks, -1) AS num_ranks, world_size, is_alive "
        "FROM nccl_groups_text WHERE is_from_plugin"
    )
    connection.unregister("nccl_groups_text")


def _query(calls: str, condition: str, *, is_open: bool = False) -> str:
    return _ROWS.format(
        calls=calls,
        issue="c.enqueue_ns" if is_open else _STARTED,
        end="c.kernel_end_ns" if is_open else _ENDED,
        condition=condition,
        per_rank=", ".join(f"'{name}'" for name in _PER_RANK),
        segment=", c._segment" if is_open else "",
        steps=_NEAR.format(table="steps", calls=calls, columns="t.step"),
        spans=_NEAR.format(table="spans", calls=calls, columns="t.kind, t.end_ns"),
    )


def _register_lookups(connection: DuckDBPyConnection) -> None:
    connection.register("nccl_ops", {"function": texts(_OPS), "op": texts(_OPS.values())})
    connection.register(
        "nccl_dtypes",
        {
            "dtype": texts(_DTYPES),
            "name": texts(name for name, _ in _DTYPES.values()),
            "size": np.array([size for _, size in _DTYPES.values()], dtype=np.int64),
        },
    )


def _register_paths(connection: DuckDBPyConnection, paths: Iterable[str]) -> None:
    connection.register("nccl_paths", {"path": texts(paths)})
