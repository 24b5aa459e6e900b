"""Parts of the step time by rank, and the phases or ranks that explain why another run's steps are slower or faster.

    before, after = step_parts(source_a), step_parts(source_b)
    main_difference(speed, before, after)    # "A step takes 14.1 ms more, mostly: forward of rank 1 +13.4 ms."

All values are means of the medians of blocks of steps. The medians remove outliers. The means show a rank that was slow
in a part of the run, which a median over the ranks or over the whole run would hide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np

from analyzers.account.time_classes import GAPS_WORK, OWN_PHASES, TRAINING, WAITED, own
from analyzers.policy import SHARED
from analyzers.source import READ_ROWS, Source, missing_tables
from analyzers.stragglers.policy import ThroughputPolicy
from analyzers.stragglers.throughput import Change
from analyzers.wording import number, signed

__all__ = ["PLACES", "WAITING", "StepParts", "main_difference", "step_parts"]

WAITING = "waiting"
PLACES = (*OWN_PHASES, "between phases", WAITING)
MAX_NAMED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Milliseconds of a step, by rank and place; places that were not recorded are missing."""

    step_ms: float
    """Step time without checkpoints and evaluations, mean over the ranks."""
    by_rank: Mapping[int, Mapping[str, float]]

    def of_place(self, place: str) -> float | None:
        """Mean over the ranks; the values of all places add up to the measured part of the step."""
        known = [parts[place] for parts in self.by_rank.values() if place in parts]
        return float(np.mean(known)) if known else None


def step_parts(source: Source, policy: ThroughputPolicy | None = None) -> StepParts | None:
    """Read the parts of the newest attempt's steps, except the first ones; None without steps."""
    policy = policy or ThroughputPolicy()
    if missing_tables(source, "steps"):
        return None
    ((attempt, first, last, num_rows),) = source.rows(
        "SELECT arg_max(attempt, attempt), min(step), max(step), count(*) FROM steps WHERE rank >= 0 AND "
        "duration_ns IS NOT NULL AND attempt = (SELECT max(attempt) FROM steps WHERE duration_ns IS NOT NULL)"
    )
    if attempt is None:
        return None
    columns = {**{name: own(name) for name in OWN_PHASES}, "between phases": GAPS_WORK, WAITING: WAITED}
    medians = ", ".join(f"median({sql}) AS c{number}" for number, sql in enumerate(columns.values()))
    means = ", ".join(f"avg(c{number}) / 1e6" for number in range(len(columns)))
    rows = source.rows(
        f"""
        SELECT rank, avg(step_ns) / 1e6, {means} FROM (
            SELECT rank, median({TRAINING}) AS step_ns, {medians} FROM steps
            WHERE attempt = ? AND rank >= 0 AND duration_ns IS NOT NULL AND coalesce(committed, true)
              AND coalesce(stamped_steps, 1) > 0 AND step >= ? AND step % ? = 0
            GROUP BY rank, (? - step) // ?
        ) GROUP BY rank ORDER BY rank
        """,
        [
            attempt, first + min(policy.skip_first, (last - first) // 4), max(1, -(-num_rows // READ_ROWS)), last,
            policy.block,
        ],
    )  # fmt: skip
    if not rows:
        return None
    by_rank = {
        int(rank): {name: float(ms) for name, ms in zip(columns, parts, strict=True) if ms is not None}
        for rank, _, *parts in rows
    }
    return StepParts(step_ms=float(np.mean([row[1] for row in rows])), by_rank=by_rank)


def main_difference(speed: Change | None, before: StepParts | None, after: StepParts | None) -> str:
    """Name the ranks, or else the phases, that explain most of the change of the step time.

    Empty if the change is not significant, or if its `MAX_NAMED` largest parts explain too little of it.
    """
    if speed is None or speed.low <= 1 <= speed.high or before is None or after is None:
        return ""
    growth = after.step_ms - before.step_ms
    sign = 1 if speed.ratio > 1 else -1
    if sign * growth <= 0:
        return ""
    named, who = _of_ranks(before, after, growth)
    if not named:
        pairs = {place: (before.of_place(place), after.of_place(place)) for place in PLACES}
        changes = {place: b - a for place, (a, b) in pairs.items() if a is not None and b is not None}
        named, who = _explaining(changes, growth), ""
    if not named:
        return ""
    parts = ", ".join(f"{place}{who} {signed(ms)} ms" for place, ms in named.items())
    changed = f"A step takes {number(abs(growth))} ms {'more' if growth > 0 else 'less'}"
    rest = growth - sum(named.values())
    if rest * growth < 0:  # the named parts exceed the whole change
        return f"{changed}: {parts}, all other parts together {signed(rest)} ms."
    return f"{changed}, mostly: {parts}."


def _of_ranks(before: StepParts, after: StepParts, growth: float) -> tuple[dict[str, float], str]:
    """Return ({place: ms}, " of rank 1") if the work of at most half of the ranks explains the growth, and the work of
    the others grew much less; otherwise ({}, "")."""
    if before.by_rank.keys() != after.by_rank.keys():
        return {}, ""
    changes = {rank: _work_changes(before.by_rank[rank], parts) for rank, parts in after.by_rank.items()}
    shares = {rank: sum(places.values()) / growth for rank, places in changes.items()}
    most = SHARED.explained_ratio
    ranks = [rank for rank, share in shares.items() if share >= most]
    others = [share for rank, share in shares.items() if rank not in ranks]
    if not 0 < len(ranks) <= len(others) or median(others) > most * min(shares[rank] for rank in ranks):
        return {}, ""
    named = [_explaining(changes[rank], growth) for rank in ranks]
    if len(ranks) > 1 and any(each.keys() != named[0].keys() for each in named):
        return {}, ""
    mean = {place: float(np.mean([each[place] for each in named])) for place in named[0]}
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return mean, f" of rank{'s' * (len(ranks) > 1)} {shown}"


def _work_changes(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {place: ms - before[place] for place, ms in after.items() if place != WAITING and place in before}


def _explaining(changes: Mapping[str, float], growth: float) -> dict[str, float]:
    """The largest changes in the direction of `growth`, the change of the step time; empty if they do not explain
    most of it."""
    sign = 1 if growth > 0 else -1
    largest = sorted(changes, key=lambda place: -sign * changes[place])[:MAX_NAMED]
    named = {place: changes[place] for place in largest if changes[place] / growth >= SHARED.cost_ratio}
    return named if sum(named.values()) / growth >= SHARED.explained_ratio else {}
