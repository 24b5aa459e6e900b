"""The pipeline of a run on the page: its bubble in a sentence, rank by rank, and one step as it ran.

sections = pipeline_sections(source, diagnosis.findings, sheet.figure)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from analyzers.account.wait_split import pipelines
from analyzers.figures.time import schedule
from analyzers.figures.time.activity import schedule_of_step
from analyzers.finding import Finding, evidence_of
from analyzers.report.html.page_frame import PlacedFigure, Section
from analyzers.report.wording.account_lines import bubble_of
from analyzers.source import Source

__all__ = ["pipeline_sections"]

MAX_ROWS = 64


def pipeline_sections(
    source: Source, findings: Sequence[Finding], place: Callable[..., PlacedFigure]
) -> Iterator[Section]:
    """The section of the HTML page; none without a pipeline. `place` puts a figure onto the page."""
    found = bubble_of(findings)
    if found is None or found.attempt is None or found.last_step is None:
        return
    numbers = evidence_of(found)
    figures = []
    members = next((ranks for attempt, ranks in pipelines(source) if attempt == found.attempt), [])
    pieces = schedule_of_step(source, found.attempt, found.last_step, members)
    if len(pieces["stage"]):
        what = "Forwards and backwards of each stage"
        figures.append(place(schedule.draw(pieces), f"Step {found.last_step} as it ran", what=what))
    expected = numbers["idle_expected_ratio"]
    by_rank = list(numbers["idle_ratio_by_rank"].items())[:MAX_ROWS]
    figures.append(
        place(
            schedule.idle({f"rank {rank}": share for rank, share in by_rank}, expected=expected),
            "Bubble by rank", what="Idle share of each rank of the pipeline",
        )
    )  # fmt: skip
    by_step = {int(step): share for step, share in numbers["idle_ratio_by_step"].items()}
    what = "Idle share of the pipeline over the steps"
    figures.append(place(schedule.idle_by_step(by_step, expected=expected), "Bubble by step", what=what))
    rows = [(stage, f"{work_ms:.4g}") for stage, work_ms in list(numbers["work_ms_by_stage"].items())[:MAX_ROWS]]
    yield Section(
        title="Pipeline",
        note=f"{found.summary} Means over {numbers['num_steps_measured']:,} typical steps. "
        "The numbers in the drawn step are microbatches.",
        figures=figures,
        columns=("stage", "work a step, ms"),
        numeric=(0, 1),
        rows=rows,
    )
