"""Make findings of kind `rank_lost`, and say when a rank was lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analyzers.causes import anchor
from analyzers.finding import Finding
from analyzers.run.calls.snapshot import AttemptView

__all__ = ["ON_PURPOSE", "lost_at", "rank_lost"]

ON_PURPOSE = "ended_from_outside"
"""Cause if a signal to the job ended the ranks: a user or a scheduler sent it, and nothing failed."""


def rank_lost(
    view: AttemptView,
    cause: str,
    summary: str,
    evidence: Mapping[str, Any],
    *,
    step: int | None,
    restart: str,
    ranks: tuple[int, ...] = (),
    is_requested: bool = False,
) -> Finding:
    """Make the finding of one cause in one attempt. `restart`: sentence on the restart that followed, which lowers the
    severity. `is_requested`: a signal to the launcher requested the end, so nothing was lost.
    """
    return Finding(
        analyzer="rank_lost",
        kind="rank_lost",
        severity="info" if is_requested else "warning" if restart else "critical",
        status="fired",
        ranks=ranks,
        first_step=step,
        last_step=step,
        cause=cause,
        summary=summary + restart,
        evidence=evidence,
        advice=anchor("rank_lost", cause),
        attempt=view.attempt,
    )


def lost_at(view: AttemptView, step: int | None) -> str:
    """`at step 7` or `before the first step`. `step`: None if the lost ranks recorded none; if others finished steps,
    their records are missing, and the others' newest step is named.
    """
    if step is not None:
        return f"at step {step}"
    if any(rank.finished_steps for rank in view.ranks.values()):
        return f"while the other ranks were at step {view.step}"
    return "before the first step"
