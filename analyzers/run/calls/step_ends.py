"""Newest step of each rank in an attempt: its number, whether it is open, and how many steps it has finished.

    for rank, step, is_open, num_finished, last_ns in ends_of_steps(store, attempt, known_ranks, cut_ns):
        ...

Pages and commands need this for attempts with a hundred million rows, of which only the last ones are relevant.
"""

from __future__ import annotations

from collections.abc import Set

from analyzers.source import Source

__all__ = ["NEVER_NS", "ends_of_steps"]

NEVER_NS = 2**62
MANY_ROWS = 1_000_000
"""Rows of steps of one attempt above which its newest minutes are read first."""
RECENT_NS = 120_000_000_000
_SQL = """
    SELECT rank, arg_max(step, start_ns), arg_max(end_ns IS NULL, start_ns), count(end_ns),
           max(coalesce(end_ns, start_ns))
    FROM (SELECT rank, step, start_ns,
                 CASE WHEN start_ns + duration_ns <= ? THEN start_ns + duration_ns END AS end_ns
          FROM steps WHERE attempt = ? AND start_ns <= ? AND start_ns > ?)
    GROUP BY rank
    """


def ends_of_steps(
    source: Source, attempt: int, known: Set[int], cut_ns: int
) -> list[tuple[int, int | None, bool, int, int | None]]:
    """Return (rank, step, is open, number finished, last record) of each rank as of `cut_ns` (epoch nanoseconds).

    1. A short attempt is read whole.
    2. Of a long attempt only the newest minutes are read, if every rank of `known` has finished a step in them. This
       gives the same answer at a fraction of the cost, except that only finished steps of these minutes are counted.
    3. Otherwise a rank, or its clock, is far behind the others, and the attempt is read whole.
    """
    until = "FROM steps WHERE attempt = ? AND start_ns <= ?"
    # ORDER BY ... LIMIT 1 is used instead of max(), because with it DuckDB skips blocks by their largest value.
    ((newest_ns, num_rows),) = source.rows(
        f"SELECT (SELECT start_ns {until} ORDER BY start_ns DESC LIMIT 1), (SELECT count(*) {until})",
        [attempt, cut_ns, attempt, cut_ns],
    )
    if num_rows > MANY_ROWS:
        rows = source.rows(_SQL, [cut_ns, attempt, cut_ns, newest_ns - RECENT_NS])
        if known and {row[0] for row in rows if row[3] > 0} >= known:
            return rows
    return source.rows(_SQL, [cut_ns, attempt, cut_ns, -NEVER_NS])
