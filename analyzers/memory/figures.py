"""Memory figures: ranks compared with their peers, and the fullest host or device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from analyzers.figures.drawing import focus
from analyzers.figures.drawing.titled_figure import Drawing
from analyzers.figures.ranks.rank_values import against_others, attempt_of
from analyzers.finding import Finding, evidence_of
from analyzers.health.figures import GIB, reading_figure
from analyzers.source import Source, lacking
from analyzers.wording import ranks_text

__all__ = ["FIGURES", "rank_memory"]


def rank_memory(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Memory of the named ranks compared with the others; of all ranks if all of them grow."""
    attempt = attempt_of(source, finding)
    if attempt is None or lacking(source, steps=("memory_bytes",)):
        return
    who = list(finding.ranks) or [int(rank) for rank in evidence_of(finding).get("growing_ranks", ())]
    comparison = against_others(source, attempt, who, "memory_bytes / 1048576.0")
    if len(comparison.x) > 1:
        onset = finding.first_step if finding.kind == "memory_growth" else None
        subject = f"{ranks_text(who)}{' against the others' if who and np.isfinite(comparison.middle).any() else ''}"
        figure = focus.draw(comparison, y="memory (MiB)", onset=onset, from_zero=finding.kind != "memory_growth")
        yield Drawing(title=f"Memory of {subject}", figure=figure)


def limit(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Memory in use and total memory of the fullest host or device, then the memory of its ranks."""
    if not lacking(source, health=("memory_used_bytes", "memory_total_bytes")):
        found = source.rows(
            "SELECT node, device FROM health WHERE memory_used_bytes = ? AND memory_total_bytes = ? LIMIT 1",
            [finding.evidence.get("highest_bytes"), finding.evidence.get("total_bytes")],
        )
        for node, device in found:
            total = float(evidence_of(finding)["total_bytes"]) / GIB
            yield from reading_figure(
                source, f"memory_used_bytes / {GIB}.0", (str(node), str(device)), title="Memory in use", y="GiB",
                join="max", limit=(total, f"total: {total:.3g} GiB"),
            )  # fmt: skip
    yield from rank_memory(source, finding)


FIGURES: Mapping[str, Sequence[Callable[[Source, Finding], Iterator[Drawing]]]] = {
    "memory_growth": (rank_memory,),
    "memory_imbalance": (rank_memory,),
    "memory_limit": (limit,),
}
