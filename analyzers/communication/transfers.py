"""Transfer times of process groups and of pairs of ranks, in windows of steps.

    classes = group_transfers(source, attempt=0, window_steps=5)
    classes["dp", "all_reduce", 4096]["dp:0-3"][7].transfer_ms       # median transfer in window 7
    pairs, members = pair_transfers(source, attempt=0, window_steps=5)

* Collectives: all members leave together, so the shortest time among them is the transfer without waiting. That is the
  time of the member that arrived last, so a slow rank does not lengthen it, but a slow link does.
* Messages between two ranks: the transfer begins when both sides have made their call and ends with the receive. On one
  host both times are from the same clock. Between hosts the clocks differ, so the shorter of the two durations, of the
  send and of the receive, counts.
"""

from __future__ import annotations

from typing import NamedTuple

from analyzers.account.device.exposure import SIZE_OF_CALL
from analyzers.source import Source

__all__ = [
    "Classes", "Groups", "Window", "group_members", "group_transfers", "pair_transfers",
]  # fmt: skip


class Window(NamedTuple):
    """Calls of one group or pair in one window of steps."""

    transfer_ms: float
    num_calls: int
    first_step: int
    last_step: int


Groups = dict[str, dict[int, Window]]
"""{name of the group or pair: {number of the window: window}}."""
Classes = dict[tuple[str, str, int], Groups]
"""{(mesh dimension, operation, bytes): groups}."""


def group_transfers(source: Source, attempt: int, window_steps: int, since_step: int = 0) -> Classes:
    """Read transfers of collectives. A call that a member did not record is left out: it may have come last."""
    sizes = "SELECT process_group, max(len(members)) AS size FROM process_groups WHERE attempt = ? GROUP BY ALL"
    if not source.has("process_groups"):
        sizes = "SELECT NULL::VARCHAR AS process_group, 0 AS size WHERE ? < 0"
    rows = source.rows(
        f"""
        SELECT process_group, op, bytes, step // ? AS part, median(transfer_ns) / 1e6, count(*), min(step), max(step)
        FROM (
            SELECT process_group, min(op) AS op, {SIZE_OF_CALL} AS bytes, min(step) AS step,
                   min(end_ns - issue_ns) AS transfer_ns
            FROM collectives LEFT JOIN ({sizes}) USING (process_group)
            WHERE attempt = ? AND step >= ? AND end_ns >= issue_ns AND op NOT IN ('send', 'recv')
            GROUP BY process_group, seq HAVING count(*) > 1 AND count(*) >= coalesce(any_value(size), 0)
        ) GROUP BY ALL ORDER BY ALL
        """,
        [window_steps, attempt, attempt, since_step],
    )
    classes: Classes = {}
    for group, op, num_bytes, part, *window in rows:
        key = ((group or "").partition(":")[0], op or "", num_bytes or 0)
        classes.setdefault(key, {}).setdefault(group or "", {})[part] = Window(*window)
    return classes


def pair_transfers(
    source: Source, attempt: int, window_steps: int, since_step: int = 0
) -> tuple[dict[tuple[int, bool], Groups], dict[str, tuple[int, ...]]]:
    """Read transfers of messages: {(bytes, True if between hosts): pairs} and {pair: its two ranks}."""
    host = "SELECT rank, arg_max(host, wall_ns) AS host FROM ranks WHERE attempt = ? AND rank >= 0 GROUP BY rank"
    if not source.has("ranks"):
        host = "SELECT 0 AS rank, NULL AS host WHERE ? < 0"
    rows = source.rows(
        f"""
        WITH host AS ({host}), message AS (
            SELECT CASE WHEN op = 'send' THEN rank ELSE peer END AS sender,
                   CASE WHEN op = 'send' THEN peer ELSE rank END AS receiver,
                   max(bytes) AS bytes, min(step) AS step, min(end_ns - issue_ns) AS shorter,
                   max(CASE WHEN op = 'recv' THEN end_ns END) - max(issue_ns) AS by_clock
            FROM collectives
            WHERE attempt = ? AND step >= ? AND op IN ('send', 'recv') AND end_ns >= issue_ns AND peer IS NOT NULL
            GROUP BY process_group, sender, receiver, seq HAVING count(*) = 2 AND count(DISTINCT op) = 2
        )
        SELECT sender, receiver, m.bytes, coalesce(a.host = b.host, false) AS same, step // ? AS part,
               median(CASE WHEN coalesce(a.host = b.host, false) THEN least(shorter, greatest(0, by_clock))
                      ELSE shorter END) / 1e6, count(*), min(step), max(step)
        FROM message m LEFT JOIN host a ON a.rank = sender LEFT JOIN host b ON b.rank = receiver
        GROUP BY ALL ORDER BY ALL
        """,
        [attempt, attempt, since_step, window_steps],
    )
    classes: dict[tuple[int, bool], Groups] = {}
    members: dict[str, tuple[int, ...]] = {}
    for sender, receiver, num_bytes, same, part, *window in rows:
        name = f"rank {sender} -> rank {receiver}"
        members[name] = (int(sender), int(receiver))
        classes.setdefault((int(num_bytes or 0), not same), {}).setdefault(name, {})[int(part)] = Window(*window)
    return classes, members


def group_members(source: Source, attempt: int) -> dict[str, tuple[int, ...]]:
    """Read the ranks of each process group; empty if not recorded."""
    if not source.has("process_groups"):
        return {}
    sql = "SELECT DISTINCT process_group, members FROM process_groups WHERE attempt = ?"
    return {group or "": tuple(int(rank) for rank in ranks or ()) for group, ranks in source.rows(sql, [attempt])}
