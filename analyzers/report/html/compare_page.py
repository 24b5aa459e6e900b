"""A comparison of two runs as one self-contained HTML file.

    page = render(comparison, a=Side(...), b=Side(...))
    path.write_bytes(page)

The page shows both loss curves in one figure, both step times and both accounts of the time, then tables of everything
that differs. It has the layout and the escaping of the report of one run (`page_frame`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from analyzers.compare.two_runs import Comparison, Side
from analyzers.figures import course
from analyzers.figures.drawing import series
from analyzers.figures.drawing.theme import SEQUENCE
from analyzers.figures.time import goodput
from analyzers.report.html.page_frame import FigurePage, Section
from analyzers.report.terminal.compare_text import tables
from analyzers.report.terminal.diagnosis_text import evidence_rows, title
from analyzers.report.wording.explained import next_step, why
from analyzers.source import floats, ints
from analyzers.stragglers.throughput import step_times

__all__ = ["render"]

MAX_ROWS = 200
_COLOURS = (SEQUENCE[7], SEQUENCE[0])
"""Colours of the first run (the baseline) and the second."""


def render(comparison: Comparison, a: Side, b: Side, *, version: str = "") -> bytes:
    """The page, UTF-8."""
    sheet = FigurePage()
    slower = comparison.findings[0] if comparison.findings else None
    mark, note = _mark_without_slowdown(comparison)
    return sheet.render(
        run_id=f"{comparison.run_b} against {comparison.run_a}",
        worst=slower.severity if slower else mark,
        verdict=comparison.sentence,
        why=why(slower) if slower else "",
        next=next_step(slower) if slower else "",
        quiet=note,
        unshown="",
        tiles=_tiles(comparison),
        findings=[],
        advised=[],
        not_judged=[],
        explains=[finding.advice for finding in comparison.findings[:1]],
        files=[],
        sections=list(_sections(sheet, comparison, a, b)),
        settings=[],
        footer=f"Made by rankscope {version} from the records of both runs.".replace("  ", " "),
    )


def _mark_without_slowdown(comparison: Comparison) -> tuple[str, str]:
    """Mark and note of a comparison without a slowdown: green only if the speeds were compared, and the second run has
    no shortcoming that the first lacks.
    """
    if comparison.speed is None:
        return "unjudged", "The speeds were not compared."
    if comparison.load_caveat:
        return "unjudged", "No slowdown is certain, because the load of the hosts differs."
    return ("failed" if comparison.shortcomings[1] else "clean"), "No significant slowdown."


def _sections(sheet: FigurePage, comparison: Comparison, a: Side, b: Side) -> Iterator[Section]:
    names = (comparison.run_a, comparison.run_b)
    if lines := _losses(a, b, names):
        figure = series.draw(lines, x="step", y="loss (nat)", height=360)
        yield Section(title="Loss", figures=[sheet.figure(figure, alt="Loss of both runs over the steps")])
    if lines := _durations(a, b, names):
        figure = series.draw(lines, x="step", y="step time (ms)", height=320)
        alt = "Step time of both runs over the steps: median of the ranks, without checkpoints and evaluations"
        yield Section(title="Step time", note=f"{alt}.", figures=[sheet.figure(figure, alt=alt)])
    accounts = [(name, side.diagnosis.goodput) for name, side in zip(names, (a, b), strict=True)]
    figures = [sheet.figure(goodput.strip(account), name) for name, account in accounts if account is not None]
    if figures:
        yield Section(title="Where the time went", figures=figures)
    for heading, rows in tables(comparison):
        if rows:
            more = f"The first {MAX_ROWS} of {len(rows)}." if len(rows) > MAX_ROWS else ""
            yield Section(title=heading, note=more, columns=("", *names), rows=rows[:MAX_ROWS])
    for finding in comparison.findings:
        evidence = evidence_rows(finding)
        yield Section(title=title(finding).capitalize(), note=finding.summary, columns=("", ""), rows=evidence)


def _losses(a: Side, b: Side, names: tuple[str, str]) -> list[series.Series]:
    lines = []
    for side, name, colour in zip((a, b), names, _COLOURS, strict=True):
        curve = course.loss_curve(side.source)
        is_kept = np.asarray(curve["kept"], dtype=bool)
        if len(is_kept) and np.isfinite(floats(curve["loss"])[is_kept]).any():
            steps, values = ints(curve["step"])[is_kept], floats(curve["loss"])[is_kept]
            lines.append(series.Series(name=name, x=steps, y=values, colour=colour))
    return lines


def _durations(a: Side, b: Side, names: tuple[str, str]) -> list[series.Series]:
    lines = []
    for side, name, colour in zip((a, b), names, _COLOURS, strict=True):
        times = step_times(side.source)
        if times is not None:
            lines.append(series.Series(name=name, x=times.step, y=times.duration, colour=colour))
    return lines


def _tiles(comparison: Comparison) -> list[tuple[str, str]]:
    tiles = []
    if comparison.speed is not None:
        what = "time per token" if comparison.speed.per_token else "time per step"
        tiles.append((f"{what}, against the first", f"{comparison.speed.ratio:.2f}x"))
        tiles.append(("95 % interval", f"{comparison.speed.low:.2f} to {comparison.speed.high:.2f}"))
    if comparison.loss is not None:
        tiles.append(("loss at the end, nat", f"{comparison.loss.difference:+.3g}"))
    tiles.append(("different settings", str(len(comparison.settings))))
    tiles.append(("findings only in the second", str(len(comparison.only_b))))
    tiles.append(("findings only in the first", str(len(comparison.only_a))))
    return tiles
