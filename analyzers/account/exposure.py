"""How much of the communication nothing hides: exposed against overlapped, step by step and rank by rank.

    measured = measure(source, attempt=0)
    measured.exposed_ms, measured.busy_ms, measured.transfer_ms      # one element a (rank, step)

* *Communication* of a rank in a step is the time in which at least one of its calls was in flight: the union of
  issue to end, so that calls beside one another count once.
* *Exposed* is what the rank was blocked for (on a GPU: what its stream stood still for), *overlapped* the rest.
* Of the exposed part, *transfer* is what even the member that came last would have waited; the rest is for the late.

Point-to-point calls of a pipeline are left out (`bubble` measures what they cost), and so are checkpoints, evaluations
and steps that ran more than once. Only durations are used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analyzers.source import Floats, Ints, Source, every_kth, floats, ints

__all__ = ["Exposure", "measure", "steps_with_calls"]

MAX_CALLS = 4_000_000
MAX_STEPS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """One element a (rank, step), in the order of steps; milliseconds."""

    rank: Ints
    step: Ints
    step_ms: Floats
    busy_ms: Floats
    exposed_ms: Floats
    transfer_ms: Floats

    @property
    def num_steps(self) -> int:
        """Steps that were looked at."""
        return len(np.unique(self.step))

    def ratio(self, part: Floats) -> float:
        """The part's share of the time of all ranks' steps."""
        return float(part.sum() / self.step_ms.sum()) if len(self.step) else 0.0

    @property
    def overlapped_ms(self) -> Floats:
        """In flight while the rank computed."""
        hidden: Floats = np.maximum(self.busy_ms - self.exposed_ms, 0.0)
        return hidden


def steps_with_calls(source: Source, attempt: int) -> str:
    """A condition on `steps`: the steps between the first and the last call of an attempt, as numbers, so that the
    store skips all others. Calls are often recorded of a part of a run."""
    ((first, last),) = source.rows("SELECT min(step), max(step) FROM collectives WHERE attempt = ?", [attempt])
    return "false" if first is None else f"step BETWEEN {int(first)} AND {int(last)}"


def measure(source: Source, attempt: int, *, since_step: int = 0) -> Exposure:
    """Exposure of the finished steps of an attempt, from `since_step` on; of long runs every k-th step."""
    every = every_kth(source, "collectives", MAX_CALLS, MAX_STEPS)
    table = source.query(
        f"""
        WITH calls AS (
            SELECT rank, step, issue_ns, end_ns, coalesce(wait_ns, 0) AS waited,
                   min(end_ns - issue_ns) OVER (PARTITION BY process_group, seq) AS transfer,
                   max(end_ns) OVER (PARTITION BY rank, step ORDER BY issue_ns, end_ns
                                     ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
            FROM collectives
            WHERE attempt = ? AND step >= ? AND step % ? = 0 AND end_ns IS NOT NULL AND rank >= 0 AND peer IS NULL
              AND coalesce(phase, '') NOT IN ('checkpoint', 'evaluate')),
        spent AS (
            SELECT rank, step, sum(greatest(0, end_ns - greatest(issue_ns, coalesce(before, issue_ns)))) AS busy,
                   sum(waited) AS waited, sum(least(waited, transfer)) AS transfer
            FROM calls GROUP BY rank, step),
        once AS (
            SELECT rank, step, max(duration_ns - coalesce(checkpoint_ns, 0) - coalesce(evaluate_ns, 0)) AS took,
                   max(collective_wait_ns) AS counted
            FROM steps WHERE attempt = ? AND {steps_with_calls(source, attempt)} AND step % ? = 0 AND rank >= 0
              AND duration_ns IS NOT NULL
            GROUP BY rank, step HAVING count(*) = 1)
        SELECT rank, step, took / 1e6 AS step_ms, least(busy, took) / 1e6 AS busy_ms,
               least(waited, coalesce(counted, waited), took) / 1e6 AS exposed_ms,
               least(transfer, waited, coalesce(counted, waited), took) / 1e6 AS transfer_ms
        FROM spent JOIN once USING (rank, step) WHERE took > 0 ORDER BY step, rank
        """,
        [attempt, since_step, every, attempt, every],
    )
    values = {name: floats(table[name]) for name in ("step_ms", "busy_ms", "exposed_ms", "transfer_ms")}
    return Exposure(rank=ints(table["rank"]), step=ints(table["step"]), **values)
