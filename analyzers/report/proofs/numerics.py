"""Figures of the state that a restart loaded, and of compressed gradients."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from analyzers.figures import agreement, numbers
from analyzers.figures.titled_figure import Drawing
from analyzers.finding import Finding
from analyzers.run.event_log import EventLog
from analyzers.source import Source, lacking
from probes.tape import event_kinds

__all__ = ["compression", "resume"]

MAX_RANKS = 64


def resume(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Which part of the state was another than saved, on which rank."""
    events = EventLog.load(source, (event_kinds.RESUME_DIFFERS,)).of(
        event_kinds.RESUME_DIFFERS, attempt=finding.attempt
    )
    differing = {event.rank: set(event.texts("parts")) for event in events}
    if not differing or not source.has("ranks"):
        return
    rows = source.rows("SELECT DISTINCT rank FROM ranks WHERE attempt = ? AND rank >= 0", [finding.attempt])
    everybody = sorted({int(rank) for (rank,) in rows} | set(differing))
    ranks = sorted(sorted(everybody, key=lambda rank: (rank not in differing, rank))[:MAX_RANKS])
    parts = sorted(set().union(*differing.values()))
    grid = np.array([[float(part in differing.get(rank, ())) for part in parts] for rank in ranks])
    figure = agreement.draw([f"rank {rank}" for rank in ranks], parts, grid, x="part of the state")
    yield Drawing(title=f"What attempt {finding.attempt} loaded, beside what was saved", figure=figure)


def compression(source: Source, finding: Finding) -> Iterator[Drawing]:
    """The relative error of compressed gradients over the steps."""
    if lacking(source, steps=("compression_error",)):
        return
    table = source.query(
        "SELECT step, max(compression_error) AS error FROM steps WHERE compression_error IS NOT NULL "
        "GROUP BY attempt, step ORDER BY attempt, step"
    )
    yield Drawing(title="Error of compressed gradients", figure=numbers.compression(table))
