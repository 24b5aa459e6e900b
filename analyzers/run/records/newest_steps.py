"""Speed of a run over its newest steps: one window and one formula for the pages, `top` and the metrics.

    pace = newest_pace(source)
    pace.step_ms, pace.tokens_per_s, pace.first_step, pace.last_step     # 41.2, 99_000.0, 151, 200

The report has the same two numbers for all steps: the median over ranks and steps, and tokens by wall time
(`wall_throughput`).
"""

from __future__ import annotations

from dataclasses import dataclass

from analyzers.run.records.standstills import before_standstill, standstills
from analyzers.run.records.token_copies import token_copies
from analyzers.source import READ_ROWS, Source, every_kth

__all__ = ["NEWEST_STEPS", "Pace", "newest_pace", "wall_throughput", "whole_pace"]

_ALL = 1 << 40
NEWEST_STEPS = 50
"""Number of newest steps that define the current speed of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Speed from `first_step` to `last_step` of an attempt. After a rollback the last step is the one that ran last."""

    attempt: int
    first_step: int
    last_step: int
    step_ms: float
    """Median over ranks and steps."""
    shortest_ms: float
    longest_ms: float
    tokens_per_s: float | None
    """Tokens per second of wall time; None if no tokens were recorded."""


def newest_pace(source: Source, copies: int | None = None) -> Pace | None:
    """Speed of the newest attempt; None if it has no finished step. `copies`: see `token_copies`."""
    if not source.has("steps"):
        return None
    rows = source.rows("SELECT attempt FROM steps WHERE rank >= 0 ORDER BY attempt DESC LIMIT 1")
    if not rows:
        return None
    finished = f"attempt = {int(rows[0][0])} AND rank >= 0 AND {before_standstill(standstills(source))}"
    ((last,),) = source.rows(f"SELECT (SELECT step FROM steps WHERE {finished} ORDER BY start_ns DESC LIMIT 1)")
    if last is None:
        return None
    window = f"{finished} AND step > {int(last) - NEWEST_STEPS} AND step <= {int(last)}"
    ((first, begin_ns, middle, least, most),) = source.rows(
        "SELECT min(step), min(start_ns), median(duration_ns) / 1e6, min(duration_ns) / 1e6, max(duration_ns) / 1e6 "
        f"FROM steps WHERE {window}"
    )
    # The time includes that of steps that were discarded.
    tokens, seconds = wall_throughput(source, f"{finished} AND start_ns >= {int(begin_ns)}")
    copies = token_copies(source) if copies is None else copies
    return Pace(
        attempt=int(rows[0][0]), first_step=int(first), last_step=int(last), step_ms=middle, shortest_ms=least,
        longest_ms=most, tokens_per_s=tokens / copies / seconds if tokens and seconds else None,
    )  # fmt: skip


def whole_pace(source: Source, *, sampled: Source | None = None, copies: int | None = None) -> dict[str, float | None]:
    """`step_ms` (median over ranks and steps), `tokens_per_s` and `tokens` of all steps, as in the report of a run.

    `sampled`: source of the rows from which the median of a very long run is taken; by default `source`.
    """
    if not source.has("steps"):
        return {"step_ms": None, "tokens_per_s": None, "tokens": None}
    sampled = sampled or source
    finished = before_standstill(standstills(source))
    every = every_kth(sampled, "steps", READ_ROWS, _ALL)
    ((median_ms,),) = sampled.rows(
        f"SELECT median(duration_ns) FILTER ({finished} AND step % ? = 0) / 1e6 FROM steps", [every]
    )
    tokens, seconds = wall_throughput(source, finished)
    tokens = tokens / (token_copies(source) if copies is None else copies) if tokens else tokens
    rate = tokens / seconds if tokens and seconds else None
    return {"step_ms": median_ms, "tokens_per_s": rate, "tokens": tokens}


def wall_throughput(source: Source, where: str) -> tuple[float | None, float | None]:
    """Tokens that all ranks counted in these finished steps, and the seconds that they took.

    The seconds of an attempt are the longest time that any rank took, by that rank's clock.
    """
    ((tokens, seconds),) = source.rows(
        f"""
        SELECT CAST(sum(tokens) AS DOUBLE), sum(seconds) FROM (
            SELECT attempt, sum(tokens) AS tokens, max(seconds) AS seconds FROM (
                SELECT attempt, rank, sum(tokens) AS tokens,
                       (max(start_ns + duration_ns) - min(start_ns)) / 1e9 AS seconds
                FROM steps WHERE {where} GROUP BY attempt, rank) GROUP BY attempt)
        """
    )
    return tokens, seconds
