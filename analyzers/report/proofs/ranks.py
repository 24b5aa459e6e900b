"""Proofs about ranks: one rank's work, memory or gradient beside that of the others over the steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from analyzers.communication.bandwidth import SIZE_OF_CALL
from analyzers.communication.slow_pair import pair_windows
from analyzers.figures import focus as against
from analyzers.figures import queries, straggler
from analyzers.figures import startup as startup_figure
from analyzers.figures.rank_values import attempt_of
from analyzers.figures.titled_figure import Drawing
from analyzers.finding import Finding
from analyzers.health.figures import clock_of_rank
from analyzers.settings.startup import measure
from analyzers.source import Floats, Ints, Source, lacking

__all__ = ["link", "startup", "work"]

WINDOW_STEPS = 5
"""Steps whose median transfer is one point, as in `slow_group`."""


def work(source: Source, finding: Finding) -> Iterator[Drawing]:
    """A straggler's own work beside the others', and all ranks in the order of their work."""
    if not finding.ranks or not source.has("steps"):
        return
    rank, attempt = finding.ranks[0], attempt_of(source, finding) or 0
    beside = queries.rank_against_others(source, attempt, rank)
    if len(beside["step"]) > 1:
        figure = straggler.beside_peers(beside, rank=rank, onset=finding.first_step)
        yield Drawing(title=f"Own work of rank {rank} beside the others, without waiting", figure=figure)
    first, last = finding.first_step or 0, finding.last_step if finding.last_step is not None else 1 << 60
    each = queries.own_work(source, first_step=first, last_step=last)
    if len(each["rank"]) > 1:
        yield Drawing(title="Own work by rank in these steps", figure=straggler.ranking(each, finding.ranks))
    if finding.cause == "gpu_clock":
        yield from clock_of_rank(source, rank)


def link(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Transfers of a slow link beside those of the links beside it, in windows of a few steps."""
    groups = [str(group) for group in finding.evidence.get("process_groups", ())]
    attempt = attempt_of(source, finding)
    if not groups or attempt is None or not source.has("collectives"):
        return
    size, op = int(finding.evidence.get("bytes") or 0), str(finding.evidence.get("op") or "")
    if " -> " in groups[0]:
        classes, _ = pair_windows(source, attempt, WINDOW_STEPS, 0)
        windows = next((of for (num_bytes, _), of in classes.items() if num_bytes == size and groups[0] in of), {})
        found: dict[str, dict[int, float]] = {
            name: {first: ms for ms, _, first, _ in of.values()} for name, of in windows.items()
        }
    else:
        found = _transfers(source, attempt, {group.partition(":")[0] for group in groups}, op, size)
    steps, lines = _aligned(found)
    if len(steps) < 2 or not set(groups) & set(lines):
        return
    beside = against.Beside.of_lines(steps, lines, set(groups))
    figure = against.draw(
        beside, y="transfer of a call (ms)", onset=finding.first_step, others="beside it, least to largest"
    )
    whose = "beside those next to it" if np.isfinite(beside.middle).any() else "over the steps"
    yield Drawing(title=f"Transfers of {', '.join(groups[:3])} {whose}", figure=figure)


def _transfers(source: Source, attempt: int, dimensions: set[str], op: str, size: int) -> dict[str, dict[int, float]]:
    """{group: {first step of a window: median transfer (ms)}} of one operation and size."""
    marks = ", ".join("?" * len(dimensions))
    rows = source.rows(
        f"""
        SELECT process_group, min(step), median(transfer_ns) / 1e6 FROM (
            SELECT process_group, min(op) AS op, {SIZE_OF_CALL} AS bytes, min(step) AS step,
                   min(end_ns - issue_ns) AS transfer_ns
            FROM collectives WHERE attempt = ? AND end_ns >= issue_ns AND op = ?
              AND split_part(process_group, ':', 1) IN ({marks})
            GROUP BY process_group, seq HAVING count(*) > 1)
        WHERE bytes = ? GROUP BY process_group, step // {WINDOW_STEPS} ORDER BY 1, 2
        """,
        [attempt, op, *sorted(dimensions), size],
    )
    found: dict[str, dict[int, float]] = {}
    for group, step, took_ms in rows:
        found.setdefault(str(group), {})[int(step)] = float(took_ms)
    return found


def _aligned(found: dict[str, dict[int, float]]) -> tuple[Ints, dict[str, Floats]]:
    """The same windows for all of them; NaN where a link has none."""
    windows = sorted({step // WINDOW_STEPS for of in found.values() for step in of})
    place = {window: i for i, window in enumerate(windows)}
    lines: dict[str, Floats] = {}
    for name, of in found.items():
        lines[name] = np.full(len(windows), np.nan)
        for step, value in of.items():
            lines[name][place[step // WINDOW_STEPS]] = value
    return WINDOW_STEPS * np.array(windows, dtype=np.int64), lines


def startup(source: Source, finding: Finding) -> Iterator[Drawing]:
    """What each piece of the start took, rank by rank."""
    if lacking(source, steps=("start_ns",), ranks=("wall_ns",), events=("wall_ns",)):
        return
    start: Any = next((one for one in measure(source) if one.attempt == (finding.attempt or 0)), None)
    if start is not None and start.by_rank:
        figure = startup_figure.draw(start.by_rank, set(finding.ranks))
        yield Drawing(title="The start, piece by piece", figure=figure)
