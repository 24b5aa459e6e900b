"""Memory: growth from step to step, ranks far above their peers, and hosts and devices near their limit.

    memory_use(store, Scope())       # kinds memory_growth, memory_limit; advice memory_limit, memory_imbalance

* *Growth*: the slope of a rank's memory, that is the median of all slopes between sixths of its samples (robust against
  single jumps). It must continue in the last third: caches and allocators level off, leaks do not. The time to
  out-of-memory is the free memory of the host or device divided by the growth of all its ranks.
* *Limit*: see `limits`.
* *Imbalance*: one rank holds much more than the median of its peers (the ranks of its pipeline stage), so that this
  rank will run out of memory first.

If a rank ran out of memory, its use of memory is reported with its death (`rank_lost`, cause out_of_memory).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from analyzers.analysis import Analysis
from analyzers.finding import Finding
from analyzers.memory.limits import limits
from analyzers.memory.policy import MemoryPolicy
from analyzers.policy import SHARED
from analyzers.robust import others_median
from analyzers.run.calls.snapshot import attempts
from analyzers.run.records.not_recorded import missing, not_recorded
from analyzers.scope import Scope
from analyzers.source import Floats, Source, floats, ints, lacking
from analyzers.wording import size_text

__all__ = ["ANALYSES", "OF_FILES", "Growth", "growth", "memory_use"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Growth of a rank's memory, in bytes."""

    per_step: float
    first: float
    last: float


def memory_use(source: Source, scope: Scope, policy: MemoryPolicy | None = None) -> list[Finding]:
    """Findings of the newest attempt; `insufficient_data` for short runs."""
    policy = policy or MemoryPolicy()
    found = limits(source)
    if absent := lacking(source, steps=("memory_bytes", "duration_ns")):
        return [*found, _insufficient(not_recorded(absent), missing(absent))]
    known = attempts(source)
    samples = _samples(source, known[-1]) if known else {}
    growing = {rank: one for rank, (step, memory) in samples.items() if (one := growth(step, memory, policy))}
    if growing:
        found.append(_growth(source, known[-1], samples, growing))
    if known and (unequal := _imbalance(source, known[-1], policy)):
        found.append(unequal)
    is_short = not samples or max(len(step) for step, _ in samples.values()) < SHARED.slow_change_steps
    if is_short and not found:
        return [_insufficient(f"it needs {SHARED.slow_change_steps} steps")]
    return found


def growth(step: Floats, memory: Floats, policy: MemoryPolicy) -> Growth | None:
    """The growth of a rank's memory if it lasts; otherwise None. Pure: bytes at each step, in order."""
    keep = slice(int(policy.skip_ratio * len(step)), None)
    step, memory = step[keep], memory[keep]
    if len(step) < (1 - policy.skip_ratio) * SHARED.slow_change_steps or len(np.unique(memory)) < SHARED.history:
        return None
    # If step numbers repeat because of a rollback, the executions are counted instead of using the step numbers.
    if not (np.diff(step) > 0).all():
        step = np.arange(float(len(step))) * max(1.0, float(np.median(np.abs(np.diff(step)))))
    cuts = [int(len(step) * k / 6) for k in range(7)]
    # The run is cut into sixths. A slope is measured between the medians of two of them, which a short spike does not
    # change.
    level = np.array([np.median(memory[a:b]) for a, b in pairwise(cuts)])
    place = np.array([np.median(step[a:b]) for a, b in pairwise(cuts)])
    slopes = np.array([(level[j] - level[i]) / (place[j] - place[i]) for i in range(6) for j in range(i + 1, 6)])
    per_step = float(np.median(slopes))
    total = per_step * float(step[-1] - step[0])
    last_slope = (level[5] - level[3]) / (place[5] - place[3])
    rises = int((np.diff(level) > 0).sum())
    if total < max(policy.min_growth_bytes, SHARED.saving_ratio * float(level[0])):
        return None
    if rises < policy.min_rises or last_slope < SHARED.explained_ratio * per_step:
        return None
    return Growth(per_step=per_step, first=float(level[0]), last=float(memory[-1]))


def _samples(source: Source, attempt: int) -> dict[int, tuple[Floats, Floats]]:
    table = source.query(
        """
        SELECT rank, step, memory_bytes FROM steps
        WHERE attempt = ? AND rank >= 0 AND duration_ns IS NOT NULL AND memory_bytes IS NOT NULL
          AND step % (SELECT greatest(1, count(*) // 1000000) FROM steps) = 0
        ORDER BY rank, start_ns
        """,
        [attempt],
    )
    rank, step, memory = ints(table["rank"]), floats(table["step"]), floats(table["memory_bytes"])
    bounds = np.flatnonzero(np.diff(rank)) + 1
    parts = zip(np.split(rank, bounds), np.split(step, bounds), np.split(memory, bounds), strict=True)
    return {int(r[0]): (s, m) for r, s, m in parts if len(r)}


