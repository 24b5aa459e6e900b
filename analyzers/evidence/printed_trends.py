"""Losses and durations that climb from line to line. Each printed line is one observation, however many steps it
covers.

findings = [*climbing_loss(steps), *growing_duration(steps, policy)]

The analyses of recorded runs count steps: blocks of 20 for a climbing loss, of 30 steps and more for a duration. A log
with a line for every tenth step, or with some twenty lines in all, never fills a block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from statistics import median
from typing import Any

from analyzers.finding import Finding
from analyzers.numerics.loss.divergence import Rise, find_rise, rise_finding
from analyzers.policy import SHARED
from analyzers.stragglers.policy import ThroughputPolicy
from analyzers.wording import number

__all__ = ["climbing_loss", "growing_duration"]


def climbing_loss(steps: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Report the loss of the last training if it climbs over many lines, or has multiplied over a few."""
    rows = _last_training([row for row in steps if row.get("loss") is not None and math.isfinite(row["loss"])])
    first_rank = min((row["rank"] for row in rows), default=0)
    rows = [row for row in rows if row["rank"] == first_rank]
    if any(before["step"] >= after["step"] for before, after in pairwise(rows)) or not rows:
        return []
    numbers = [row["step"] for row in rows]
    rise = _multiplied(rows)
    if rise is None and numbers[-1] > len(numbers):  # not if every step has a line: then `divergence` reports the rise
        found = find_rise({line: row["loss"] for line, row in enumerate(rows, 1)})
        if found is not None:
            first, last = numbers[found.first_step - 1], numbers[min(found.last_step, len(numbers)) - 1]
            rise = Rise(first_step=first, found_step=numbers[found.found_step - 1], last_step=last,
                        low_loss=found.low_loss, high_loss=found.high_loss, noise_z=found.noise_z)  # fmt: skip
    return [] if rise is None else [rise_finding(0, rise)]


def _multiplied(rows: Sequence[Mapping[str, Any]]) -> Rise | None:
    """Report that the loss in the last lines is a multiple of the loss in the first and in the lowest lines.

    1. The medians of blocks of `min_times` lines are compared, counted from the newest line. There are at least four.
    2. The last two blocks are both at least `clear_factor` times the first block and the lowest block before them. A
       jump counts like a climb, but a loss that rises near zero after a long descent stays below the first block.
    3. The last block still has most of the rise, so the loss has not come back.
    """
    length = SHARED.min_times
    num = len(rows) // length
    if num <= SHARED.min_times or any(row["loss"] <= 0 for row in rows):
        return None
    begin = len(rows) - num * length
    levels = [median(row["loss"] for row in rows[at : at + length]) for at in range(begin, len(rows), length)]
    lowest = min(range(num - 2), key=levels.__getitem__)
    if min(levels[-2:]) < SHARED.clear_factor * max(levels[0], levels[lowest]):
        return None
    if levels[-1] - levels[lowest] < SHARED.explained_ratio * (max(levels) - levels[lowest]):
        return None
    risen = next(at for at in range(lowest + 1, num) if levels[at] >= SHARED.clear_factor * levels[lowest])
    return Rise(
        first_step=rows[begin + length * lowest]["step"],
        found_step=rows[begin + length * (risen + 1) - 1]["step"],
        last_step=rows[-1]["step"],
        low_loss=min(row["loss"] for row in rows[begin + length * lowest : begin + length * (lowest + 1)]),
        high_loss=max(row["loss"] for row in rows[-2 * length :]),
        noise_z=math.nan,
    )


def growing_duration(steps: Sequence[Mapping[str, Any]], policy: ThroughputPolicy) -> list[Finding]:
    """Report durations that grow from line to line until the end, for logs with too few lines to detect a change of
    level.

    1. The lines of the last training are used, without the first ones. No duration may be elapsed time.
    2. In nearly all pairs of lines the later one took longer. The chance of this for 15 lines is one in millions.
    3. The last third is `min_rise_ratio` above the first third, and a sufficient part of the rise (`minor_ratio`) comes
       after the middle third. The smoothed rate of a progress bar does not pass: it approaches a level.
    """
    rows = _last_training([row for row in steps if row.get("duration_ns")])[policy.skip_first :]
    if len(rows) < SHARED.history or any(row.get("other_durations") or row.get("is_relative") for row in rows):
        return []
    if len({row["rank"] for row in rows}) > 1:
        return []
    took_ms = [row["duration_ns"] / 1e6 for row in rows]
    pairs = list(combinations(took_ms[-SHARED.slow_change_steps :], 2))
    third = len(took_ms) // 3
    before, after = median(took_ms[:third]), median(took_ms[-third:])
    halfway = median(took_ms[third:-third])
    rise = after - before
    if (
        sum(early < late for early, late in pairs) < policy.agreement_ratio * len(pairs)
        or rise < policy.min_rise_ratio * before
        or after - halfway < SHARED.minor_ratio * rise
    ):
        return []
    first, last = rows[0]["step"], rows[-1]["step"]
    return [
        Finding(
            analyzer="throughput",
            kind="throughput",
            severity="warning",
            status="fired",
            summary=f"Training becomes slower from line to line: {number(after, 4)} ms per step up to step {last} "
            f"instead of {number(before, 4)} from step {first} on ({after / before:.2f}x).",
            first_step=first,
            last_step=last,
            cause="unknown",
            evidence={
                "factor_ratio": round(after / before, 3),
                "step_before_ms": round(before, 3),
                "step_ms": round(after, 3),
                "excess_ms": round(rise, 3),
            },
            advice="throughput-unknown",
        )
    ]


def _last_training(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines of the last training in the file, in the order of its steps."""
    begins = max((row["step"] for row in rows if row.get("begins")), default=0)
    return sorted((row for row in rows if row["step"] >= begins), key=lambda row: row["step"])
