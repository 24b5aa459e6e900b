"""Exposed communication (not hidden by computation), by rank and step and by class of calls.

    measured = measure(source, attempt=0)
    measured.exposed_ms, measured.busy_ms, measured.transfer_ms      # one element per (rank, step)
    exposed_calls(source, attempt=0)["exposed_ms"]                   # one element per class of calls

* *Communication* of a rank in a step is the time with at least one of its calls in flight: the union of issue to end,
  so concurrent calls count once.
* *Exposed* is the part in which the rank was blocked (on a GPU: its stream was stalled), *overlapped* the rest.
* Within the exposed part, *transfer* is the time for which even the last member to enter waits. The rest is waiting for
  late members.

Point-to-point calls of a pipeline (`bubble` measures their cost), checkpoints, evaluations, and steps that ended only
because a hang was interrupted are excluded. If a rollback repeated a step, its last execution counts. Only durations
are used, except to tell which execution a call belongs to. In long runs every k-th step is read.

A stamped stall shows no call, so the waits of a stamped rank are divided as in the account of its time (`split_waits`).
Ranks whose waits are not split are left out, because their stalls include the idle time of a pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from analyzers.account.device.measured_by import is_stamped
from analyzers.account.device.stalls import stall_parts
from analyzers.account.time_classes import TRAINING, WAITED
from analyzers.account.wait_split import split_waits
from analyzers.run.records.standstills import before_standstill, standstills
from analyzers.source import READ_CALLS, READ_STEPS, Floats, Ints, Source, every_kth, floats, ints

__all__ = ["GROUPS_IN_ORDER", "SIZE_OF_CALL", "Exposure", "exposed_calls", "measure"]

GROUPS_IN_ORDER = r"TRY_CAST(regexp_extract(process_group, '\d+') AS BIGINT), process_group"
"""SQL to sort by: `tp:8-15` before `tp:104-111`."""
SIZE_OF_CALL = (
    "CASE WHEN min(op) = 'all_to_all' THEN CAST(2 ** round(log2(greatest(max(bytes), 1))) AS BIGINT) "
    "ELSE max(bytes) END"
)
"""SQL aggregate over the members of a call. The size of an all-to-all of expert tokens differs from call to call:
rounding it to a power of two gives one class instead of thousands."""
_TIMES = ("step", "busy", "exposed", "transfer")
_COUNTED = f"CASE WHEN collective_wait_ns IS NOT NULL THEN {WAITED} END"
"""SQL: the step's recorded waiting, an upper bound for its exposed communication."""

