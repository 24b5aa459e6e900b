"""Validation losses of a run: from its events, or for an attached loop from a scalar with one of the names in `LOGGED`.

evaluations(source)[-1].loss           # the newest one, the mean over the validation sets
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from analyzers.run.records.event_log import EventLog
from analyzers.source import Source, missing_tables
from probes.tape import event_kinds

__all__ = ["LOGGED", "Evaluation", "evaluations"]

LOGGED = ("val_loss", "eval_loss", "valid_loss", "validation_loss")
"""Names of a validation loss, as Lightning, Transformers and fairseq log it; other separators count as well
(`val/loss`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation; `sets` has the loss of each validation set by name, and is empty if the sets have no names."""

    attempt: int
    step: int
    loss: float
    wall_ns: int = 0
    sets: Mapping[str, float] = field(default_factory=dict)


def evaluations(source: Source) -> list[Evaluation]:
    """Evaluations with a finite loss, ordered by step; for a step that was evaluated again, the last one.

    Once a later attempt has evaluated a step, evaluations of earlier attempts are left out for this and all later
    steps.
    """
    newest: dict[int, Evaluation] = {}
    attempt = 0
    for one in _recorded(source) or _logged(source):
        if one.attempt > attempt:
            attempt = one.attempt
            newest = {earlier: found for earlier, found in newest.items() if earlier < one.step}
        newest[one.step] = one
    return [newest[step] for step in sorted(newest)]


def _recorded(source: Source) -> list[Evaluation]:
    """Evaluations from the trainer's events, in order of time."""
    if not source.has("events"):
        return []
    events = EventLog.load(source, (event_kinds.EVALUATION,)).of(event_kinds.EVALUATION)
    found = []
    for event in sorted(events, key=lambda event: event.wall_ns):
        loss, step = event.number("loss"), event.step
        if step is None or loss is None or not math.isfinite(loss):
            continue
        named = event.detail.get("sets")
        sets = {
            str(name): float(value)
            for name, value in (named.items() if isinstance(named, Mapping) else ())
            if isinstance(value, (int, float)) and math.isfinite(value)
        }
        sets = sets if any(sets) else {}
        found.append(Evaluation(attempt=event.attempt, step=step, loss=loss, wall_ns=event.wall_ns, sets=sets))
    return found


def _logged(source: Source) -> list[Evaluation]:
    """Evaluations from the logged scalar and rank with the most values, ordered by attempt and step."""
    if missing_tables(source, "scalars") or not source.has("steps"):
        return []
    marks = ", ".join("?" * len(LOGGED))
    rows = source.rows(
        f"""
        WITH losses AS (
            SELECT attempt, step, rank, name, value FROM scalars
            WHERE isfinite(value) AND lower(regexp_replace(name, '[^A-Za-z]', '_', 'g')) IN ({marks})),
        chosen AS (SELECT name, rank FROM losses GROUP BY ALL ORDER BY count(*) DESC, rank, name LIMIT 1)
        SELECT attempt, step, value, coalesce(s.start_ns + coalesce(s.duration_ns, 0), 0)
        FROM losses JOIN chosen USING (name, rank) LEFT JOIN steps s USING (attempt, step, rank)
        ORDER BY attempt, step
        """,
        list(LOGGED),
    )
    return [Evaluation(attempt=attempt, step=step, loss=loss, wall_ns=end_ns) for attempt, step, loss, end_ns in rows]
