"""Drops of the throughput: at some step of a run, for all ranks together, or from one run to another.

    throughput_drops(store, Scope())                # findings of kind `throughput`
    change = between(step_times(store_a), step_times(store_b))
    change.ratio, change.low, change.high           # time of a token in B over that in A, with its 95 % interval

A single slow rank is a straggler and not judged here: per step, the median rank's own work and the shortest wait of any
rank (the transfer) are added. The sum is the time shared by all ranks.

1. Medians over blocks of 10 steps remove single jitters; the first steps (compilation, caches) are left out.
2. The candidate is the block at which the medians before and after differ most, in units of the blocks' noise.
3. It counts if three conditions hold: the time rose by `min_rise_ratio`; nearly all blocks after it lie above the
   middle between the two levels, and nearly all blocks before it below; and it lasted to the end over `min_blocks`. A
   shared machine has bursts that come back down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from analyzers.account.device.measured_by import has_host_gaps
from analyzers.account.time_classes import COMPUTE_PHASES, GAPS, TRAINING, WAITED, total
from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.robust import sigma
from analyzers.run.records.token_copies import token_copies
from analyzers.run.records.trainings import training_starts
from analyzers.scope import Scope
from analyzers.source import READ_ROWS, Floats, Ints, Source, floats, ints, missing_tables
from analyzers.stragglers.policy import ThroughputPolicy
from analyzers.wording import number

__all__ = ["Change", "StepTimes", "between", "regression", "step_times", "throughput_drops"]

_RESAMPLES = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Times of the committed steps in order of training (ms): shared time and its parts, one array each."""

    step: Ints
    data: Floats
    compute: Floats
    communication: Floats
    duration: Floats
    """Step time of the median rank, without checkpoints and evaluations; includes waits for a straggler."""
    is_split: bool = True
    """True if phases were recorded; a printed step has only a duration, and at most a data time."""
    tokens: Floats
    """Tokens of all ranks, each counted once; NaN if not recorded."""
    attempt: int = 0

    @property
    def shared(self) -> Floats:
        """Sum of the median rank's own work and the transfer."""
        return self.data + self.compute + self.communication


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Ratio B / A of the median time per token, or per step if either run did not record tokens."""

    ratio: float
    low: float
    high: float
    per_token: bool
    ms_before: float
    ms_after: float


def step_times(source: Source, attempt: int | None = None, *, first: int = 0) -> StepTimes | None:
    """Read the times of the steps of an attempt (default: the newest) from `first` on; None if there are none."""
    if missing_tables(source, "steps"):
        return None
    ((newest, num_rows),) = source.rows("SELECT max(attempt), count(*) FROM steps WHERE duration_ns IS NOT NULL")
    if newest is None:
        return None
    attempt = newest if attempt is None else attempt
    compute = (*COMPUTE_PHASES, *(GAPS if has_host_gaps(source, attempt) else ()))
    table = source.query(
        f"""
        SELECT step, median({total(["data"])}) / 1e6 AS data, median({total(compute)}) / 1e6 AS compute,
               coalesce(min({WAITED}), 0) / 1e6 AS communication, median({TRAINING}) / 1e6 AS duration,
               CAST(sum(tokens) AS DOUBLE) / {token_copies(source)} AS tokens
        FROM steps
        WHERE attempt = ? AND rank >= 0 AND duration_ns IS NOT NULL AND coalesce(committed, true) AND step % ? = 0
          AND coalesce(stamped_steps, 1) > 0 AND step >= ?
        GROUP BY step ORDER BY step
        """,
        [attempt, max(1, -(-num_rows // READ_ROWS)), first],
    )
    if not len(table["step"]):
        return None
    values = {name: floats(table[name]) for name in ("data", "compute", "communication", "duration", "tokens")}
    is_split = bool(values["compute"].any())
    if not is_split:
        values["compute"] = np.maximum(values["duration"] - values["data"] - values["communication"], 0)
    return StepTimes(step=ints(table["step"]), attempt=int(attempt), is_split=is_split, **values)


def throughput_drops(source: Source, scope: Scope, policy: ThroughputPolicy | None = None) -> list[Finding]:
    """Report at most one lasting drop per attempt, in its last training; none with too few steps."""
    policy = policy or ThroughputPolicy()
    if missing_tables(source, "steps"):
        return [_insufficient("no steps were recorded")]
    findings, starts = [], training_starts(source)
    for (attempt,) in source.rows("SELECT DISTINCT attempt FROM steps WHERE rank >= 0 ORDER BY attempt"):
        first = max((step for begun_in, step in starts if begun_in == attempt), default=0)
        times = step_times(source, attempt, first=first) if scope.attempt in (None, attempt) else None
        if times is not None and (found := _drop(times, policy)):
            findings.append(found)
    return findings


def between(before: StepTimes, after: StepTimes, policy: ThroughputPolicy | None = None) -> Change | None:
    """Compare the time of a token (or step); None with fewer than three blocks of steps in either.

    The interval is computed from medians over resampled blocks, because neighbouring steps are not independent.
    """
    policy = policy or ThroughputPolicy()
    per_token = bool((before.tokens > 0).all() and (after.tokens > 0).all())
    sides = []
    for times in (before, after):
        cost = times.duration / times.tokens if per_token else times.duration
        sides.append(_blocks(cost[min(policy.skip_first, len(cost) // 4) :], policy.block))
    if min(len(side) for side in sides) < 3:
        return None
    rng = np.random.default_rng(0)
    medians = [np.median(rng.choice(side, (_RESAMPLES, len(side))), axis=1) for side in sides]
    low, high = np.percentile(medians[1] / medians[0], (2.5, 97.5))
    return Change(
        ratio=float(np.median(sides[1]) / np.median(sides[0])),
        low=float(low),
        high=float(high),
        per_token=per_token,
        ms_before=float(np.median(before.duration)),
        ms_after=float(np.median(after.duration)),
    )


def regression(change: Change) -> Finding | None:
    """Report that the second run is slower, if the whole interval is above the limit."""
    if change.low < 1 + SHARED.saving_ratio:
        return None
    what = "A token" if change.per_token else "A step"
    return Finding(
        analyzer="throughput",
        kind="throughput",
        severity="warning",
        status="fired",
        summary=f"{what} takes {change.ratio:.2f}x as long as in the first run "
        f"(95 % interval {change.low:.2f} to {change.high:.2f}).",
        cause="between_runs",
        evidence={
            "factor_ratio": round(change.ratio, 4),
            "factor_low_ratio": round(change.low, 4),
            "factor_high_ratio": round(change.high, 4),
            "step_before_ms": round(change.ms_before, 3),
            "step_ms": round(change.ms_after, 3),
        },
        advice="throughput-between_runs",
    )


def _drop(times: StepTimes, policy: ThroughputPolicy) -> Finding | None:
    """Find the onset of a lasting drop, and test the drop."""
    shared = times.shared[policy.skip_first :]
    blocks = _blocks(shared, policy.block)
    num = len(blocks)
    if num < 2 * policy.min_blocks:
        return None
    advances = np.diff(blocks)
    # Noise is the deviation of the advances from their median, because a steady rise is no noise.
    noise = sigma(advances) / math.sqrt(2) or 1e-9
    places = np.arange(policy.min_blocks, num - policy.min_blocks + 1)
    rises = np.array([np.median(blocks[k:]) - np.median(blocks[:k]) for k in places])
    weights = np.sqrt(places * (num - places) / num)
    split = int(places[int(np.argmax(rises * weights))])
    # The median before a split hardly changes until the split is at twice the true place, so the onset is refined: as
    # many blocks as possible must lie on the right side of the middle between both levels.
    is_above = blocks > (np.median(blocks[:split]) + np.median(blocks[split:])) / 2
    agreeing = np.append(0, np.cumsum(~is_above)) + is_above.sum() - np.append(0, np.cumsum(is_above))
    split = int(places[int(np.argmax(agreeing[places]))])
    level, after = float(np.median(blocks[:split])), float(np.median(blocks[split:]))
    middle = (level + after) / 2
    agree = min(float((blocks[:split] < middle).mean()), float((blocks[split:] > middle).mean()))
    is_over = float(np.median(blocks[-3:])) < middle
    rise = after - level
    if (
        rise < policy.min_rise_ratio * level
        or rise < SHARED.certain_sigmas * noise
        or is_over
        or agree < policy.agreement_ratio
    ):
        return None
    first = policy.skip_first + split * policy.block + len(shared) % policy.block
    parts = {
        name: float(np.median(column[first:]) - np.median(column[policy.skip_first : first]))
        for name, column in (
            ("compute", times.compute), ("communication", times.communication), ("data", times.data),
        )
    }  # fmt: skip
    cause = max(parts, key=lambda name: parts[name])
    if not times.is_split:
        cause = "data" if parts["data"] > rise / 2 else "unknown"
        parts = {"data": parts["data"]} if times.data.any() else {}
    who = "All ranks have" if times.is_split else "Training has"
    part = f", mostly in {cause}" if cause != "unknown" else ""
    begin, last = int(times.step[first]), int(times.step[-1])
    return Finding(
        analyzer="throughput",
        kind="throughput",
        severity="warning",
        status="fired",
        summary=f"{who} been slower since step {begin}: {number(after, 4)} ms per step instead of {number(level, 4)} "
        f"({after / level:.2f}x){part}."
        if (advances > 0).mean() < policy.agreement_ratio
        else f"{who} become slower with every step: {number(float(blocks[-1]), 4)} ms per step at step {last} instead "
        f"of {number(float(blocks[0]), 4)} ({blocks[-1] / blocks[0]:.2f}x){part}.",
        first_step=begin,
        last_step=last,
        cause=cause,
        evidence={
            "factor_ratio": round(after / level, 3),
            "step_before_ms": round(level, 3),
            "step_ms": round(after, 3),
            "excess_ms": round(rise, 3),
            **{f"{name}_rise_ms": round(value, 3) for name, value in parts.items()},
            "noise_ratio": round(noise / level, 4),
            "agreeing_blocks_ratio": round(agree, 3),
        },
        advice=f"throughput-{cause}",
        attempt=times.attempt,
        cost_s=round(rise * (last - begin + 1) / 1e3, 3),
    )


def _blocks(values: npt.NDArray[np.float64], length: int) -> Floats:
    """Medians of blocks that end at the newest value."""
    num = len(values) // length
    medians: Floats = (
        np.median(values[len(values) - num * length :].reshape(num, length), axis=1) if num else values[:0]
    )
    return medians


_insufficient = partial(Finding.not_judged, "throughput", "throughput", "The throughput was not checked")
