"""The figures that prove a finding.

    for drawing in drawings(store, finding, diagnosis):
        drawing.title, drawing.figure           # "Own work of rank 3 beside the others", a Plotly figure

The HTML report and the dashboard show the same ones. A figure whose data is missing is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from ..eventlog import EventLog
from ..finding import Finding
from ..snapshot import SNAPSHOT_EVENTS, take_snapshot
from ..source import Source, ints
from ..waitfor import find_culprits
from . import queries
from .figures import loss, straggler, timeline, waitfor

__all__ = ["Drawing", "drawings", "moment"]

AROUND_STEPS = 40
"""Steps before and after a finding in its picture of the loss."""
MAX_RANKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A figure with a title and one sentence for those who cannot see it."""

    title: str
    figure: go.Figure


def drawings(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Figures for one finding, the most telling first."""
    match finding.kind:
        case "straggler":
            yield from _straggler(source, finding)
        case "hang":
            yield from _wait_for(source, finding)
            yield from moment(source, finding)
        case "rank_lost":
            yield from moment(source, finding)
        case _:  # what has a step shows in the loss, or shows that it does not
            yield from _loss(source, finding)


def moment(source: Source, finding: Finding | None = None) -> Iterator[Drawing]:
    """The timeline around a finding's first step, or at the end of the run."""
    if not source.has("steps"):
        return
    attempt = finding.attempt if finding is not None else None
    if attempt is None:
        ((attempt,),) = source.rows("SELECT max(attempt) FROM steps")
    if attempt is None:
        return
    ((newest,),) = source.rows("SELECT max(step) FROM steps WHERE attempt = ? AND rank >= 0", [attempt])
    at_end = finding is None or finding.first_step is None or finding.kind in ("hang", "rank_lost")
    last = newest if at_end or finding is None or finding.first_step is None else finding.first_step + 1
    if last is None:
        return
    first = max(0, last - (1 if at_end else 2))
    ranks = _beside(source, attempt, finding.ranks if finding is not None else ())
    pieces = queries.timeline(source, attempt=attempt, first_step=first, last_step=last, ranks=ranks)
    if pieces:
        title = (
            f"What {'the ranks' if len(ranks) < MAX_RANKS else f'{len(ranks)} ranks'} did in steps {first} to {last}"
        )
        yield Drawing(title=title, figure=timeline.draw(pieces, ranks=ranks))


def _straggler(source: Source, finding: Finding) -> Iterator[Drawing]:
    if not finding.ranks or not source.has("steps"):
        return
    if finding.cause == "communication":
        yield from moment(source, finding)
        return
    rank, attempt = finding.ranks[0], finding.attempt or 0
    against = queries.rank_against_others(source, attempt, rank)
    if len(against["step"]) > 1:
        figure = straggler.beside_peers(against, rank=rank, onset=finding.first_step)
        yield Drawing(title=f"Own work of rank {rank} beside the others, without waiting", figure=figure)
    first, last = finding.first_step or 0, finding.last_step if finding.last_step is not None else 1 << 60
    work = queries.own_work(source, first_step=first, last_step=last)
    if len(work["rank"]) > 1:
        yield Drawing(title="Own work by rank in these steps", figure=straggler.ranking(work, finding.ranks))


def _wait_for(source: Source, finding: Finding) -> Iterator[Drawing]:
    if finding.attempt is None:
        return
    view = take_snapshot(source, finding.attempt, EventLog.load(source, SNAPSHOT_EVENTS))
    if view.ranks:
        yield Drawing(title="Who waits for whom", figure=waitfor.draw(view, find_culprits(view)))


def _loss(source: Source, finding: Finding) -> Iterator[Drawing]:
    if finding.first_step is None:
        return
    curve = queries.loss_curve(source)
    step = ints(curve["step"])
    last = finding.last_step if finding.last_step is not None else finding.first_step
    near = (step >= finding.first_step - AROUND_STEPS) & (step <= last + AROUND_STEPS)
    if near.sum() < 2:
        return
    found = [mark for mark in queries.marks(source) if mark.step is not None and step[near].min() <= mark.step]
    found = [mark for mark in found if mark.step is not None and mark.step <= step[near].max()]
    figure = loss.draw({name: np.asarray(column)[near] for name, column in curve.items()}, found, [finding])
    yield Drawing(title="Loss and gradient norm around it", figure=figure)


def _beside(source: Source, attempt: int, named: Sequence[int]) -> list[int]:
    """Ranks to show: those named, and others up to `MAX_RANKS`."""
    rows = source.rows("SELECT DISTINCT rank FROM steps WHERE attempt = ? AND rank >= 0 ORDER BY rank", [attempt])
    everybody = [int(rank) for (rank,) in rows]
    chosen = [rank for rank in named if rank in set(everybody)][:MAX_RANKS]
    chosen += [rank for rank in everybody if rank not in set(chosen)][: MAX_RANKS - len(chosen)]
    return sorted(chosen)
