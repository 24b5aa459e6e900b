"""Runs of hundreds of millions of step rows, made small enough for analyzers that compare every rank in every step.

    few = thinned(source)               # the source itself up to `MAX_ROWS` rows of steps
    few.rows("SELECT ... FROM steps")   # the chosen steps of all ranks, whole

1. One pass over all rows, in SQL: the least own time (without waits) of a rank in each block of steps, from every
   fifth step. A single jitter doesn't lift it, whatever lasts a block does.
2. Chosen are steps at even distances over the run, the newest ones without gaps, and those around every place where a
   rank changes against the others, and against its own past, by more than its noise: also without gaps.
3. The rows of those steps are copied into a temporary table, which stands for `steps` in what the analyzers ask.

A slowdown that lasts two blocks or more (100 steps of 100,000) is in the chosen steps with its begin and its end; one
that is shorter, and over, may be missed. `looked_at` says how many steps were chosen, for the report.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .source import Source

__all__ = ["MAX_ROWS", "Thinned", "thinned"]

MAX_ROWS = 30_000_000
CHOSEN_ROWS = 6_000_000
"""Rows of the copy, 200 bytes each; at least `MIN_STEPS` steps."""
MIN_STEPS = 1_000
MAX_BLOCKS = 2_000
EVERY = 5
NEWEST_STEPS = 300
AROUND_STEPS = 75
MAX_EDGES = 6
SIGMAS = 6.0
MIN_CHANGE_RATIO = 0.02
_TABLE = "thinned_steps"
_FROM = re.compile(r"\b(FROM|JOIN)\s+steps\b", re.IGNORECASE)
_OWN = "data_ns + forward_ns + backward_ns + optimizer_ns - coalesce(collective_wait_ns, 0)"


@dataclass(slots=True)
class Thinned:
    """A source whose `steps` are the chosen ones; all other tables are as they are."""

    source: Source
    num_steps: int
    looked_at: int
    block: int

    def query(self, sql: str, params: Sequence[Any] = ()) -> dict[str, npt.NDArray[Any]]:
        return self.source.query(_FROM.sub(rf"\1 {_TABLE}", sql), params)

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self.source.rows(_FROM.sub(rf"\1 {_TABLE}", sql), params)

    def has(self, table: str) -> bool:
        return self.source.has(table)


def thinned(source: Source, max_rows: int = MAX_ROWS) -> Source:
    """The source, or one that looks at some steps of it."""
    if not source.has("steps"):
        return source
    ((num_rows, first, last, ranks),) = source.rows(
        "SELECT count(*), min(step), max(step), max(rank) + 1 FROM steps WHERE rank >= 0"
    )
    if num_rows <= max_rows or ranks < 2:
        return source
    block = max(EVERY * 2, -(-(last - first + 1) // MAX_BLOCKS))
    edges = _edges(source, (first, last), int(ranks), block)
    number = max(MIN_STEPS, CHOSEN_ROWS // int(ranks))
    chosen = _chosen(first, last, edges, number)
    listed = ", ".join(f"({low}, {high}, {every})" for low, high, every in chosen)
    source.rows(
        f"CREATE OR REPLACE TEMP TABLE {_TABLE} AS SELECT * FROM steps WHERE duration_ns IS NULL OR step IN "
        f"(SELECT DISTINCT unnest(range(low, high + 1, every)) FROM (VALUES {listed}) w(low, high, every))"
    )
    looked_at = len(set().union(*(range(low, high + 1, every) for low, high, every in chosen)))
    return Thinned(source=source, num_steps=last - first + 1, looked_at=looked_at, block=block)


def _chosen(first: int, last: int, edges: Sequence[int], number: int) -> list[tuple[int, int, int]]:
    """(first, last, distance) of stretches of steps, about `number` steps in all."""
    dense = [(max(first, edge - AROUND_STEPS), min(last, edge + AROUND_STEPS), 1) for edge in edges]
    dense.append((max(first, last - NEWEST_STEPS + 1), last, 1))
    left = max(number - sum(high - low + 1 for low, high, _ in dense), number // 3)
    return [(first, min(last, first + 20), 1), (first, last, max(1, (last - first + 1) // left)), *dense]


def _edges(source: Source, bounds: tuple[int, int], num_ranks: int, block: int) -> list[int]:
    """Steps at which a rank changes against the others: the largest changes of all ranks."""
    first, last = bounds
    num_blocks = (last - first) // block + 1
    least = np.full((num_ranks, num_blocks), np.nan, dtype=np.float32)
    stretch = block * max(1, MAX_ROWS // (num_ranks * block))
    for low in range(first, last + 1, stretch):
        table = source.query(
            f"SELECT rank, CAST((step - {first}) // {block} AS INTEGER) AS block, CAST(min({_OWN}) AS FLOAT) AS own "
            f"FROM steps WHERE step BETWEEN {low} AND {min(last, low + stretch - 1)} AND step % {EVERY} = 0 "
            "AND rank >= 0 AND duration_ns IS NOT NULL GROUP BY ALL"
        )
        least[np.asarray(table["rank"], dtype=np.int64), np.asarray(table["block"], dtype=np.int64)] = table["own"]
    return [first + place * block for place in changes(least)]


def changes(least: npt.NDArray[np.float32]) -> list[int]:
    """Columns at which a row rises or falls against the median row and its own former level. Pure."""
    with np.errstate(all="ignore"):
        relative = least / np.nanmedian(least, axis=0, keepdims=True)
    relative = np.where(np.isfinite(relative), relative, 1.0).astype(np.float32)
    steps = np.diff(relative, axis=1)
    if not steps.size:
        return []
    sigma = 1.4826 * float(np.median(np.abs(steps)))
    height = np.abs(steps)
    rows, columns = np.nonzero(height > max(SIGMAS * sigma, MIN_CHANGE_RATIO))
    order = np.argsort(-height[rows, columns])
    found: list[int] = []
    for place in columns[order].tolist():
        if all(abs(place + 1 - other) > 1 for other in found):
            found.append(place + 1)
        if len(found) >= MAX_EDGES:
            break
    return sorted(found)
