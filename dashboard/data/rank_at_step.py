"""One rank in one step: how the rank and its peers used the time, its collectives and its events.

found = rank_at_step(store, rank=3, step=60)
found["account"]["forward"]         # (own milliseconds, median of the peers)
"""

from __future__ import annotations

from typing import Any

from analyzers.account.time_classes import GAPS, NOT_MEASURED, PHASES, WAITED, own
from analyzers.source import Source, lacking
from dashboard.data.sql.event_queries import event_text

__all__ = ["rank_at_step"]

MAX_CALLS = 30
MAX_EVENTS = 50
_CLASSES = {
    **{phase: own(phase) for phase in PHASES},
    **{gap.replace("_", " "): own(gap) for gap in GAPS},
    "waiting and transfers": WAITED,
    "not measured": NOT_MEASURED,
    "step": "duration_ns",
}


def rank_at_step(source: Source, rank: int, step: int) -> dict[str, Any]:
    """Load one rank in one step. `attempt` is None if the rank has no such step. If the step ran repeatedly, the last
    execution counts.
    """
    found: dict[str, Any] = {"attempt": None, "account": {}, "calls": [], "events": [], "num_peers": 0, "place": None}
    if not source.has("steps"):
        return found
    rows = source.rows(
        "SELECT attempt, start_ns FROM steps WHERE rank = ? AND step = ? ORDER BY attempt DESC, start_ns DESC LIMIT 1",
        [rank, step],
    )
    if not rows:
        return found
    attempt, start_ns = rows[0]
    found |= {"attempt": attempt} | _account(source, attempt, rank, step)
    found["calls"] = _calls(source, attempt, rank, step, start_ns)
    found["events"] = _events(source, attempt, rank, step)
    found["place"] = _place(source, attempt, rank)
    return found


def _place(source: Source, attempt: int, rank: int) -> tuple[str, str] | None:
    """Host and device of the rank in the attempt; None if they were not recorded."""
    if lacking(source, ranks=("host", "device", "wall_ns")):
        return None
    ((host, device),) = source.rows(
        "SELECT arg_max(host, wall_ns), arg_max(device, wall_ns) FROM ranks WHERE attempt = ? AND rank = ?",
        [attempt, rank],
    )
    return (str(host), str(device)) if host and device else None


def _account(source: Source, attempt: int, rank: int, step: int) -> dict[str, Any]:
    """{class: (milliseconds of the rank, median of the other ranks in its pipeline stage)}."""
    picked = ", ".join(f"{sql} / 1e6 AS c{number}" for number, sql in enumerate(_CLASSES.values()))
    columns = ", ".join(
        f"max(c{number}) FILTER (rank = $1), median(c{number}) FILTER (rank <> $1)" for number in range(len(_CLASSES))
    )
    stages, peers = "", "true"
    if source.has("ranks"):
        stages = "stages AS (SELECT rank, coalesce(max(pp), 0) AS pp FROM ranks WHERE attempt = $2 GROUP BY rank),"
        peers = "(rank = $1 OR rank IN (SELECT rank FROM stages WHERE pp = (SELECT pp FROM stages WHERE rank = $1)))"
    ((num_peers, *values),) = source.rows(
        f"""
        WITH {stages} timed AS (
            SELECT rank, {picked} FROM steps WHERE attempt = $2 AND step = $3 AND rank >= 0
            QUALIFY row_number() OVER (PARTITION BY rank ORDER BY start_ns DESC) = 1)
        SELECT count(*) FILTER (rank <> $1), {columns} FROM timed WHERE {peers}
        """,
        [rank, attempt, step],
    )
    pairs = dict(zip(_CLASSES, zip(values[::2], values[1::2], strict=True), strict=True))
    return {"num_peers": num_peers, "account": {name: pair for name, pair in pairs.items() if any(pair)}}


def _calls(source: Source, attempt: int, rank: int, step: int, start_ns: int) -> list[dict[str, Any]]:
    """The rank's collectives in the step. Calls that never ended come first, then the longest waits."""
    if lacking(source, collectives=("wait_ns", "issue_ns", "end_ns", "caller")):
        return []
    rows = source.rows(
        f"""
        SELECT op, process_group, seq, bytes, round((issue_ns - ?) / 1e6, 3), round(wait_ns / 1e6, 3),
               round((end_ns - issue_ns) / 1e6, 3), is_async, caller
        FROM collectives WHERE attempt = ? AND rank = ? AND step = ? AND issue_ns >= ?
        ORDER BY end_ns IS NOT NULL, coalesce(wait_ns, 0) DESC LIMIT {MAX_CALLS}
        """,
        [start_ns, attempt, rank, step, start_ns],
    )
    names = (
        "operation",
        "group",
        "number",
        "bytes",
        "issued at (ms)",
        "waited (ms)",
        "in flight (ms)",
        "asynchronous",
        "caller",
    )
    return [dict(zip(names, row, strict=True)) for row in rows]


def _events(source: Source, attempt: int, rank: int, step: int) -> list[dict[str, Any]]:
    """Events of the rank and of the nodes in the step."""
    if lacking(source, events=("detail",)):
        return []
    rows = source.rows(
        f"""
        SELECT kind, rank, CAST(detail AS VARCHAR) FROM events
        WHERE attempt = ? AND step = ? AND rank IN (?, -1) ORDER BY wall_ns LIMIT {MAX_EVENTS}
        """,
        [attempt, step, rank],
    )
    return [
        {"event": kind, "from": "the rank" if by >= 0 else "a node", "fields": event_text(detail)}
        for kind, by, detail in rows
    ]
