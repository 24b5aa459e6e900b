"""Figures of pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from analyzers.account.wait_split import pipelines
from analyzers.figures.drawing import bars
from analyzers.figures.drawing.titled_figure import Drawing
from analyzers.figures.time import schedule
from analyzers.figures.time.activity import schedule_of_step
from analyzers.finding import Finding, evidence_of
from analyzers.pipeline.pipeline_bubble import load_pipeline
from analyzers.source import Source, missing_tables

__all__ = ["FIGURES", "stages"]


def stages(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Own work or idle share of each rank of a pipeline, and one of its steps as it ran."""
    if missing_tables(source, "ranks", "spans"):
        return
    found = [ranks for number, ranks in pipelines(source) if number == finding.attempt]
    if not found:
        return
    members = next((ranks for ranks in found if set(ranks) & set(finding.ranks)), found[0])
    pipeline = load_pipeline(source, finding.attempt or 0, members)
    if pipeline is None:
        return
    steps = pipeline.steps
    names = {rank: f"rank {rank} (pp rank {place})" for place, rank in enumerate(members)}
    busy = {rank: float(np.median([step.ranks[rank].busy_ns for step in steps])) / 1e6 for rank in members}
    if finding.kind == "stage_imbalance":
        others = [ms for rank, ms in busy.items() if rank not in finding.ranks]
        figure = bars.draw(
            {names[rank]: ms for rank, ms in busy.items()}, accused={names[r] for r in members if r in finding.ranks},
            x="own work of a step (ms, median)", unit="ms", usual=float(np.median(others)) if others else None,
        )  # fmt: skip
        yield Drawing(title="Own work of each pp rank of the pipeline", figure=figure)
    else:
        idle = {names[r]: float(np.median([step.ranks[r].idle_ratio for step in steps])) for r in members}
        figure = schedule.idle(idle, expected=evidence_of(finding).get("idle_expected_ratio"))
        yield Drawing(title="Idle share of each rank of the pipeline", figure=figure)
    typical = steps[int(np.argsort([step.total_ns for step in steps])[len(steps) // 2])].step
    attempt = finding.attempt or 0
    pieces = schedule_of_step(source, attempt, typical, members)
    if len(pieces["stage"]):
        yield Drawing(title=f"Step {typical} as it ran", figure=schedule.draw(pieces))


FIGURES: Mapping[str, Sequence[Callable[[Source, Finding], Iterator[Drawing]]]] = {
    "bubble": (stages,),
    "stage_imbalance": (stages,),
}
