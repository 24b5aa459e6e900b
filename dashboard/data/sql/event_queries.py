"""Events for the page: counts by kind, and the newest events that match a filter.

kinds(store)                                        # rows kind, events, first step, last step
events(store, kinds=("rollback",), ranks=(), steps=((40, 60),), text="")
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from analyzers.run.records.event_log import parsed_detail
from analyzers.source import Source
from dashboard.data.sql.step_range import Ranges, sql_of
from probes.tape.event_kinds import COMMON_FIELDS

__all__ = ["MAX_EVENTS", "ROUTINE", "event_text", "events", "kinds"]

MAX_EVENTS = 500
MAX_DETAIL_CHARS = 40_000
MAX_VALUE_CHARS = 300
ROUTINE = ("rank", "process_group", "rank_state", "rank_closed", "nccl_plugin")
"""Kinds of events that every rank writes in every run. Events of these kinds are shown only if the reader selects them.
"""


def kinds(source: Source) -> list[dict[str, Any]]:
    """One row per kind, the most frequent first."""
    if not source.has("events"):
        return []
    rows = source.rows("SELECT kind, count(*), min(step), max(step) FROM events GROUP BY kind ORDER BY 2 DESC, 1")
    return [dict(zip(("kind", "events", "first step", "last step"), row, strict=True)) for row in rows]


def events(source: Source, kinds: tuple[str, ...], ranks: Ranges, steps: Ranges, text: str) -> dict[str, Any]:
    """`num` of the matching events, and the newest `MAX_EVENTS` of them as `rows`. Without kinds, all except
    `ROUTINE`.
    """
    if not source.has("events"):
        return {"num": 0, "rows": []}
    marks = ", ".join("?" for _ in kinds or ROUTINE)
    where = (
        f"kind {'IN' if kinds else 'NOT IN'} ({marks}) AND ({sql_of('rank', ranks)}) AND ({sql_of('step', steps)}) "
        "AND (? = '' OR contains(lower(kind || ' ' || coalesce(CAST(detail AS VARCHAR), '')), ?))"
    )
    values = [*(kinds or ROUTINE), text.lower(), text.lower()]
    ((num,),) = source.rows(f"SELECT count(*) FROM events WHERE {where}", values)
    rows = source.rows(
        f"SELECT wall_ns, attempt, rank, step, kind, left(CAST(detail AS VARCHAR), {MAX_DETAIL_CHARS}) FROM events "
        f"WHERE {where} ORDER BY wall_ns DESC LIMIT {MAX_EVENTS}",
        values,
    )
    names = ("wall_ns", "attempt", "rank", "step", "kind", "detail")
    return {"num": int(num), "rows": [dict(zip(names, row, strict=True)) for row in rows]}


def event_text(detail: str | None) -> str:
    """Format the fields specific to an event's kind as `name=value, ...`; the common fields are columns."""
    fields: Mapping[str, Any] = parsed_detail(detail)
    if not fields:
        return (detail or "")[:MAX_VALUE_CHARS]
    parts = (f"{name}={_short(value)}" for name, value in fields.items() if name not in COMMON_FIELDS)
    return ", ".join(parts)[:2_000]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = " ".join(text.split())
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 1] + "…"
