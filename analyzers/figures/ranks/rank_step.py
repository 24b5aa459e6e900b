"""Data of figures over ranks and steps: a measure as a matrix, and the own work of one rank or of all.

    matrix = rank_step(store, "own work")          # rank x step, reduced to what a screen shows
    own_work(store)["forward"]                     # median milliseconds of a step, rank by rank

Results are small, because long tables are reduced inside DuckDB. Missing tables give empty results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from analyzers.account.device.device_timings import device_rows
from analyzers.account.device.measured_by import has_device_calls
from analyzers.account.time_classes import GAPS_WORK, NOT_MEASURED, OWN_PHASES, OWN_WORK, PHASES, WAITED, own
from analyzers.figures.drawing.sampling import sampled
from analyzers.run.calls.snapshot import attempts
from analyzers.source import READ_STEPS, Floats, Ints, Source, floats, ints

__all__ = ["MEASURES", "Matrix", "own_work", "rank_against_others", "rank_step"]

MAX_CELLS = 400
"""Maximum number of rows and of columns in a matrix."""
FEW_RANKS, COLUMNS_OF_MANY = 32, 100
"""With `each_rank`, up to `FEW_RANKS` ranks get `max_cells` columns. With more ranks there are `COLUMNS_OF_MANY`
columns, so that each mean has more steps: thinner rows need less noise.
"""
MEASURES = {
    "own work": (f"{OWN_WORK} / 1e6", "ms"),
    "step time": ("duration_ns / 1e6", "ms"),
    "waiting": (f"{WAITED} / 1e6", "ms"),
    **{phase: (f"{own(phase)} / 1e6", "ms") for phase in PHASES},
    "between phases": (f"{GAPS_WORK} / 1e6", "ms"),
    "not measured": (f"{NOT_MEASURED} / 1e6", "ms"),
    "memory": ("memory_bytes / 1048576.0", "MiB"),
}
"""Quantities of a matrix: {name: (SQL expression over `steps`, unit)}."""
_OF_CALLS = ("own work", "waiting")
"""Quantities that the calls of GPUs without stamps give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """`values[i, j]` belongs to `ranks_per_cell` ranks, of which `ranks[i]` is the first, and to `steps_per_cell`
    steps, of which `steps[j]` is the first. It is their largest value (with `each_rank`, the mean over the steps), or
    NaN if nothing was recorded.
    """

    ranks: Ints
    steps: Ints
    values: npt.NDArray[np.float64]
    unit: str
    ranks_per_cell: int = 1
    steps_per_cell: int = 1
    every_steps: int = 1
    """Distance between the steps that were read."""

    @property
    def is_reduced(self) -> bool:
        """True if a cell stands for more than one rank and step."""
        return self.ranks_per_cell * self.steps_per_cell > 1


