"""Figures of checkpoints: duration and stall of each save, and the steps that a failure would cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from plotly.graph_objects import Figure

from analyzers.account.goodput import measure
from analyzers.checkpoints.analyze import good_saves
from analyzers.figures.drawing import focus
from analyzers.figures.drawing.band import add_line
from analyzers.figures.drawing.focus import mark_limit
from analyzers.figures.drawing.theme import SEQUENCE, SEVERITY, new_figure
from analyzers.figures.drawing.titled_figure import Drawing
from analyzers.figures.time import goodput
from analyzers.finding import Finding, evidence_of
from analyzers.source import Floats, Ints, Source, floats, ints, missing_tables

__all__ = ["FIGURES", "saved", "waterfall"]

_PARTS = (
    ("duration_ms", "disk", "duration of the save, disk", SEQUENCE[0], "circle"),
    ("stall_ms", "disk", "training stalled, disk", SEQUENCE[1], "diamond"),
    ("stall_ms", "memory", "training stalled, memory", SEQUENCE[3], "square"),
)


def saved(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Duration of each save, and the time for which it stalled training."""
    if missing_tables(source, "checkpoints"):
        return
    table = source.query(
        """
        SELECT step, tier, max(duration_ns) / 1e6 AS duration_ms, max(stall_ns) / 1e6 AS stall_ms,
               CASE WHEN bool_or(state = 'failed') THEN 'failed' WHEN bool_or(state = 'delayed') THEN 'delayed'
                    ELSE 'saved' END AS state
        FROM checkpoints WHERE step IS NOT NULL AND state NOT IN ('loaded', 'removed') AND tier IN ('disk', 'memory')
        GROUP BY attempt, step, tier ORDER BY step DESC LIMIT 4000
        """
    )
    if len(table["step"]):
        yield Drawing(title="Saves over the steps", figure=_saves(table))


def old_save(source: Source, finding: Finding) -> Iterator[Drawing]:
    """How many steps a failure would have cost at each step, and the saves themselves."""
    if missing_tables(source, "checkpoints", "steps"):
        return
    good = good_saves(source)
    ((first, last),) = source.rows("SELECT min(step), max(step) FROM steps WHERE duration_ns IS NOT NULL")
    if first is not None and last > first:
        # The age is piecewise linear: its corners are just before and at each save.
        at = np.unique(np.clip([first, last, *good, *(step - 1 for step in good)], first, last))
        place = np.searchsorted(good, at, side="right")
        since = at - np.where(place > 0, np.array([0, *good])[place], 0)
        figure = _age(at, since.astype(np.float64), due=evidence_of(finding).get("interval_steps"))
        focus.mark_onset(figure, finding.first_step)
        yield Drawing(title="Steps since the last good save", figure=figure)
    yield from saved(source, finding)


def waterfall(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Account of the wall time of the whole run."""
    account = measure(source)
    if account is not None and account.wall_s > 0:
        yield Drawing(title="Where the time went", figure=goodput.waterfall(account))


def _saves(saves: Mapping[str, Any]) -> Figure:
    """Draw durations and stalls as points, failed saves as crosses, and saves that had to wait as open triangles."""
    figure = new_figure(height=320, x="step", y="milliseconds")
    step = ints(saves["step"])
    tier, state = (np.asarray(saves[name], dtype=object).astype(str) for name in ("tier", "state"))
    for column, of_tier, name, colour, symbol in _PARTS:
        values = floats(saves[column])
        rows = np.flatnonzero((tier == of_tier) & np.isfinite(values) & (state != "failed"))
        if len(rows):
            figure.add_scatter(
                x=step[rows], y=values[rows], mode="markers", name=name,
                marker={"color": colour, "symbol": symbol, "size": 8, "line": {"width": 0}},
                hovertemplate="step %{x}: %{y:,.4g} ms<extra>" + name + "</extra>",
            )  # fmt: skip
    for word, symbol, colour in (("failed", "x", SEVERITY["critical"]), ("delayed", "triangle-up-open", SEQUENCE[5])):
        rows = np.flatnonzero(state == word)
        if len(rows):
            figure.add_scatter(
                x=step[rows], y=np.nan_to_num(floats(saves["duration_ms"])[rows]), mode="markers", name=word,
                marker={"color": colour, "symbol": symbol, "size": 11},
                hovertemplate="step %{x}<extra>" + word + "</extra>",
            )  # fmt: skip
    figure.update_yaxes(rangemode="tozero")
    return figure


def _age(step: Ints, since: Floats, *, due: float | None = None) -> Figure:
    """Draw how many steps a failure would cost at each step. `due`: the configured number of steps between saves."""
    figure = new_figure(height=260, x="step", y="steps since the last good save", showlegend=False)
    add_line(figure, step, since, name="age", colour=SEQUENCE[0])
    mark_limit(figure, None if due is None else (due, f"due every {due:g} steps"))
    figure.update_yaxes(rangemode="tozero")
    return figure


FIGURES: Mapping[str, Sequence[Callable[[Source, Finding], Iterator[Drawing]]]] = {
    "checkpoint_failed": (saved,),
    "checkpoint_age": (old_save,),
    "checkpoint_cost": (saved, waterfall),
}
