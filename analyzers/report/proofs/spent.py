"""Proofs about where time goes: communication, data, pipelines, all ranks together, saves, the whole account."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from analyzers.account.goodput import measure as account_of
from analyzers.account.wait_split import pipelines
from analyzers.checkpoints.analyze import SAVED
from analyzers.figures import bars, goodput, saves, schedule
from analyzers.figures import focus as against
from analyzers.figures.titled_figure import Drawing
from analyzers.finding import Finding
from analyzers.pipeline.pipeline_bubble import load_pipeline
from analyzers.report.html.pipeline_section import schedule_of_step
from analyzers.source import Source, missing_tables

__all__ = ["old_save", "saved", "stages", "waterfall"]


def stages(source: Source, finding: Finding) -> Iterator[Drawing]:
    """A pipeline's own work a stage, its idle share, and one of its steps as it ran."""
    if missing_tables(source, "ranks", "spans"):
        return
    found = [ranks for number, ranks in pipelines(source) if number == finding.attempt]
    if not found:
        return
    members = next((of for of in found if set(of) & set(finding.ranks)), found[0])
    pipeline = load_pipeline(source, finding.attempt or 0, members)
    if pipeline is None:
        return
    steps = pipeline.steps
    names = {rank: f"rank {rank} (coordinate {place})" for place, rank in enumerate(members)}
    busy = {rank: float(np.median([step.ranks[rank].busy_ns for step in steps])) / 1e6 for rank in members}
    if finding.kind == "stage_imbalance":
        others = [ms for rank, ms in busy.items() if rank not in finding.ranks]
        figure = bars.draw(
            {names[rank]: ms for rank, ms in busy.items()}, accused={names[r] for r in members if r in finding.ranks},
            x="own work of a step (ms, median)", unit="ms", usual=float(np.median(others)) if others else None,
        )  # fmt: skip
        yield Drawing(title="Own work of each coordinate of the pipeline", figure=figure)
    else:
        idle = {names[r]: float(np.median([step.ranks[r].idle_ratio for step in steps])) for r in members}
        figure = schedule.idle(idle, expected=finding.evidence.get("idle_expected_ratio"))
        yield Drawing(title="Idle share of each rank of the pipeline", figure=figure)
    typical = steps[int(np.argsort([step.total_ns for step in steps])[len(steps) // 2])].step
    attempt = finding.attempt or 0
    pieces = schedule_of_step(source, attempt, typical, members)
    if len(pieces["stage"]):
        yield Drawing(title=f"Step {typical} as it ran", figure=schedule.draw(pieces))


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
    """How many steps a failure would have cost at each step, and the saves themselves."""
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
        against.mark_onset(figure, finding.first_step)
        yield Drawing(title="Steps since the last good save", figure=figure)
    yield from saved(source, finding)


def waterfall(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Where the wall time of the whole run went."""
    account = account_of(source)
    if account is not None and account.wall_s > 0:
        yield Drawing(title="Where the time went", figure=goodput.waterfall(account))
