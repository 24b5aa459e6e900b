"""SQL of the pages, except for what they share with the report (`analyzers.figures`).

    pulse(store)["tokens_per_s"]
    curve = speed(store)                 # columns step, low, middle, high (ms), tokens_per_s

Every function takes a store and plain parameters and returns small columns: long tables are reduced inside DuckDB, to
at most `MAX_BUCKETS` buckets of steps. Missing tables give empty results.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from analyzers.figures.drawing.sampling import sampled
from analyzers.figures.ranks.rank_step import MEASURES
from analyzers.run.records.newest_steps import newest_pace
from analyzers.run.records.token_copies import token_copies
from analyzers.source import Source

__all__ = [
    "MAX_BUCKETS", "Columns", "checkpoints", "extent", "last_finished_steps", "last_steps", "memory_by_rank",
    "memory_curve", "newest_attempt", "none", "pulse", "ranking", "rate", "speed",
    "step_range", "two_ranks",
]  # fmt: skip

MAX_BUCKETS = 1_000
MAX_SCALARS = 12
"""Maximum number of curves of user-logged scalars: more cannot be distinguished."""
MAX_CHECKPOINTS = 500
MAX_SAMPLE = 1_000_000
"""Maximum rows for a percentile; beyond that, every k-th step is used."""
Columns = dict[str, npt.NDArray[Any]]


def none(*names: str) -> Columns:
    """Empty columns with these names."""
    return {name: np.zeros(0) for name in names}


def step_range(source: Source) -> tuple[int, int, int] | None:
    """Return (first step, last step, number of rows) of the ranks' steps; None if there are none."""
    if not source.has("steps"):
        return None
    ((first, last, num),) = source.rows("SELECT min(step), max(step), count(*) FROM steps WHERE rank >= 0")
    return None if first is None or last is None else (int(first), int(last), int(num))


def last_steps(source: Source) -> dict[int, int]:
    """{attempt: its newest step}."""
    if not source.has("steps"):
        return {}
    rows = source.rows("SELECT attempt, max(step) FROM steps WHERE rank >= 0 GROUP BY attempt ORDER BY attempt")
    return {int(attempt): int(step) for attempt, step in rows if step is not None}


def extent(source: Source) -> dict[str, Any]:
    """`last`: {attempt: its newest step}; `ranks`: all of them."""
    rows = source.rows("SELECT DISTINCT rank FROM ranks WHERE rank >= 0 ORDER BY rank") if source.has("ranks") else []
    return {"last": last_steps(source), "ranks": [int(rank) for (rank,) in rows]}


def pulse(source: Source) -> dict[str, float | None]:
    """Values of the newest steps: step, loss, grad_norm, lr, step_ms, tokens_per_s, memory_bytes, memory_rank, and
    num_ranks, the number of ranks with records.

    The newest steps are the steps that ran last, without steps discarded by a rollback. A NaN loss is returned as NaN.
    The loss comes from the lowest rank with a loss, as in the report, because the ranks of an attached loop have
    different losses. Memory is the maximum over the ranks. Tokens count once, even if several ranks read the same text.
    """
    names = ("step", "loss", "grad_norm", "lr", "step_ms", "tokens_per_s", "memory_bytes", "memory_rank", "num_ranks")
    measured = [name for name in names if name not in ("step_ms", "tokens_per_s")]
    pace = newest_pace(source)
    if pace is None:
        return dict.fromkeys(names)
    ((*found,),) = source.rows(
        f"""
        WITH recent AS (SELECT * FROM steps WHERE attempt = {pace.attempt} AND rank >= 0 AND duration_ns IS NOT NULL
                        AND step >= {pace.first_step} AND step <= {pace.last_step}
                        QUALIFY row_number() OVER (PARTITION BY rank, step ORDER BY start_ns DESC) = 1)
        SELECT (SELECT arg_max(loss, start_ns) FROM recent WHERE loss IS NOT NULL AND rank =
                   (SELECT min(rank) FROM recent WHERE loss IS NOT NULL)),
               (SELECT arg_max(grad_norm, start_ns) FROM recent WHERE grad_norm IS NOT NULL),
               (SELECT arg_max(lr, start_ns) FROM recent WHERE lr IS NOT NULL),
               (SELECT max(memory_bytes) FROM recent),
               (SELECT min(rank) FROM recent WHERE memory_bytes = (SELECT max(memory_bytes) FROM recent)),
               (SELECT count(DISTINCT rank) FROM recent)
        """
    )
    result: dict[str, float | None] = dict(zip(measured, (pace.last_step, *found), strict=True))
    return result | {"step_ms": pace.step_ms, "tokens_per_s": pace.tokens_per_s}


