"""Differences between the nodes' clocks, so that all records of a run can be shown by the clock of its first node.

    clocks = node_clocks(connection, paths, tables)     # the files are attached as n0, n1, ...
    clocks[1].ahead_ns(attempt=0)               # node 1's clock minus the first node's

A node whose clock is wrong dates all of its records wrongly: the start or the end of the run, and the order of events.

1. All nodes end a step at nearly the same time, because a step contains a collective. So the median difference of the
   first steps' ends is the difference of the clocks. A rank reads the wall clock once, when it starts to record, so the
   difference holds for all of its records of an attempt.
2. An attempt without a common step gets the difference that the first node's `watch` measured (event `clock_offset`),
   else that of another attempt.

A difference below `LEAST_NS` is ignored: steps without a collective may end at different times.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["CLOCK_WAS", "LEAST_NS", "NodeClock", "node_clocks"]

LEAST_NS = 1_000_000_000
FIRST_STEPS = 10
"""Number of an attempt's first steps that are compared."""
CLOCK_WAS = "clock was"
_NODE = re.compile(r"-node(\d+)\.duckdb$")
_ENDS = f"""
SELECT attempt, step, max(start_ns + duration_ns) AS end_ns FROM n{{0}}.main.steps_done JOIN (
    SELECT attempt, min(step) AS first FROM n{{0}}.main.steps_done WHERE rank >= 0 GROUP BY attempt) USING (attempt)
WHERE duration_ns IS NOT NULL AND rank >= 0 AND step < first + {FIRST_STEPS} GROUP BY attempt, step
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeClock:
    """One node's clock, in each attempt."""

    node: int
    by_attempt: dict[int, int] = field(default_factory=dict)
    """{attempt: nanoseconds ahead of the first node's clock}; 0 if the clocks agree."""

    def ahead_ns(self, attempt: int) -> int:
        """The difference in an attempt, or in the last one before it."""
        before = [known for known in self.by_attempt if known <= attempt]
        return self.by_attempt[max(before) if before else min(self.by_attempt)]

    @property
    def ahead_sql(self) -> str:
        """The difference as an expression of the column `attempt`."""
        cases = " ".join(f"WHEN attempt < {attempt} THEN {self.ahead_ns(attempt - 1)}"
                         for attempt in sorted(self.by_attempt)[1:])  # fmt: skip
        last_ns = self.ahead_ns(max(self.by_attempt))
        return f"CASE {cases} ELSE {last_ns} END" if cases else str(last_ns)

    @property
    def problem(self) -> str:
        """The difference in words, for users."""
        ahead_ns = max(self.by_attempt.values(), key=abs)
        how = f"{abs(ahead_ns) / 1e9:,.1f} s {'ahead of' if ahead_ns > 0 else 'behind'}"
        return f"node {self.node}'s {CLOCK_WAS} {how} the first node's: its times are shown by the first node's clock"


def node_clocks(
    connection: DuckDBPyConnection, paths: Sequence[Path], tables: Collection[tuple[str, str]]
) -> dict[int, NodeClock]:
    """{index of the file: clock} of the nodes with another time than the first. `tables`: (file, table) that exist."""
    import duckdb

    if len(paths) < 2:
        return {}
    try:
        ends = [_rows(connection, _ENDS, i) if (f"n{i}", "steps_done") in tables else [] for i in range(len(paths))]
        measured = _measured(connection) if ("n0", "events") in tables else {}
    except (duckdb.CatalogException, duckdb.BinderException, duckdb.ConversionException):
        return {}  # a file of another version
    home: dict[int, dict[int, int]] = {}
    found: dict[int, NodeClock] = {}
    for i, rows in enumerate(ends):
        here: dict[int, dict[int, int]] = {}
        for attempt, step, end_ns in rows:
            here.setdefault(attempt, {})[step] = end_ns
        differences = {
            attempt: sorted(end_ns - home[attempt][step] for step, end_ns in steps.items() if step in home[attempt])
            for attempt, steps in here.items()
            if attempt in home
        }
        ahead = {attempt: each[len(each) // 2] for attempt, each in differences.items() if each}
        node = int(match[1]) if (match := _NODE.search(paths[i].name)) else 0
        ahead = measured.get(node, {}) | ahead if i else {}
        ahead = {attempt: ns if abs(ns) >= LEAST_NS else 0 for attempt, ns in sorted(ahead.items())}
        if any(ahead.values()):
            found[i] = NodeClock(node=node, by_attempt=ahead)
        for attempt, steps in here.items():
            home.setdefault(attempt, {step: end_ns - ahead.get(attempt, 0) for step, end_ns in steps.items()})
    return found


def _rows(connection: DuckDBPyConnection, sql: str, index: int) -> list[tuple[Any, ...]]:
    return connection.execute(sql.format(index)).fetchall()


def _measured(connection: DuckDBPyConnection) -> dict[int, dict[int, int]]:
    """{node: {attempt: first offset that the first node's `watch` measured}}, nanoseconds."""
    found: dict[int, dict[int, int]] = {}
    for attempt, node, offset_ns in connection.execute(
        "SELECT attempt, TRY_CAST(detail->>'node_rank' AS INTEGER), TRY_CAST(detail->>'offset_ns' AS BIGINT) "
        "FROM n0.main.events WHERE kind = 'clock_offset' ORDER BY wall_ns"
    ).fetchall():
        if None not in (attempt, node, offset_ns):
            found.setdefault(node, {}).setdefault(attempt, offset_ns)
    return found
