"""Find a rank whose printed steps take longer than those of the other ranks.

    findings = slow_printed_rank(steps)       # kind straggler, a suspicion

Ranks that wait for each other in every step print the same duration, so a rank that differs measures its own work. The
lines do not show which part of the step it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.wording import number

__all__ = ["slow_printed_rank"]

MIN_RANKS = 3
MIN_STEPS = 20
"""Steps that all ranks printed."""


def slow_printed_rank(steps: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Report the rank that is `equal_ratio` slower than the median of the others in most steps since some step."""
    by_step: dict[int, dict[int, float]] = defaultdict(dict)
    for row in steps:
        if row.get("duration_ns") and not row.get("is_between") and not row.get("is_relative"):
            by_step[row["step"]][row["rank"]] = row["duration_ns"] / 1e6
    num_ranks = max((len(of) for of in by_step.values()), default=0)
    of_all = {step: of for step, of in sorted(by_step.items()) if len(of) == num_ranks >= MIN_RANKS}
    if len(of_all) < MIN_STEPS:
        return []
    ratios = {
        rank: [took / median(other for of, other in durations.items() if of != rank)
               for durations in of_all.values() for of, took in durations.items() if of == rank]
        for rank in next(iter(of_all.values()))
    }  # fmt: skip
    newest = {rank: median(values[-MIN_STEPS:]) for rank, values in ratios.items()}
    slow = max(newest, key=lambda rank: newest[rank])
    if newest[slow] < 1 + SHARED.equal_ratio or sum(one >= 1 + SHARED.equal_ratio for one in newest.values()) > 1:
        return []
    middle = 1 + (newest[slow] - 1) / 2
    above = [ratio > middle for ratio in ratios[slow]]
    places = range(len(above) - MIN_STEPS + 1)
    first = max(places, key=lambda at: sum(above[at:]) + at - sum(above[:at]))
    if sum(above[first:]) < SHARED.agreement_ratio * len(above[first:]):
        return []
    since = list(of_all)[first]
    took = median(of_all[step][slow] for step in list(of_all)[first:])
    others = median(value for step in list(of_all)[first:] for rank, value in of_all[step].items() if rank != slow)
    return [
        Finding(
            analyzer="straggler",
            kind="straggler",
            severity="warning",
            status="suspect",
            ranks=(slow,),
            first_step=since,
            last_step=list(of_all)[-1],
            cause="unknown",
            summary=f"Rank {slow} prints {took / others:.2f}x the step time of the other {num_ranks - 1} ranks since "
            f"step {since}: {number(took, 4)} instead of {number(others, 4)} ms. The lines do not show in which part "
            "of the step.",
            evidence={
                "phase_factors_ratio": {"whole_step": round(took / others, 4)},
                "excess_ms": round(took - others, 3),
                "basis": f"{len(of_all)} steps of {num_ranks} ranks",
            },
            advice="straggler-compute",
        )
    ]
