"""Compute the global gradient norm of steps in which each rank recorded only the norm of its shard.

    if make_global_norms(connection):        # after the views of the tables
        ...                                  # table global_norms: attempt, step, grad_norm

1. An attached rank with sharded gradients records the norm of its shard as a scalar named after its sharding group
   (`probes.attach.loop.step_norms`). The squares of these norms add up over the ranks; for a norm of order p, the p-th
   powers do, and for order inf the maximum is taken. Groups with equal sums are replicas of each other and count once;
   the others hold different parameters (stages, tensor-parallel slices) and add up.
2. A manually sharded model is recognised by ranks that exchange tensors in forward or backward but have different norms
   in the same step. Ranks with different norms then hold different shards. Parameters that such ranks share would be
   counted several times. This is corrected in steps with recorded per-parameter gradients (one per interval); the steps
   in between have no global norm.
3. A norm that the loop logged itself is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["PARTS_SQL", "make_global_norms"]

PREFIX = "grad_norm_part "
LOGGED = "measured_grad_norm"
"""Name of the scalar for the measured norm. It is used if the loop also logs a norm itself."""
_SAMPLE_STEPS = 32
"""Number of first steps examined to recognise a manually sharded model. Source: a few suffice and are read quickly."""
_SAME = "round(ln(greatest(total, 1e-300)), 5)"  # equal for totals that differ only by rounding errors

PARTS_SQL = f"""
SELECT attempt, step, CASE WHEN isinf(p) THEN max(total) ELSE pow(sum(total), 1 / p) END AS grad_norm FROM (
    SELECT DISTINCT ON (attempt, step, p, {_SAME}) attempt, step, p, total FROM (
        SELECT attempt, step, name, p, count(*) AS num_ranks,
               CASE WHEN isinf(p) THEN max(value) ELSE sum(pow(value, p)) END AS total FROM (
            SELECT attempt, step, value,
                   coalesce(TRY_CAST(nullif(regexp_extract(name, ', order (.+)$', 1), '') AS DOUBLE), 2) AS p,
                   CASE WHEN name = '{PREFIX}' THEN name || rank ELSE name END AS name
            FROM scalars WHERE starts_with(name, '{PREFIX}'))
        GROUP BY attempt, step, name, p
    ) WHERE num_ranks >= coalesce(TRY_CAST(regexp_extract(name, '^{PREFIX}(\\d+) of ', 1) AS BIGINT), 1)
) GROUP BY attempt, step, p
"""
"""Columns attempt, step, grad_norm for each step in which every rank of a group has recorded its part."""

_BY_HAND_SQL = f"""
WITH sampled AS (
    SELECT attempt, step, max(grad_norm) > 1.001 * min(grad_norm) AS differs
    FROM steps WHERE step <= {_SAMPLE_STEPS} AND isfinite(grad_norm) GROUP BY attempt, step HAVING count(*) > 1)
SELECT attempt FROM sampled GROUP BY attempt HAVING avg(differs::INTEGER) > 0.9
"""
_EXCHANGING_SQL = f"""
SELECT attempt FROM collectives WHERE step BETWEEN 2 AND {_SAMPLE_STEPS}
  AND (phase IN ('forward', 'backward', 'loss') OR op IN ('send', 'recv')) GROUP BY attempt
HAVING count(DISTINCT step) >= 0.5 * least({_SAMPLE_STEPS} - 1, (SELECT max(step) - 1 FROM steps s
                                                               WHERE s.attempt = collectives.attempt))
"""
_DISTINCT_SQL = f"""
SELECT attempt, step, sum(total) AS total FROM (
    SELECT DISTINCT ON (attempt, step, {_SAME}) attempt, step, grad_norm * grad_norm AS total FROM steps
    WHERE attempt IN (SELECT unnest(?::BIGINT[])) AND isfinite(grad_norm))
GROUP BY attempt, step
"""
# Computes two sums from the gradient norms of parameters: over the ranks whose norms differ, and with each parameter
# counted once.
_COMMON_SQL = f"""
WITH own AS (
    SELECT attempt, step, rank, parameter, norm * norm AS total FROM gradients
    WHERE attempt IN (SELECT unnest(?::BIGINT[])) AND isfinite(norm)
), ranks AS (
    SELECT attempt, step, sum(total) AS total FROM (
        SELECT DISTINCT ON (attempt, step, {_SAME}) * FROM (
            SELECT attempt, step, rank, sum(total) AS total FROM own GROUP BY ALL)) GROUP BY ALL
), parts AS (
    SELECT attempt, step, sum(total) AS total FROM (
        SELECT DISTINCT ON (attempt, step, parameter, {_SAME}) attempt, step, total FROM own) GROUP BY ALL
)
SELECT attempt, step, parts.total / ranks.total AS ratio FROM ranks JOIN parts USING (attempt, step)
WHERE ranks.total > 0
"""


def make_global_norms(connection: DuckDBPyConnection) -> bool:
    """Create the table `global_norms` from the views of a run. Returns False and creates no table if every rank has
    global norms.
    """
    has_parts = connection.execute(f"SELECT 1 FROM scalars WHERE starts_with(name, '{PREFIX}') LIMIT 1").fetchone()
    by_hand = {attempt for (attempt,) in connection.execute(_BY_HAND_SQL).fetchall()}
    if by_hand:
        by_hand &= {attempt for (attempt,) in connection.execute(_EXCHANGING_SQL).fetchall()}
    if by_hand:
        logged = connection.execute("SELECT DISTINCT attempt FROM scalars WHERE name = ?", [LOGGED]).fetchall()
        by_hand -= {attempt for (attempt,) in logged}
    if not has_parts and not by_hand:
        return False
    attempts = sorted(by_hand)
    # A step without per-parameter gradients uses the uncorrected sum if shared parameters change it by less than 2 %.
    connection.execute(
        f"""
        CREATE TABLE global_norms AS
        WITH common AS ({_COMMON_SQL}), least AS (SELECT attempt, min(ratio) AS ratio FROM common GROUP BY attempt)
        SELECT attempt, step, grad_norm, false AS replaces FROM ({PARTS_SQL})
        UNION ALL
        SELECT d.attempt, d.step,
               CASE WHEN c.ratio IS NOT NULL THEN sqrt(d.total * c.ratio)
                    WHEN coalesce(l.ratio, 1) > 0.98 THEN sqrt(d.total) END, true
        FROM ({_DISTINCT_SQL}) d LEFT JOIN common c ON c.attempt = d.attempt AND c.step = d.step
        LEFT JOIN least l ON l.attempt = d.attempt
        """,
        [attempts, attempts],
    )
    return True
