"""Values of some ranks per step, with the spread over the other ranks.

comparison = against_others(store, attempt, (3,), "memory_bytes / 1048576.0")
figure = focus.draw(comparison, y="memory (MiB)")
"""

from __future__ import annotations

from collections.abc import Sequence

from analyzers.figures.drawing import focus
from analyzers.finding import Finding
from analyzers.source import READ_STEPS, Source, floats, ints

__all__ = ["against_others", "attempt_of"]


def attempt_of(source: Source, finding: Finding) -> int | None:
    """The finding's attempt, or the newest one that has steps."""
    if finding.attempt is not None or not source.has("steps"):
        return finding.attempt
    ((newest,),) = source.rows("SELECT max(attempt) FROM steps WHERE rank >= 0")
    return None if newest is None else int(newest)


def against_others(source: Source, attempt: int, ranks: Sequence[int], expression: str) -> focus.RankComparison:
    """Evaluate SQL over `steps` for some ranks, with percentiles 10, 50 and 90 over the other ranks."""
    ((first, last),) = source.rows("SELECT min(step), max(step) FROM steps WHERE attempt = ?", [attempt])
    every = max(1, -(-((last or 0) - (first or 0) + 1) // READ_STEPS))
    own = [int(rank) for rank in ranks[: focus.MAX_OWN]]
    listed = ", ".join(str(int(rank)) for rank in ranks) or "-1"
    columns = "".join(f", max(value) FILTER (rank = {rank}) AS of_{rank}" for rank in own)
    quantiles = ", ".join(
        f"quantile_cont(value, {q}) FILTER (rank NOT IN ({listed})) AS {name}"
        for q, name in ((0.1, "low"), (0.5, "middle"), (0.9, "high"))
    )
    table = source.query(
        f"""
        SELECT step, {quantiles}{columns}
        FROM (SELECT rank, step, CAST({expression} AS DOUBLE) AS value FROM steps
              WHERE attempt = ? AND rank >= 0 AND duration_ns IS NOT NULL AND (step - ?) % ? = 0)
        WHERE value IS NOT NULL GROUP BY step ORDER BY step
        """,
        [attempt, first or 0, every],
    )
    low, middle, high = (floats(table[name]) for name in ("low", "middle", "high"))
    lines = {f"rank {rank}": floats(table[f"of_{rank}"]) for rank in own}
    return focus.RankComparison(x=ints(table["step"]), own=lines, low=low, middle=middle, high=high)
