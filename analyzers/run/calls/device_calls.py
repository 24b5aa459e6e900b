"""Calls in flight that a rank's host has enqueued but its device has not started.

    queued = queued_calls(source, attempt=0, cut_ns=now_ns)
    queued[3, "world:0-7", "", None]        # number of the first call of that group that rank 3 has not started
    oldest_open_step(source, attempt=0, cut_ns=now_ns)     # the devices' step; hosts may be hundreds of steps ahead

The host runs ahead of its device, so the device may not have reached a call that its host has enqueued. Whether it has
is known from NCCL's profiler plugin, or from a flight recorder that times calls; without these, nothing is returned.
"""

from __future__ import annotations

from analyzers.source import Source, missing_tables

__all__ = ["QueueKey", "device_groups", "device_places", "oldest_open_step", "queued_calls"]

QueueKey = tuple[int, str, str, int | None]
"""Key of a queue of calls: (rank, group, "send" | "recv" | "", peer)."""


def device_groups(source: Source, attempt: int) -> frozenset[str]:
    """Groups in which NCCL's plugin recorded the calls."""
    if missing_tables(source, "nccl_groups"):
        return frozenset()
    rows = source.rows(
        "SELECT DISTINCT process_group FROM nccl_groups WHERE attempt = ? EXCEPT "
        "SELECT process_group FROM process_groups WHERE attempt = ? AND coalesce(recorded_by, 'wrapper') = 'wrapper'",
        [attempt, attempt],
    )
    return frozenset(str(group) for (group,) in rows)


def device_places(source: Source, attempt: int) -> frozenset[tuple[int, str]]:
    """Return (rank, group) pairs for which the records show which calls the rank's device has started."""
    groups = device_groups(source, attempt)
    if not groups:
        return frozenset()
    rows = source.rows("SELECT DISTINCT rank, process_group FROM nccl_groups WHERE attempt = ?", [attempt])
    return frozenset((int(rank), str(group)) for rank, group in rows if group in groups)


def queued_calls(source: Source, attempt: int, cut_ns: int) -> dict[QueueKey, int]:
    """Number of the first call not yet started at `cut_ns` (epoch nanoseconds), for each queue that has one."""
    if missing_tables(source, "nccl_groups", "nccl_calls"):
        return {}
    rows = source.rows(
        """
        SELECT c.rank, g.process_group, CASE WHEN c.function IN ('Send', 'Recv') THEN lower(c.function) ELSE '' END,
               CASE WHEN c.peer IS NULL THEN NULL WHEN len(g.members) > 0 THEN g.members[c.peer + 1] ELSE c.peer END,
               min(c.seq)
        FROM nccl_calls c JOIN nccl_groups g USING (attempt, rank, communicator)
        WHERE c.attempt = ? AND c.enqueue_ns <= ? AND g.is_alive AND c.channels_started IS NOT NULL
          AND c.kernel_end_ns IS NULL AND (c.kernel_start_ns IS NULL OR c.kernel_start_ns > ?) AND c.seq IS NOT NULL
        GROUP BY ALL
        """,
        [attempt, cut_ns, cut_ns],
    )
    return {(rank, group or "", op, peer): seq for rank, group, op, peer, seq in rows}


def oldest_open_step(source: Source, attempt: int, cut_ns: int) -> int | None:
    """Step of the oldest call on any device that was unfinished at `cut_ns` (epoch nanoseconds).

    An open call is ignored if a later call of its group is complete on the same rank: only its end record was lost.
    """
    groups = sorted(device_groups(source, attempt))
    if not groups or not source.has("collectives"):
        return None
    ((step,),) = source.rows(
        f"""
        WITH open AS (
            SELECT rank, process_group, op IN ('send', 'recv') AS is_p2p, op, peer, seq, step FROM collectives
            WHERE attempt = ? AND (end_ns IS NULL OR end_ns > ?) AND issue_ns <= ?
              AND process_group IN ({", ".join("?" * len(groups))})
        ), done AS (
            SELECT rank, process_group, CASE WHEN op IN ('send', 'recv') THEN op END AS direction,
                   CASE WHEN op IN ('send', 'recv') THEN peer END AS partner, max(seq) AS seq
            FROM collectives SEMI JOIN open USING (rank, process_group)
            WHERE attempt = ? AND end_ns <= ? GROUP BY ALL
        )
        SELECT min(open.step) FROM open LEFT JOIN done ON done.rank = open.rank
         AND done.process_group = open.process_group AND done.direction IS NOT DISTINCT FROM
             CASE WHEN is_p2p THEN open.op END AND done.partner IS NOT DISTINCT FROM CASE WHEN is_p2p THEN open.peer END
        WHERE done.seq IS NULL OR open.seq > done.seq
        """,
        [attempt, cut_ns, cut_ns, *groups, attempt, cut_ns],
    )
    return None if step is None else int(step)
