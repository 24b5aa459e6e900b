"""Spans and calls for figures: what some ranks did in a range of steps, and one step of a pipeline.

items = timeline(store, attempt=0, first_step=38, last_step=41, ranks=[0, 1])
schedule_of_step(store, attempt=0, step=40, ranks=[0, 1, 2, 3])["start_ms"]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analyzers.source import Source

__all__ = ["MAX_ITEMS", "TimelineItem", "schedule_of_step", "timeline"]

MAX_ITEMS = 5_000
"""Maximum number of spans and calls in a timeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineItem:
    """A span or a call of one rank. `end_ms`: None if it never ended."""

    rank: int
    kind: str
    is_call: bool
    start_ms: float
    end_ms: float | None
    wait_ms: float = 0.0
    step: int | None = None
    detail: str = ""
    stage: int | None = None
    microbatch: int | None = None
    pipeline: str = ""
    """Mesh coordinates of the rank without its stage, which are equal for all ranks of one pipeline."""
    zero_ns: int = 0
    """Epoch time of millisecond 0 on the rank's host."""


def timeline(
    source: Source, *, attempt: int, first_step: int, last_step: int, ranks: Sequence[int], limit: int = MAX_ITEMS
) -> list[TimelineItem]:
    """Spans and calls of some ranks in a range of steps, ordered by start. If there are more than `limit`, those that
    never ended are kept first, then the earliest.

    Times are milliseconds since the first of these spans and calls on the rank's host.
    """
    listed = ", ".join(str(int(rank)) for rank in ranks) or "-1"
    parts = []
    if source.has("spans"):
        parts.append(
            "SELECT rank, step, kind, false AS is_call, start_ns, end_ns, wait_ns, concat_ws(', ', 'stage ' || stage, "
            "'microbatch ' || microbatch) AS detail, stage, microbatch FROM spans"
        )
    if source.has("collectives"):
        parts.append(
            "SELECT rank, step, op AS kind, true AS is_call, issue_ns AS start_ns, end_ns, wait_ns, concat_ws(', ', "
            "process_group || ' number ' || seq, bytes || ' bytes', 'peer ' || peer, caller) AS detail, NULL AS stage, "
            "NULL AS microbatch FROM collectives"
        )
    if not parts:
        return []
    place = "concat_ws('.', dp_replicate, dp_shard, cp, tp, ep)"
    hosts = (
        f"SELECT rank, arg_max(host, wall_ns) AS host, arg_max({place}, wall_ns) AS pipeline FROM ranks GROUP BY rank"
    )
    if not source.has("ranks"):
        hosts = "SELECT -1 AS rank, '' AS host, '' AS pipeline WHERE false"
    chosen = " UNION ALL BY NAME ".join(
        f"({part} WHERE attempt = ? AND step BETWEEN ? AND ? AND rank IN ({listed}) "
        f"ORDER BY end_ns IS NOT NULL, start_ns LIMIT {limit // len(parts)})"
        for part in parts
    )
    rows = source.rows(
        f"""
        SELECT p.rank, kind, is_call, start_ns - zero, end_ns - zero, wait_ns, step, detail, stage, microbatch,
               pipeline, zero
        FROM (
            SELECT *, min(start_ns) OVER (PARTITION BY coalesce(host, '')) AS zero
            FROM ({chosen}) LEFT JOIN ({hosts}) USING (rank)) p
        ORDER BY start_ns
        """,
        [attempt, first_step, last_step] * len(parts),
    )
    return [
        TimelineItem(
            rank=rank, kind=str(kind or "?"), is_call=is_call, start_ms=start / 1e6,
            end_ms=None if end is None else end / 1e6, wait_ms=(wait or 0) / 1e6, step=step, detail=str(detail or ""),
            stage=stage, microbatch=microbatch, pipeline=str(pipeline or ""), zero_ns=zero,
        )
        for rank, kind, is_call, start, end, wait, step, detail, stage, microbatch, pipeline, zero in rows
    ]  # fmt: skip


def schedule_of_step(source: Source, attempt: int, step: int, ranks: Sequence[int]) -> dict[str, Any]:
    """Columns rank, stage, microbatch, kind, start_ms, end_ms: what the ranks of one pipeline did in a step."""
    if not source.has("spans") or not ranks:
        return {name: np.zeros(0) for name in ("rank", "stage", "microbatch", "kind", "start_ms", "end_ms")}
    listed = ", ".join(str(int(rank)) for rank in ranks)
    return source.query(
        f"""
        SELECT rank, stage, coalesce(microbatch, -1) AS microbatch, kind,
               (start_ns - min(start_ns) OVER ()) / 1e6 AS start_ms,
               (end_ns - min(start_ns) OVER ()) / 1e6 AS end_ms
        FROM spans WHERE attempt = ? AND step = ? AND stage IS NOT NULL AND end_ns IS NOT NULL AND rank IN ({listed})
        ORDER BY start_ns LIMIT {MAX_ITEMS}
        """,
        [attempt, step],
    )