def _growth(
    source: Source,
    attempt: int,
    samples: Mapping[int, tuple[Floats, Floats]],
    growing: Mapping[int, Growth],
) -> Finding:
    worst = max(growing, key=lambda rank: growing[rank].per_step)
    one, steps = growing[worst], samples[worst][0]
    ((step_s,),) = source.rows(
        "SELECT avg(duration_ns) / 1e9 FROM steps WHERE attempt = ? AND duration_ns IS NOT NULL", [attempt]
    )
    left = _left_bytes(source, attempt, worst, growing)
    steps_left = None if left is None else left[0] / max(left[1], 1e-9)
    until = ""
    if steps_left is not None and step_s:
        until = f" Out of memory in {steps_left:.0f} steps ({_time(steps_left * step_s)}) at this rate."
    is_all = len(growing) == len(samples)
    who = f"rank {worst}" if len(growing) == 1 else ("all ranks" if is_all else f"{len(growing)} ranks")
    return Finding(
        analyzer="memory",
        kind="memory_growth",
        severity="warning",
        status="fired",
        ranks=() if is_all and len(growing) > 1 else tuple(sorted(growing)),
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        cause="leak",
        summary=f"Memory of {who} grows by {size_text(one.per_step)} a step without levelling off"
        f" ({size_text(one.last)} at the end).{until}",
        evidence={
            "growth_per_step_bytes": round(one.per_step),
            "memory_first_bytes": round(one.first),
            "memory_last_bytes": round(one.last),
            "headroom_bytes": None if left is None else round(left[0]),
            "steps_to_out_of_memory": None if steps_left is None else round(steps_left),
            "time_to_out_of_memory_s": None if steps_left is None or not step_s else round(steps_left * step_s, 1),
            "growing_ranks": sorted(growing)[:32],
        },
        advice="memory-growth",
        attempt=attempt,
    )


def _left_bytes(source: Source, attempt: int, rank: int, growing: Mapping[int, Growth]) -> tuple[float, float] | None:
    """Free memory of the rank's device or host, and the growth per step of all ranks that share it."""
    if lacking(source, health=("memory_used_bytes", "memory_total_bytes"), ranks=("host",)):
        return None
    rows = source.rows(
        "SELECT rank, arg_max(host, wall_ns), arg_max(device_uuid, wall_ns) FROM ranks WHERE attempt = ? AND rank >= 0 "
        "GROUP BY rank",
        [attempt],
    )
    place = {number: (host, uuid) for number, host, uuid in rows}
    host, uuid = place.get(rank, (None, None))
    found = source.rows(
        """
        SELECT arg_max(memory_total_bytes - memory_used_bytes, sample_ns) FROM health
        WHERE memory_used_bytes IS NOT NULL AND memory_total_bytes IS NOT NULL
          AND CASE WHEN ? IS NOT NULL THEN device = ? ELSE device = 'host' AND node = ? END
        """,
        [uuid, uuid, host],
    )
    if not found or found[0][0] is None:
        return None
    neighbours = [other for other in growing if place.get(other, ("", ""))[bool(uuid)] == (uuid or host)]
    return float(found[0][0]), sum(growing[other].per_step for other in neighbours)


def _imbalance(source: Source, attempt: int, policy: MemoryPolicy) -> Finding | None:
    of_ranks = (
        "SELECT rank, 0 AS stage FROM steps WHERE false"
        if lacking(source, ranks=())
        else "SELECT rank, arg_max(coalesce(pp, 0), wall_ns) AS stage FROM ranks "
        f"WHERE attempt = {int(attempt)} GROUP BY rank"
    )
    rows = source.rows(
        f"""
        SELECT rank, held, coalesce(stage, 0) FROM (
            SELECT rank, max(memory_bytes) AS held FROM steps
            WHERE attempt = ? AND rank >= 0 AND memory_bytes IS NOT NULL GROUP BY rank)
        LEFT JOIN ({of_ranks}) USING (rank)
        """,
        [attempt],
    )
    worst: tuple[float, int, float, float] | None = None
    for stage in {stage for *_, stage in rows}:
        peers = [(rank, float(held)) for rank, held, of_stage in rows if of_stage == stage]
        if len(peers) < SHARED.min_times:
            continue
        medians = others_median(np.array([[held] for _, held in peers]))[:, 0]
        for (rank, held), usual in zip(peers, medians.tolist(), strict=True):
            factor = held / usual if usual else 1.0
            if factor >= SHARED.slow_factor and held - usual >= policy.imbalance_bytes:
                worst = max(worst or (0.0, 0, 0.0, 0.0), (factor, rank, held, usual))
    if worst is None:
        return None
    factor, rank, held, usual = worst
    return Finding.advise(
        "memory",
        "memory_imbalance",
        f"Rank {rank} held up to {size_text(held)}, {factor:.2f}x the median of its peers: the first to run out.",
        ranks=(rank,),
        attempt=attempt,
        evidence={
            "highest_bytes": round(held),
            "highest_of_peers_bytes": round(usual),
            "factor_ratio": round(factor, 3),
        },
    )


def _time(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.0f} s"


_insufficient = partial(Finding.not_judged, "memory", "memory_growth", "Memory growth was not checked")


OF_FILES = ("snapshots",)
ANALYSES = (
    Analysis(
        kinds=("memory_growth", "memory_limit", "memory_imbalance"),
        run=memory_use,
        records="compared",
        live="periodic",
    ),
)
