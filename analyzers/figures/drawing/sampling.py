"""Evenly spaced stretches of consecutive steps, for runs with too many steps for a page.

    source.query(f"SELECT rank, median(duration_ns) FROM steps WHERE {sampled(source, 0, 99_999)} GROUP BY rank")

Rows are stored in order of time, and DuckDB knows the smallest and largest step of each block of rows. With stretches
of steps it skips nine blocks out of ten, with every k-th step none (1,024 ranks x 100,000 steps: 0.2 s instead of 1.0 s
of CPU time).
"""

from __future__ import annotations

from analyzers.source import READ_STEPS, Source

__all__ = ["MAX_ROWS", "sampled"]

MAX_ROWS = 400_000
"""Approximate number of rows to read; enough for a median."""
STRETCHES = 16


def sampled(source: Source, first_step: int, last_step: int, *, max_rows: int = MAX_ROWS) -> str:
    """SQL condition on `steps.step` that selects the stretches; all steps if the range has at most `max_rows` rows."""
    ((first, last, num_rows),) = source.rows(
        "SELECT min(step), max(step), count(*) FROM steps WHERE rank >= 0 AND step BETWEEN ? AND ?",
        [first_step, last_step],
    )
    num_steps = 0 if first is None else last - first + 1
    if num_rows <= max_rows or num_steps <= READ_STEPS // STRETCHES:
        return f"step BETWEEN {int(first_step)} AND {int(last_step)}"
    length = max(1, min(READ_STEPS, max_rows * num_steps // num_rows) // STRETCHES)
    begins = [first + i * (num_steps - length) // (STRETCHES - 1) for i in range(STRETCHES)]
    chosen = sorted({begin + i for begin in begins for i in range(length)})
    return f"step IN ({', '.join(map(str, chosen))})"  # DuckDB skips blocks for an IN list, but not for an OR of ranges