def speed(source: Source) -> Columns:
    """Columns step, low, middle, high (percentiles 10, 50, 90 of step time over the ranks, ms), tokens_per_s.

    Every execution of a step counts, with its own tokens and time. For long runs every k-th step of a bucket is
    read.
    """
    names = ("step", "low", "middle", "high", "tokens_per_s")
    span = step_range(source)
    if span is None:
        return none(*names)
    first, last, num = span
    width = max(1, -(-(last - first + 1) // MAX_BUCKETS))
    every = max(1, -(-num // MAX_SAMPLE))
    return source.query(
        f"""
        WITH chosen AS (SELECT attempt, rank, step, tokens, duration_ns / 1e6 AS took,
                               (step - {first}) // {max(width, every)} AS piece FROM steps
                        WHERE duration_ns IS NOT NULL AND rank >= 0 AND (step - {first}) % {every} = 0),
             executed AS (SELECT piece, CAST(sum(tokens) AS DOUBLE) / sum(times) AS tokens FROM (
                              SELECT piece, sum(tokens) AS tokens, count(*) / count(DISTINCT rank) AS times
                              FROM chosen GROUP BY piece, attempt) GROUP BY piece)
        SELECT min(step) AS step, quantile_cont(took, 0.1) AS low, median(took) AS middle,
               quantile_cont(took, 0.9) AS high,
               any_value(executed.tokens) / {token_copies(source)} / nullif(median(took) / 1e3, 0) AS tokens_per_s
        FROM chosen JOIN executed USING (piece) GROUP BY piece ORDER BY 1
        """
    )


def newest_attempt(source: Source) -> int | None:
    """The newest attempt that has steps."""
    if not source.has("steps"):
        return None
    newest = source.rows("SELECT attempt FROM steps WHERE rank >= 0 ORDER BY attempt DESC LIMIT 1")
    return int(newest[0][0]) if newest else None


def ranking(source: Source, first_step: int, last_step: int) -> Columns:
    """Columns rank, own_ms, step_ms, waiting_ms (medians) and memory_mib. For long runs, ranges of steps are
    sampled.
    """
    names = ("rank", "own_ms", "step_ms", "waiting_ms", "memory_mib")
    if step_range(source) is None:
        return none(*names)
    return source.query(
        f"""
        SELECT rank, median({MEASURES["own work"][0]}) AS own_ms, median(duration_ns) / 1e6 AS step_ms,
               median({MEASURES["waiting"][0]}) AS waiting_ms, max(memory_bytes) / 1048576.0 AS memory_mib
        FROM steps WHERE rank >= 0 AND duration_ns IS NOT NULL AND {sampled(source, first_step, last_step)}
        GROUP BY rank ORDER BY own_ms DESC NULLS LAST, rank
        """
    )


def two_ranks(source: Source, a: int, b: int, measure: str) -> Columns:
    """Columns step, a, b: a measure of `MEASURES` of two ranks, medians of at most `MAX_BUCKETS` pieces."""
    span = step_range(source)
    if span is None:
        return none("step", "a", "b")
    first, last, _ = span
    width = max(1, -(-(last - first + 1) // MAX_BUCKETS))
    expression = MEASURES[measure][0]
    return source.query(
        f"""
        SELECT min(step) AS step, median({expression}) FILTER (rank = ?) AS a,
               median({expression}) FILTER (rank = ?) AS b
        FROM steps WHERE rank IN (?, ?) AND duration_ns IS NOT NULL GROUP BY step // {width} ORDER BY 1
        """,
        [a, b, a, b],
    )


def rate(source: Source) -> Columns:
    """Columns step, lr, from the first rank that recorded a learning rate."""
    if not source.has("steps"):
        return none("step", "lr")
    return source.query(
        "SELECT step, lr FROM steps WHERE lr IS NOT NULL AND rank = (SELECT min(rank) FROM steps WHERE lr IS NOT NULL) "
        "ORDER BY attempt, start_ns"
    )


def expert_load(source: Source) -> Columns:
    """Columns step, high, low: load of the most and the least used expert of all layers; 1 is an even share."""
    if not source.has("experts"):
        return none("step", "high", "low")
    return source.query(
        """
        SELECT step, max(load) AS high, min(load) AS low FROM (
            SELECT step, CAST(sum(tokens) * count(*) OVER own / sum(sum(tokens)) OVER own AS DOUBLE) AS load
            FROM experts GROUP BY step, layer, expert WINDOW own AS (PARTITION BY step, layer))
        GROUP BY step ORDER BY step
        """
    )


def logged_scalars(source: Source) -> Columns:
    """Columns name, step, value: the scalars that the user logged, as means over the ranks. A scalar with many values
    is shown at evenly spaced steps only."""
    if not source.has("scalars"):
        return none("name", "step", "value")
    return source.query(
        f"""
        WITH means AS (
            SELECT name, step, avg(value) AS value, row_number() OVER (PARTITION BY name ORDER BY step) - 1 AS place,
                   count(*) OVER (PARTITION BY name) AS num, dense_rank() OVER (ORDER BY name) AS nth
            FROM scalars WHERE attempt = (SELECT max(attempt) FROM scalars s WHERE s.step = scalars.step)
            GROUP BY name, step)
        SELECT name, step, value FROM means
        WHERE nth <= {MAX_SCALARS} AND place % greatest(1, num // {MAX_BUCKETS}) = 0 ORDER BY name, step
        """
    )


def memory_curve(source: Source) -> Columns:
    """Columns step, low, middle, high: minimum, median and maximum memory of the ranks in MiB."""
    span = step_range(source)
    if span is None:
        return none("step", "low", "middle", "high")
    first, last, num = span
    width, every = max(1, -(-(last - first + 1) // MAX_BUCKETS)), max(1, -(-num // MAX_SAMPLE))
    return source.query(
        f"""
        SELECT min(step) AS step, min(memory_bytes) / 1048576.0 AS low, median(memory_bytes) / 1048576.0 AS middle,
               max(memory_bytes) / 1048576.0 AS high
        FROM steps WHERE memory_bytes IS NOT NULL AND rank >= 0 AND (step - {first}) % {every} = 0
        GROUP BY (step - {first}) // {max(width, every)} ORDER BY 1
        """
    )


def memory_by_rank(source: Source) -> Columns:
    """Columns rank, first_mib, largest_mib, last_mib of the newest attempt."""
    attempt = newest_attempt(source)
    if attempt is None:
        return none("rank", "first_mib", "largest_mib", "last_mib")
    return source.query(
        """
        SELECT rank, arg_min(memory_bytes, step) / 1048576.0 AS first_mib, max(memory_bytes) / 1048576.0 AS largest_mib,
               arg_max(memory_bytes, step) / 1048576.0 AS last_mib
        FROM steps WHERE attempt = ? AND rank >= 0 AND memory_bytes IS NOT NULL GROUP BY rank ORDER BY largest_mib DESC
        """,
        [attempt],
    )


def checkpoints(source: Source) -> Columns:
    """Columns attempt, step, tier, states (in order), bytes, duration_ms, stall_ms, reason: one row per checkpoint.

    Returns the newest `MAX_CHECKPOINTS` of each tier; column num is the total number.
    """
    names = ("attempt", "step", "tier", "states", "bytes", "duration_ms", "stall_ms", "reason", "num")
    if not source.has("checkpoints"):
        return none(*names)
    return source.query(
        f"""
        SELECT *, count(*) OVER (PARTITION BY tier) AS num FROM (
            SELECT attempt, step, tier, string_agg(state, ', ' ORDER BY wall_ns) AS states, max(bytes) AS bytes,
                   max(duration_ns) / 1e6 AS duration_ms, max(stall_ns) / 1e6 AS stall_ms,
                   coalesce(string_agg(DISTINCT reason, '; ') FILTER (reason <> ''), '') AS reason
            FROM checkpoints GROUP BY attempt, step, tier)
        QUALIFY row_number() OVER (PARTITION BY tier ORDER BY attempt DESC, step DESC) <= {MAX_CHECKPOINTS}
        ORDER BY attempt DESC, step DESC, tier
        """
    )


def last_finished_steps(source: Source) -> dict[int, int]:
    """{attempt: its newest step that a rank has finished}."""
    if not source.has("steps"):
        return {}
    rows = source.rows(
        "SELECT attempt, max(step) FROM steps WHERE duration_ns IS NOT NULL AND rank >= 0 GROUP BY attempt"
    )
    return {int(attempt): int(step) for attempt, step in rows if step is not None}
