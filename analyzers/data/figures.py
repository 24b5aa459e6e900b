"""Figures of a run that waits for data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from analyzers.account.time_classes import TRAINING, own
from analyzers.figures.drawing.theme import CATEGORY, PHASE
from analyzers.figures.drawing.titled_figure import Drawing
from analyzers.figures.ranks.rank_values import attempt_of
from analyzers.figures.time import stacked
from analyzers.finding import Finding
from analyzers.source import READ_STEPS, Source, floats, ints, lacking

__all__ = ["FIGURES", "waits"]


def waits(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Waiting for data in each step and the rest of the step, median rank, with the onset."""
    attempt = attempt_of(source, finding)
    if attempt is None or lacking(source, steps=("duration_ns", "data_ns")):
        return
    ((first, last),) = source.rows("SELECT min(step), max(step) FROM steps WHERE attempt = ?", [attempt])
    only = f" AND rank IN ({', '.join(str(int(rank)) for rank in finding.ranks)})" if finding.ranks else ""
    table = source.query(
        f"""
        SELECT step, median(coalesce({own("data")}, 0)) / 1e6 AS data, median({TRAINING}) / 1e6 AS whole
        FROM steps WHERE attempt = ? AND rank >= 0 AND duration_ns IS NOT NULL AND (step - ?) % ? = 0{only}
        GROUP BY step ORDER BY step
        """,
        [attempt, first or 0, max(1, -(-((last or 0) - (first or 0) + 1) // READ_STEPS))],
    )
    waited, whole = floats(table["data"]), floats(table["whole"])
    if len(waited) < 2:
        return
    parts = [("waiting for data", waited, CATEGORY["data"]), ("rest of the step", whole - waited, PHASE["recv"])]
    figure = stacked.draw(ints(table["step"]), parts, y="ms a step, median rank", onset=finding.first_step)
    yield Drawing(title="Waiting for data in each step", figure=figure)


FIGURES: Mapping[str, Sequence[Callable[[Source, Finding], Iterator[Drawing]]]] = {"data_bound": (waits,)}
