"""Drop printed durations that are the time since the program's start, or since that of an epoch.

    drop_elapsed(steps)        # rows of `store.readers.logs.step_rows`; changes them

`Time: 29.5 sec` may be the duration of a step or a clock. A clock grows from line to line by the time that passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from analyzers.evidence.printed_steps import THROUGHPUT
from analyzers.logs.policy import LogPolicy
from analyzers.policy import SHARED

__all__ = ["drop_elapsed"]


def drop_elapsed(steps: Sequence[dict[str, Any]]) -> None:
    """Replace such durations of a rank by those that its lines have otherwise."""
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for row in steps:
        if row.get("duration_ns") and row.get("otherwise") and not row.get("is_of_bar"):
            by_rank.setdefault(row["rank"], []).append(row)
    for rows in by_rank.values():
        if len(rows) >= SHARED.many_values and _is_clock(rows):
            for row in rows:
                clock_ns = row["duration_ns"]
                row.update(row.pop("otherwise"))
                if row["start_ns"] is not None:
                    row["start_ns"] += clock_ns - (row["duration_ns"] or 0)


def _is_clock(rows: Sequence[Mapping[str, Any]]) -> bool:
    values: list[int] = [row["duration_ns"] for row in rows]
    ends: list[int | None] = [None if row["start_ns"] is None else row["start_ns"] + row["duration_ns"] for row in rows]
    grown = [after - before for before, after in pairwise(values)]
    passed = [after - before for before, after in pairwise(ends) if before is not None and after is not None]
    needed = THROUGHPUT.agreement_ratio * len(grown)
    if len(passed) < len(grown):  # no times
        return values[-1] >= SHARED.clear_factor * values[0] and sum(one > 0 for one in grown) >= needed
    grain_ns = LogPolicy().same_second_s * 1e9
    num_equal = sum(
        0 < one and abs(one - time) <= SHARED.equal_ratio * time + grain_ns
        for one, time in zip(grown, passed, strict=True)
    )
    return num_equal >= needed and sum(one for one in grown if one > 0) > SHARED.explained_ratio * sum(passed)
