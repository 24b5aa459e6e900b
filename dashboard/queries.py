"""The SQL of the pages, beside what they share with the report (`analyzers.report.queries`).

    pulse(store)["tokens_per_s"]
    curve = speed(store)                 # columns step, low, middle, high (ms), tokens_per_s

Every function takes a store and plain parameters and gives small columns: long tables are reduced inside DuckDB, to at
most `MAX_BUCKETS` pieces of the steps. Missing tables give empty answers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from analyzers.source import Source

__all__ = ["MAX_BUCKETS", "Columns", "findings_said", "last_steps", "pulse", "speed", "step_range"]

MAX_BUCKETS = 1_000
RECENT_STEPS = 40
"""Newest steps over which the present speed is taken."""
MAX_SAMPLE = 4_000_000
"""Rows of steps that a percentile looks at; of more, every k-th step."""
Columns = dict[str, npt.NDArray[Any]]


def _none(*names: str) -> Columns:
    return {name: np.zeros(0) for name in names}


def step_range(source: Source) -> tuple[int, int, int] | None:
    """(first step, last step, number of rows) of finished steps of ranks; None where there is none."""
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


def pulse(source: Source) -> dict[str, float | None]:
    """The newest steps of the newest attempt: step, loss, grad_norm, lr, step_ms, tokens_per_s, memory_bytes (largest).

    Tokens count once, whatever the number of ranks that read the same text.
    """
    names = ("step", "loss", "grad_norm", "lr", "step_ms", "tokens_per_s", "memory_bytes")
    newest = last_steps(source)
    if not newest:
        return dict.fromkeys(names)
    attempt, step = max(newest.items())
    ((*found,),) = source.rows(
        f"""
        WITH recent AS (SELECT * FROM steps WHERE attempt = {attempt} AND step > {step - RECENT_STEPS} AND rank >= 0
                        AND duration_ns IS NOT NULL),
             each AS (SELECT step, median(duration_ns) AS took_ns, sum(tokens) AS tokens FROM recent GROUP BY step)
        SELECT (SELECT max(step) FROM recent), (SELECT arg_max(loss, step) FROM recent WHERE loss IS NOT NULL),
               (SELECT arg_max(grad_norm, step) FROM recent WHERE grad_norm IS NOT NULL),
               (SELECT arg_max(lr, step) FROM recent WHERE lr IS NOT NULL),
               (SELECT median(took_ns) / 1e6 FROM each),
               (SELECT CAST(sum(tokens) AS DOUBLE) / nullif(sum(took_ns) / 1e9, 0) FROM each),
               (SELECT max(memory_bytes) FROM recent)
        """
    )
    result: dict[str, float | None] = dict(zip(names, found, strict=True))
    if result["tokens_per_s"] is not None:
        result["tokens_per_s"] /= _readers(source)
    return result


def _readers(source: Source) -> int:
    """Ranks that read the same text: of one pipeline, tensor- or context-parallel group."""
    if not source.has("ranks"):
        return 1
    ((copies,),) = source.rows(
        "SELECT coalesce((max(pp) + 1) * (max(tp) + 1) * (coalesce(max(cp), 0) + 1), 1) FROM ranks WHERE rank >= 0"
    )
    return int(copies or 1)


def speed(source: Source) -> Columns:
    """Columns step, low, middle, high (percentiles 10, 50, 90 of step time over the ranks, ms), tokens_per_s.

    The newest execution of a step counts as well as those before it. Of long runs every k-th step of a bucket is looked
    at.
    """
    names = ("step", "low", "middle", "high", "tokens_per_s")
    span = step_range(source)
    if span is None:
        return _none(*names)
    first, last, num = span
    width = max(1, -(-(last - first + 1) // MAX_BUCKETS))
    every = max(1, -(-num // MAX_SAMPLE))
    return source.query(
        f"""
        SELECT min(step) AS step, quantile_cont(took, 0.1) AS low, median(took) AS middle,
               quantile_cont(took, 0.9) AS high,
               CAST(sum(tokens) AS DOUBLE) / {_readers(source)} / nullif(count(DISTINCT (attempt, step)), 0)
                   / nullif(median(took) / 1e3, 0) AS tokens_per_s
        FROM (SELECT attempt, step, tokens, duration_ns / 1e6 AS took FROM steps
              WHERE duration_ns IS NOT NULL AND rank >= 0 AND (step - {first}) % {every} = 0)
        GROUP BY (step - {first}) // {max(width, every)} ORDER BY 1
        """
    )


def findings_said(source: Source, *, limit: int = 500) -> list[dict[str, Any]]:
    """What `watch` has said while the run lived, the newest word on each finding, as dicts with the table's columns."""
    if not source.has("findings"):
        return []
    names = (
        "wall_ns", "attempt", "analyzer", "finding_kind", "severity", "status", "finding_ranks", "first_step",
        "last_step", "cause", "summary", "evidence", "advice",
    )  # fmt: skip
    rows = source.rows(f"SELECT {', '.join(names)} FROM findings ORDER BY wall_ns DESC LIMIT {int(limit)}")
    return [dict(zip(names, row, strict=True)) for row in rows]
