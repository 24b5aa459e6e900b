"""Find a rank whose printed steps take longer than those of the other ranks.

    findings = slow_printed_rank(steps)       # kind straggler, a suspicion

Ranks that wait for each other in every step print the same duration, so a rank that differs measures its own work. The
lines do not show which part of the step it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.wording import number

__all__ = ["slow_printed_rank"]

MIN_STEPS = 2 * SHARED.min_steps
"""Steps that all ranks printed: half of them may lie before the onset."""


def slow_printed_rank(steps: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Report the rank that is `equal_ratio` slower than the median of the others in most steps since some step."""
    by_step: dict[int, dict[int, float]] = defaultdict(dict)
    for row in steps:
        if row.get("duration_ns") and not row.get("is_between") and not row.get("is_relative"):
            by_step[row["step"]][row["rank"]] = row["duration_ns"] / 1e6
    num_ranks = max((len(of) for of in by_step.values()), default=0)
    of_all = {step: of for step, of in sorted(by_step.items()) if len(of) == num_ranks >= SHARED.min_times}
    if len(of_all) < MIN_STEPS:
        return []
    ranks, steps_of_all = sorted(next(iter(of_all.values()))), list(of_all)
    took_ms = np.array([[durations[rank] for rank in ranks] for durations in of_all.values()])
    others_ms = np.column_stack([np.median(np.delete(took_ms, place, axis=1), axis=1) for place in range(len(ranks))])
    ratios = took_ms / others_ms
    newest = np.median(ratios[-MIN_STEPS:], axis=0)
    slow = int(np.argmax(newest))
    if newest[slow] < 1 + SHARED.equal_ratio or np.sum(newest >= 1 + SHARED.equal_ratio) > 1:
        return []
    above = ratios[:, slow] > 1 + (newest[slow] - 1) / 2
    num_above = np.concatenate([[0], np.cumsum(above)])
    # The step that parts the steps best into usual ones before it and slow ones from it on.
    parted = (num_above[-1] - num_above) + (np.arange(len(num_above)) - num_above)
    first = int(np.argmax(parted[: len(above) - MIN_STEPS + 1]))
    if np.mean(above[first:]) < SHARED.agreement_ratio:
        return []
    own_ms, usual_ms = float(np.median(took_ms[first:, slow])), float(np.median(others_ms[first:, slow]))
    who, since = ranks[slow], steps_of_all[first]
    return [
        Finding(
            analyzer="straggler",
            kind="straggler",
            severity="warning",
            status="suspect",
            ranks=(who,),
            first_step=since,
            last_step=steps_of_all[-1],
            cause="unknown",
            summary=f"Rank {who} prints {own_ms / usual_ms:.2f}x the step time of the other {num_ranks - 1} ranks "
            f"since step {since}: {number(own_ms, 4)} instead of {number(usual_ms, 4)} ms. The lines do not show in "
            "which part of the step.",
            evidence={
                "phase_factors_ratio": {"whole_step": round(own_ms / usual_ms, 4)},
                "excess_ms": round(own_ms - usual_ms, 3),
                "basis": f"{len(of_all)} steps of {num_ranks} ranks",
            },
            advice="straggler-compute",
        )
    ]
