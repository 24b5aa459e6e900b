"""Consecutive trainings in one process, as in a sweep: the step numbers continue, but each training has a separate
series of losses.

training_starts(source)                # {(0, 401)}: another model is trained from step 401 of attempt 0 on
"""

from __future__ import annotations

from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["training_starts"]


def training_starts(source: Source) -> set[tuple[int, int]]:
    """Return (attempt, step) of the first step of each training except the first training, as the ranks noticed it."""
    if not source.has("events"):
        return set()
    rows = source.rows(
        "SELECT DISTINCT attempt, step FROM events WHERE kind = ? AND step IS NOT NULL", [event_kinds.TRAINING_BEGAN]
    )
    return {(int(attempt), int(step)) for attempt, step in rows}
