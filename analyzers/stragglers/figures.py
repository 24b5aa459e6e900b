"""Figures of stragglers, slow links and drops in throughput."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from analyzers.communication.transfers import group_transfers, pair_transfers
from analyzers.figures.drawing import focus
from analyzers.figures.drawing.theme import CATEGORY
from analyzers.figures.drawing.titled_figure import Drawing
from analyzers.figures.ranks import rank_step, straggler
from analyzers.figures.ranks.rank_values import attempt_of
from analyzers.figures.time import stacked
from analyzers.figures.time.moment import moment
from analyzers.finding import Finding, evidence_of
from analyzers.health.figures import clock_of_rank
from analyzers.policy import SHARED
from analyzers.source import READ_STEPS, Floats, Ints, Source
from analyzers.stragglers.throughput import step_times

__all__ = ["FIGURES", "link", "shared_time", "work"]

WINDOW_STEPS = SHARED.block_steps
"""Number of steps per point; a point is the median transfer of these steps."""


def rank_or_link(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Draw a rank's own work and the work of its peers; for a slow link, draw its transfers and the ranks' activity."""
    if finding.cause == "communication":
        yield from link(source, finding)
        yield from moment(source, finding)
    else:
        yield from work(source, finding)


def work(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Draw a straggler's own work and the work of the other ranks, and all ranks sorted by their work."""
    if not finding.ranks or not source.has("steps"):
        return
    rank, attempt = finding.ranks[0], attempt_of(source, finding) or 0
    values = rank_step.rank_against_others(source, attempt, rank)
    if len(values["step"]) > 1:
        figure = straggler.against_peers(values, rank=rank, onset=finding.first_step)
        yield Drawing(title=f"Own work of rank {rank} and the others, without waiting", figure=figure)
    first, last = finding.first_step or 0, finding.last_step if finding.last_step is not None else 1 << 60
    each = rank_step.own_work(source, first_step=first, last_step=last)
    if len(each["rank"]) > 1:
        yield Drawing(title="Own work by rank in these steps", figure=straggler.ranking(each, finding.ranks))
    if finding.cause == "gpu_clock":
        yield from clock_of_rank(source, rank)


def link(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Transfers of a slow link and of comparable links, in windows of a few steps."""
    groups = [str(group) for group in evidence_of(finding).get("process_groups", ())]
    attempt = attempt_of(source, finding)
    if not groups or attempt is None or not source.has("collectives"):
        return
    steps, lines = _aligned(_transfers(source, attempt, finding, groups))
    if len(steps) < 2 or not set(groups) & set(lines):
        return
    values = focus.RankComparison.of_lines(steps, lines, set(groups))
    figure = focus.draw(values, y="transfer of a call (ms)", onset=finding.first_step, others="other links, min to max")
    against = "and other links" if np.isfinite(values.middle).any() else "over the steps"
    yield Drawing(title=f"Transfers of {', '.join(groups[:3])} {against}", figure=figure)


def shared_time(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Time that all ranks need for a step, by kind of work, with the onset."""
    times = step_times(source, attempt_of(source, finding))
    if times is None or len(times.step) < 2:
        return
    keep = np.arange(0, len(times.step), max(1, -(-len(times.step) // READ_STEPS)))
    columns = (
        ("compute", times.compute, CATEGORY["training"]),
        ("communication", times.communication, CATEGORY["communication"]),
        ("data", times.data, CATEGORY["data"]),
    )
    parts = [(name, values[keep], colour) for name, values, colour in columns]
    figure = stacked.draw(times.step[keep], parts, y="ms a step, median rank", onset=finding.first_step)
    yield Drawing(title="Step time without waiting for stragglers", figure=figure)


def _transfers(source: Source, attempt: int, finding: Finding, groups: Sequence[str]) -> dict[str, dict[int, float]]:
    """{group or pair: {first step of a window: median transfer (ms)}} of the finding's operation and size."""
    size, op = int(evidence_of(finding).get("bytes") or 0), str(evidence_of(finding).get("op") or "")
    found: dict[str, dict[int, float]] = {}
    if " -> " in groups[0]:
        pairs, _ = pair_transfers(source, attempt, WINDOW_STEPS)
        chosen = [links for (num_bytes, _), links in pairs.items() if num_bytes == size and groups[0] in links][:1]
    else:
        dimensions = {group.partition(":")[0] for group in groups}
        classes = group_transfers(source, attempt, WINDOW_STEPS)
        chosen = [links for key, links in classes.items() if key[0] in dimensions and key[1:] == (op, size)]
    for links in chosen:
        for name, windows in links.items():
            found[name] = {window.first_step: window.transfer_ms for window in windows.values()}
    return found


def _aligned(found: dict[str, dict[int, float]]) -> tuple[Ints, dict[str, Floats]]:
    """Align the links on common windows; NaN if a link has no transfer in a window."""
    windows = sorted({step // WINDOW_STEPS for transfers in found.values() for step in transfers})
    place = {window: i for i, window in enumerate(windows)}
    lines: dict[str, Floats] = {}
    for name, transfers in found.items():
        lines[name] = np.full(len(windows), np.nan)
        for step, value in transfers.items():
            lines[name][place[step // WINDOW_STEPS]] = value
    return WINDOW_STEPS * np.array(windows, dtype=np.int64), lines


FIGURES: Mapping[str, Sequence[Callable[[Source, Finding], Iterator[Drawing]]]] = {
    "straggler": (rank_or_link,),
    "throughput": (shared_time,),
}