_OF_LAST = "(since_ns IS NULL OR issue_ns >= since_ns)"
"""SQL condition: the call belongs to the last execution of its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """One element per (rank, step), ordered by step; milliseconds."""

    rank: Ints
    step: Ints
    step_ms: Floats
    busy_ms: Floats
    exposed_ms: Floats
    transfer_ms: Floats
    has_unknown_idle: bool = False
    """True if ranks were left out because the idle time of their pipeline is not known."""

    @property
    def num_steps(self) -> int:
        """Number of steps measured."""
        return len(np.unique(self.step))

    def ratio(self, part: Floats) -> float:
        """Share of `part` in the total step time of all ranks."""
        return float(part.sum() / self.step_ms.sum()) if len(self.step) else 0.0

    @property
    def overlapped_ms(self) -> Floats:
        """Milliseconds of communication in flight while the rank computed."""
        hidden: Floats = np.maximum(self.busy_ms - self.exposed_ms, 0.0)
        return hidden

    def by_step(self) -> tuple[Ints, list[Floats]]:
        """Steps, and the means over their ranks: transfer, waiting for late members, overlapped."""
        steps, place = np.unique(self.step, return_inverse=True)
        num = np.bincount(place)
        late = np.maximum(0.0, self.exposed_ms - self.transfer_ms)
        parts = (self.transfer_ms, late, self.overlapped_ms)
        return steps, [np.bincount(place, weights=part) / num for part in parts]


def measure(source: Source, attempt: int, *, since_step: int = 0) -> Exposure:
    """Exposure of the finished steps of an attempt; `since_step` is the first of them."""
    every = every_kth(source, "collectives", READ_CALLS, READ_STEPS)
    if is_stamped(source, attempt):
        return _on_devices(source, attempt, since_step, every)
    table = source.query(
        f"""
        WITH {_last_executions(source, attempt)},
        calls AS (
            SELECT rank, step, issue_ns, end_ns, coalesce(wait_ns, 0) AS waited,
                   min(end_ns - issue_ns) OVER (PARTITION BY process_group, seq) AS transfer
            FROM collectives
            WHERE attempt = ? AND step >= ? AND step % ? = 0 AND end_ns IS NOT NULL AND rank >= 0 AND peer IS NULL
              AND coalesce(phase, '') NOT IN ('checkpoint', 'evaluate')),
        in_order AS (
            SELECT *, max(end_ns) OVER (PARTITION BY rank, step ORDER BY issue_ns, end_ns
                                        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
            FROM calls JOIN last_executions USING (rank, step) WHERE {_OF_LAST}),
        spent AS (
            SELECT rank, step, any_value(took) AS took, any_value(counted) AS counted,
                   sum(greatest(0, end_ns - greatest(issue_ns, coalesce(before, issue_ns)))) AS busy,
                   sum(waited) AS waited, sum(least(waited, transfer)) AS transfer
            FROM in_order GROUP BY rank, step)
        SELECT rank, step, took / 1e6 AS step_ms, least(busy, took) / 1e6 AS busy_ms,
               least(waited, coalesce(counted, waited), took) / 1e6 AS exposed_ms,
               least(transfer, waited, coalesce(counted, waited), took) / 1e6 AS transfer_ms
        FROM spent ORDER BY step, rank
        """,
        [attempt, every, attempt, since_step, every],
    )
    step_ms, busy_ms, exposed_ms, transfer_ms = (floats(table[f"{name}_ms"]) for name in _TIMES)
    return Exposure(
        rank=ints(table["rank"]), step=ints(table["step"]), step_ms=step_ms, busy_ms=busy_ms, exposed_ms=exposed_ms,
        transfer_ms=transfer_ms,
    )  # fmt: skip


def _on_devices(source: Source, attempt: int, since_step: int, every: int) -> Exposure:
    """Exposure of stamped steps: their streams' stalls, and the calls in flight between their stamps."""
    split = split_waits(source, attempt, since_step)
    parts = stall_parts(source, attempt, since_step=since_step, every=every)
    # If a step was repeated, its stalls are those of all executions. The share of them that is due to a late member is
    # applied to the last execution.
    late = {(part.rank, part.step): part.late_ns / part.exposed_ns for part in parts if part.exposed_ns}
    table = source.query(
        f"""
        WITH {_last_executions(source, attempt)},
        calls AS (
            SELECT rank, step, issue_ns, end_ns,
                   max(end_ns) OVER (PARTITION BY rank ORDER BY issue_ns, end_ns
                                     ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
            FROM collectives
            WHERE attempt = ? AND step >= ? AND end_ns IS NOT NULL AND rank >= 0 AND peer IS NULL
              AND coalesce(phase, '') NOT IN ('checkpoint', 'evaluate')),
        spent AS (SELECT rank, step, sum(greatest(0, end_ns - greatest(issue_ns, coalesce(before, issue_ns)))) AS busy
                  FROM calls JOIN last_executions USING (rank, step) WHERE {_OF_LAST} GROUP BY rank, step)
        SELECT rank, step, {TRAINING} / 1e6 AS step_ms, coalesce(busy, 0) / 1e6 AS busy_ms, {WAITED} / 1e6 AS exposed_ms
        FROM steps LEFT JOIN spent USING (rank, step)
        WHERE attempt = ? AND step >= ? AND step % ? = 0 AND rank >= 0 AND stamped_steps > 0
        QUALIFY row_number() OVER (PARTITION BY rank, step ORDER BY start_ns DESC) = 1 AND step_ms > 0
                AND {before_standstill(standstills(source))}
        ORDER BY step, rank
        """,
        [attempt, every, attempt, since_step, attempt, since_step, every],
    )
    unknown = [rank for number, rank in split.idle_unknown if number == attempt]
    is_known = ~np.isin(table["rank"], unknown)
    table = {name: values[is_known] for name, values in table.items()}
    rank, step = ints(table["rank"]), ints(table["step"])
    step_ms, exposed = floats(table["step_ms"]), floats(table["exposed_ms"])
    places = list(zip(rank.tolist(), step.tolist(), strict=True))
    ratio = np.array([late.get(place, split.late_ratio.get((attempt, place[0]), 0.0)) for place in places])
    return Exposure(
        rank=rank, step=step, step_ms=step_ms, exposed_ms=exposed,
        # The last calls of a step may still be in flight in the next step and cause stalls there.
        busy_ms=np.minimum(np.maximum(floats(table["busy_ms"]), exposed), step_ms),
        transfer_ms=exposed * (1.0 - ratio), has_unknown_idle=bool(unknown),
    )  # fmt: skip


def exposed_calls(source: Source, attempt: int, *, limit: int = 200) -> dict[str, npt.NDArray[Any]]:
    """Columns op, process_group, bytes, num_calls, busy_ms, exposed_ms, transfer_ms, exposed_ratio, num_classes.

    One element per class of calls, the most exposed first. Counts and times are means over ranks and steps, the ratio
    is exposed / busy, and `num_classes` includes classes beyond the limit. Waits for concurrent calls overlap, so the
    waits of a rank's step are scaled to its recorded waiting: the classes add up to the run's exposed time.
    """
    every = every_kth(source, "collectives", READ_CALLS, READ_STEPS)
    return source.query(
        f"""
        WITH {_last_executions(source, attempt)},
        finished AS (
            SELECT rank, step, op, process_group, seq, bytes, issue_ns, end_ns - issue_ns AS busy,
                   coalesce(wait_ns, 0) AS waited,
                   min(end_ns - issue_ns) OVER (PARTITION BY process_group, seq) AS transfer
            FROM collectives
            WHERE attempt = ? AND step % ? = 0 AND end_ns IS NOT NULL AND rank >= 0 AND peer IS NULL
              AND coalesce(phase, '') NOT IN ('checkpoint', 'evaluate')),
        calls AS (SELECT * FROM finished JOIN last_executions USING (rank, step) WHERE {_OF_LAST}),
        sizes AS (SELECT process_group, seq, op, {SIZE_OF_CALL} AS bytes FROM calls GROUP BY process_group, seq, op),
        scales AS (
            SELECT rank, step, coalesce(least(sum(waited), coalesce(any_value(counted), sum(waited)), any_value(took))
                                        / nullif(sum(waited), 0), 0) AS scale
            FROM calls GROUP BY rank, step),
        classes AS (
            SELECT c.op, c.process_group, s.bytes, count(*) AS num, sum(c.busy) AS busy,
                   sum(c.waited * k.scale) AS exposed, sum(least(c.waited, c.transfer) * k.scale) AS transfer
            FROM calls c JOIN scales k USING (rank, step)
            JOIN sizes s ON c.seq IS NOT DISTINCT FROM s.seq AND c.process_group IS NOT DISTINCT FROM s.process_group
                            AND c.op IS NOT DISTINCT FROM s.op
            GROUP BY c.op, c.process_group, s.bytes)
        SELECT op, process_group, bytes, num / num_steps AS num_calls, busy / num_steps / 1e6 AS busy_ms,
               exposed / num_steps / 1e6 AS exposed_ms, transfer / num_steps / 1e6 AS transfer_ms,
               CAST(exposed / nullif(busy, 0) AS DOUBLE) AS exposed_ratio, count(*) OVER () AS num_classes
        FROM classes, (SELECT CAST(count(*) AS DOUBLE) AS num_steps FROM scales)
        ORDER BY exposed_ms DESC, op, {GROUPS_IN_ORDER}, bytes LIMIT {int(limit)}
        """,
        [attempt, every, attempt, every],
    )


def _last_executions(source: Source, attempt: int) -> str:
    """SQL of a table: the last execution of each rank's step, with its training time and counted waiting.

    Parameters: attempt, k of every k-th step. A step is left out if its last execution did not finish, or finished only
    because a hang was interrupted.
    """
    finished = before_standstill(standstills(source))
    return f"""
        last_executions AS (
            SELECT rank, step, arg_max_null(CASE WHEN {finished} THEN {TRAINING} END, coalesce(start_ns, 0)) AS took,
                   arg_max_null({_COUNTED}, coalesce(start_ns, 0)) AS counted,
                   CASE WHEN count(*) > 1 THEN max(start_ns) END AS since_ns
            FROM steps WHERE attempt = ? AND {_steps_with_calls(source, attempt)} AND step % ? = 0 AND rank >= 0
            GROUP BY rank, step HAVING took > 0)"""


def _steps_with_calls(source: Source, attempt: int) -> str:
    """SQL condition for `steps` from the first to the last step with a call, so that DuckDB skips other row groups."""
    ((first, last),) = source.rows("SELECT min(step), max(step) FROM collectives WHERE attempt = ?", [attempt])
    return "false" if first is None else f"step BETWEEN {int(first)} AND {int(last)}"
