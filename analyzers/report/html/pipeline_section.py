"""The pipeline of a run on the page: its bubble in a sentence, rank by rank, and one step as it ran.

sections = pipeline_sections(source, diagnosis.findings, sheet.figure)
schedule_of_step(source, attempt=0, step=40, ranks=[0, 1, 2, 3])["start_ms"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from analyzers.account.wait_split import pipelines
from analyzers.figures import schedule
from analyzers.figures.queries import MAX_PIECES
from analyzers.finding import Finding
from analyzers.report.html.page_frame import PlacedFigure, Section
from analyzers.report.wording.account_lines import bubble_of
from analyzers.source import Source

__all__ = ["pipeline_sections", "schedule_of_step"]

MAX_ROWS = 64


def schedule_of_step(source: Source, attempt: int, step: int, ranks: Sequence[int]) -> dict[str, Any]:
    """Columns rank, stage, microbatch, kind, start_ms, end_ms: what the ranks of one pipeline did in a step."""
    if not source.has("spans") or not ranks:
        return {name: np.zeros(0) for name in ("rank", "stage", "microbatch", "kind", "start_ms", "end_ms")}
    listed = ", ".join(str(int(rank)) for rank in ranks)
    return source.query(
        f"""
        SELECT rank, stage, coalesce(microbatch, -1) AS microbatch, kind,
               (start_ns - min(start_ns) OVER ()) / 1e6 AS start_ms,
               (end_ns - min(start_ns) OVER ()) / 1e6 AS end_ms
        FROM spans WHERE attempt = ? AND step = ? AND stage IS NOT NULL AND end_ns IS NOT NULL AND rank IN ({listed})
        ORDER BY start_ns LIMIT {MAX_PIECES}
        """,
        [attempt, step],
    )


def pipeline_sections(
    source: Source, findings: Sequence[Finding], place: Callable[..., PlacedFigure]
) -> Iterator[Section]:
    """The section of the HTML page; none without a pipeline. `place` puts a figure onto the page."""
    found = bubble_of(findings)
    if found is None or found.attempt is None or found.last_step is None:
        return
    numbers = found.evidence
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
    note = found.summary[:1].upper() + found.summary[1:]
    yield Section(
        title="Pipeline",
        note=f"{note}. Means over {numbers['num_steps_measured']:,} typical steps; numbers are microbatches.",
        figures=figures,
        columns=("stage", "work a step, ms"),
        numeric=(0, 1),
        rows=rows,
    )
