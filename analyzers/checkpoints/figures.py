"""Figures of checkpoints: duration and stall of each save, and the steps that a failure would cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from analyzers.account.goodput import measure
from analyzers.checkpoints.analyze import SAVED
from analyzers.figures import focus, goodput, saves
from analyzers.figures.titled_figure import Drawing
from analyzers.finding import Finding
from analyzers.source import Source, missing_tables

__all__ = ["FIGURES", "saved", "waterfall"]


def saved(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Each save: how long it took and for how long training stood still."""
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
        yield Drawing(title="Saves over the steps", figure=saves.draw(table))


def old_save(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Steps that a failure would have cost at each step, and the saves themselves."""
    if missing_tables(source, "checkpoints", "steps"):
        return
    good = sorted(
        int(step)
        for (step,) in source.rows(
            f"SELECT DISTINCT step FROM checkpoints WHERE tier = 'disk' AND state IN {SAVED} AND step IS NOT NULL AND "
            "(attempt, step) NOT IN (SELECT (attempt, step) FROM checkpoints WHERE tier = 'disk' AND "
            "state IN ('condemned', 'failed') AND step IS NOT NULL)"
        )
    )
    ((first, last),) = source.rows("SELECT min(step), max(step) FROM steps WHERE duration_ns IS NOT NULL")
    if first is not None and last > first:
        # Where a line bends: just before and at each save.
        at = np.unique(np.clip([first, last, *good, *(step - 1 for step in good)], first, last))
        place = np.searchsorted(good, at, side="right")
        since = at - np.where(place > 0, np.array([0, *good])[place], 0)
        figure = saves.age(at, since.astype(np.float64), due=finding.evidence.get("interval_steps"))
        focus.mark_onset(figure, finding.first_step)
        yield Drawing(title="Steps since the last good save", figure=figure)
    yield from saved(source, finding)


def waterfall(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Account of the wall time of the whole run."""
    account = measure(source)
    if account is not None and account.wall_s > 0:
        yield Drawing(title="Where the time went", figure=goodput.waterfall(account))


FIGURES: Mapping[str, Sequence[Callable[[Source, Finding], Iterator[Drawing]]]] = {
    "checkpoint_failed": (saved,),
    "checkpoint_age": (old_save,),
    "checkpoint_cost": (saved, waterfall),
}
