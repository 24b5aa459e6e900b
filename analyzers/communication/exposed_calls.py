"""Exposed communication by operation, size and group: which calls cost the time that `exposure` measures step by step.

    found = exposed_calls(store, attempt=0)
    found["op"], found["exposed_ms"], found["transfer_ms"]       # one element a class of calls, the most exposed first

1. Of each call of a rank: the time in flight, what the rank was blocked for in it (exposed), and what of that even the
   member that came last would have waited (transfer); as in `exposure`, and of the same steps.
2. Calls beside one another may be waited for at once. So the waits of a rank's step are scaled down to what the step
   recorded of them, and the classes' exposed times add up to the exposed time of the run.
3. Sums by operation, group and size, as means over all ranks and steps that were looked at.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from analyzers.account.exposure import MAX_CALLS, MAX_STEPS, steps_with_calls
from analyzers.communication.bandwidth import SIZE_OF_CALL
from analyzers.source import Source, every_kth

__all__ = ["exposed_calls"]


def exposed_calls(source: Source, attempt: int, *, limit: int = 200) -> dict[str, npt.NDArray[Any]]:
    """Columns op, process_group, bytes, num_calls, busy_ms, exposed_ms, transfer_ms, exposed_ratio, num_classes.

    Numbers and times are a rank's in a step; the ratio is of the time in flight; `num_classes` counts also those beyond
    the limit. Of long runs every k-th step is looked at.
    """
    every = every_kth(source, "collectives", MAX_CALLS, MAX_STEPS)
    return source.query(
        f"""
        WITH calls AS (
            SELECT rank, step, op, process_group, seq, bytes, end_ns - issue_ns AS busy, coalesce(wait_ns, 0) AS waited,
                   min(end_ns - issue_ns) OVER (PARTITION BY process_group, seq) AS transfer
            FROM collectives
            WHERE attempt = ? AND step % ? = 0 AND end_ns IS NOT NULL AND rank >= 0 AND peer IS NULL
              AND coalesce(phase, '') NOT IN ('checkpoint', 'evaluate')),
        sizes AS (SELECT process_group, seq, op, {SIZE_OF_CALL} AS bytes FROM calls GROUP BY process_group, seq, op),
        once AS (
            SELECT rank, step, max(duration_ns - coalesce(checkpoint_ns, 0) - coalesce(evaluate_ns, 0)) AS took,
                   max(collective_wait_ns) AS counted
            FROM steps WHERE attempt = ? AND {steps_with_calls(source, attempt)} AND step % ? = 0 AND rank >= 0
              AND duration_ns IS NOT NULL
            GROUP BY rank, step HAVING count(*) = 1),
        kept AS (
            SELECT rank, step, coalesce(least(sum(waited), coalesce(any_value(counted), sum(waited)), any_value(took))
                                        / nullif(sum(waited), 0), 0) AS ratio
            FROM calls JOIN once USING (rank, step) WHERE took > 0 GROUP BY rank, step),
        classes AS (
            SELECT c.op, c.process_group, s.bytes, count(*) AS num, sum(c.busy) AS busy,
                   sum(c.waited * k.ratio) AS exposed, sum(least(c.waited, c.transfer) * k.ratio) AS transfer
            FROM calls c JOIN kept k USING (rank, step)
            JOIN sizes s ON c.seq IS NOT DISTINCT FROM s.seq AND c.process_group IS NOT DISTINCT FROM s.process_group
                            AND c.op IS NOT DISTINCT FROM s.op
            GROUP BY c.op, c.process_group, s.bytes)
        SELECT op, process_group, bytes, num / looked AS num_calls, busy / looked / 1e6 AS busy_ms,
               exposed / looked / 1e6 AS exposed_ms, transfer / looked / 1e6 AS transfer_ms,
               CAST(exposed / nullif(busy, 0) AS DOUBLE) AS exposed_ratio, count(*) OVER () AS num_classes
        FROM classes, (SELECT CAST(count(*) AS DOUBLE) AS looked FROM kept)
        ORDER BY exposed_ms DESC, op, process_group, bytes LIMIT {int(limit)}
        """,
        [attempt, every, attempt, every],
    )
