"""Figures of deaths and resumes: the last steps, memory of a rank that ran out of it, and state that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from analyzers.figures.drawing.titled_figure import Drawing
from analyzers.figures.ranks import agreement
from analyzers.figures.time.moment import moment
from analyzers.finding import Finding
from analyzers.memory.figures import rank_memory
from analyzers.run.records.event_log import EventLog
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["FIGURES"]

MAX_RANKS = 64


def lost_rank(source: Source, finding: Finding) -> Iterator[Drawing]:
    """The last steps of all ranks; if a rank ran out of memory, first its memory."""
    if finding.cause == "out_of_memory":
        yield from rank_memory(source, finding)
    yield from moment(source, finding)


def resume(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Parts of the loaded state that differ from the saved state, by rank."""
    events = EventLog.load(source, (event_kinds.RESUME_DIFFERS,)).of(
        event_kinds.RESUME_DIFFERS, attempt=finding.attempt
    )
    differing = {event.rank: set(event.texts("parts")) for event in events}
    if not differing or not source.has("ranks"):
        return
    rows = source.rows("SELECT DISTINCT rank FROM ranks WHERE attempt = ? AND rank >= 0", [finding.attempt])
    all_ranks = sorted({int(rank) for (rank,) in rows} | set(differing))
    ranks = sorted(sorted(all_ranks, key=lambda rank: (rank not in differing, rank))[:MAX_RANKS])
    parts = sorted(set().union(*differing.values()))
    grid = np.array([[float(part in differing.get(rank, ())) for part in parts] for rank in ranks])
    figure = agreement.draw([f"rank {rank}" for rank in ranks], parts, grid, x="part of the state")
    yield Drawing(title=f"State that attempt {finding.attempt} loaded, compared with the saved one", figure=figure)


FIGURES: Mapping[str, Sequence[Callable[[Source, Finding], Iterator[Drawing]]]] = {
    "rank_lost": (lost_rank,),
    "excluded": (moment,),
    "resume_differs": (resume,),
}