def rank_step(
    source: Source,
    measure: str = "step time",
    *,
    max_cells: int = MAX_CELLS,
    max_rows: int | None = None,
    each_rank: bool = False,
) -> Matrix:
    """One of `MEASURES` over ranks and steps; a cell is the largest value of its ranks and steps. With `each_rank`,
    every rank has a row and a cell is the mean of its steps, to compare ranks with one another. With `max_rows`, only
    every k-th step of a longer run is read, for a preview in a fraction of the time. Raises KeyError.
    """
    expression, unit = MEASURES[measure]
    nothing = Matrix(ranks=np.zeros(0, np.int64), steps=np.zeros(0, np.int64), values=np.zeros((0, 0)), unit=unit)
    if not source.has("steps"):
        return nothing
    finished = "duration_ns IS NOT NULL AND rank >= 0"
    ((low, high, first, last, num_rows),) = source.rows(
        f"SELECT min(rank), max(rank), min(step), max(step), count(*) FROM steps WHERE {finished}"
    )
    if low is None or first is None:
        return nothing
    per_rank, per_step = -(-(high - low + 1) // max_cells), -(-(last - first + 1) // max_cells)
    if each_rank:
        per_rank = 1
        per_step = -(-(last - first + 1) // (max_cells if high - low < FEW_RANKS else COLUMNS_OF_MANY))
    every = 1 if max_rows is None else max(1, min(int(per_step), -(-num_rows // max_rows)))
    finished += f" AND (step - {first}) % {every} = 0" if every > 1 else ""
    shape = ((high - low) // per_rank + 1, (last - first) // per_step + 1)
    values = np.full(shape, np.nan)
    on_device = []
    if measure in _OF_CALLS:
        on_device = [attempt for attempt in attempts(source) if has_device_calls(source, attempt)]
    if on_device:  # a measure that is not a column of `steps`
        sums, counts = np.zeros(shape), np.zeros(shape)
        for attempt in on_device:
            rank, step, ms = _by_calls(source, attempt, measure)
            place = (rank - low) // per_rank, (step - first) // per_step
            if each_rank:
                known = np.isfinite(ms)
                np.add.at(sums, tuple(one[known] for one in place), ms[known])
                np.add.at(counts, tuple(one[known] for one in place), 1)
            else:
                np.fmax.at(values, place, ms)
        values = np.divide(sums, counts, out=values, where=counts > 0) if each_rank else values
    else:
        table = source.query(
            f"""
            SELECT (rank - {low}) // {per_rank} AS i, (step - {first}) // {per_step} AS j,
                   CAST({"avg" if each_rank else "max"}({expression}) AS DOUBLE) AS value
            FROM steps WHERE {finished} GROUP BY i, j
            """
        )
        values[ints(table["i"]), ints(table["j"])] = floats(table["value"])
    return Matrix(
        ranks=low + per_rank * np.arange(shape[0]), steps=first + per_step * np.arange(shape[1]), values=values,
        unit=unit, ranks_per_cell=int(per_rank), steps_per_cell=int(per_step), every_steps=every,
    )  # fmt: skip


def _by_calls(source: Source, attempt: int, measure: str) -> tuple[Ints, Ints, Floats]:
    """Return (rank, step, ms) on GPUs without stamps: a lower bound of the waiting, or the step time without it."""
    table = device_rows(source, attempt)
    waited = floats(table["wait"])
    ms = waited if measure == "waiting" else floats(table["duration"]) - waited
    return ints(table["rank"]), ints(table["step"]), ms


def own_work(source: Source, *, first_step: int = 0, last_step: int = 1 << 60) -> dict[str, npt.NDArray[Any]]:
    """Columns rank, data, forward, backward, optimizer, gaps: median milliseconds of a step, without waits.

    In long runs only some stretches of steps are read.
    """
    parts = {phase: own(phase) for phase in OWN_PHASES} | {"gaps": GAPS_WORK}
    if not source.has("steps"):
        return {name: np.zeros(0) for name in ("rank", *parts)}
    medians = ", ".join(f"coalesce(median({sql}), 0) / 1e6 AS {name}" for name, sql in parts.items())
    return source.query(
        f"SELECT rank, {medians} FROM steps WHERE duration_ns IS NOT NULL AND rank >= 0"
        f" AND {sampled(source, first_step, last_step)} GROUP BY rank ORDER BY rank"
    )


def rank_against_others(source: Source, attempt: int, rank: int) -> dict[str, npt.NDArray[Any]]:
    """Columns step, own, low, middle, high: a rank's own work, and percentiles 10, 50, 90 of the other ranks' own work
    (ms)."""
    ((first, last),) = source.rows("SELECT min(step), max(step) FROM steps WHERE attempt = ?", [attempt])
    every = max(1, -(-((last or 0) - (first or 0) + 1) // READ_STEPS))
    quantiles = ", ".join(
        f"quantile_cont(work, {q}) FILTER (rank <> ?) AS {name}"
        for q, name in ((0.1, "low"), (0.5, "middle"), (0.9, "high"))
    )
    return source.query(
        f"""
        SELECT step, max(work) FILTER (rank = ?) AS own, {quantiles}
        FROM (SELECT rank, step, {OWN_WORK} / 1e6 AS work FROM steps
              WHERE attempt = ? AND rank >= 0 AND duration_ns IS NOT NULL AND coalesce(committed, true)
                AND step % ? = 0)
        GROUP BY step ORDER BY step
        """,
        [rank, rank, rank, rank, attempt, every],
    )
