"""Ranks that use more CPU time than their peers, for machines where other jobs hide that in wall time.

    for slow in find_more_work(source, timings, policy):     # slow.by_cpu is True

On a machine with more load than cores, the length of a step is decided by how long its ranks wait for a core. How long
a rank works shows only in its CPU time.

1. Only on CPUs, and only if the ranks wait for a core for at least `explained_ratio` of their CPU time.
2. The CPU time of a step over the median of the peers' is searched for persistent excess (`persistence`) of more than
   healthy ranks show there, `crowded_cpu_ratio` and `crowded_cpu_ms`.
3. A rank that waits in collectives more than its peers is left out: a backend may wait by polling, which is not work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from analyzers.account.device.device_timings import DEVICE
from analyzers.account.timings import Matrix, Timings
from analyzers.policy import SHARED
from analyzers.robust import complete, others_median
from analyzers.source import Ints, Source, floats, ints
from analyzers.stragglers.comparison.peer_comparison import Straggler, measured, outlasts_bursts
from analyzers.stragglers.comparison.persistence import Segment, find_segments
from analyzers.stragglers.policy import StragglerPolicy

__all__ = ["core_waits", "cpu_excess", "cpu_times", "find_more_work", "is_crowded"]


def find_more_work(source: Source, timings: Timings, policy: StragglerPolicy) -> list[Straggler]:
    """Find ranks that persistently use more CPU time than their peers; empty unless the machine is busy."""
    limits = policy.corroboration
    if DEVICE in timings.own or not is_crowded(source, timings.attempt, int(timings.steps[0])):
        return []
    found: list[Straggler] = []
    clear = replace(
        policy.persistence,
        min_effect_ratio=limits.crowded_cpu_ratio,
        lone_effect_ratio=max(limits.crowded_cpu_ratio, policy.persistence.lone_effect_ratio),
    )
    for peers in timings.peers:
        if len(peers) < 2 or (times := cpu_excess(source, timings, peers)) is None:
            continue
        cpu_ms, of_others = times
        excess_ms, by_row = cpu_ms - of_others, dict[int, list[Segment]]()
        for segment in find_segments(cpu_ms / of_others - 1, clear, min_length=clear.min_length_ended):
            slow = measured(timings, (peers, segment.row), "compute", [segment], excess_ms)
            if (
                slow.excess_ms > limits.crowded_cpu_ms
                and slow.peers_wait_more_ms > 0
                and outlasts_bursts(timings, segment, policy)
            ):
                by_row.setdefault(segment.row, []).append(segment)
        for row, segments in by_row.items():
            slow = measured(timings, (peers, row), "compute", segments, excess_ms)
            at = np.concatenate([np.arange(part.begin, part.end) for part in segments])
            factor = float(np.median(cpu_ms[row, at] / of_others[row, at]))
            found.append(replace(slow, factor=factor, by_cpu=True, place=""))
    return found


def cpu_excess(source: Source, timings: Timings, rows: Ints) -> tuple[Matrix, Matrix] | None:
    """Return the CPU time of each step and the median of the other ranks' (ms), by rank and observation; None if many
    steps have none."""
    if (cpu_ms := cpu_times(source, timings, rows)) is None:
        return None
    return cpu_ms, np.maximum(others_median(cpu_ms), 1e-3).astype(np.float32)


def cpu_times(source: Source, timings: Timings, rows: Ints) -> Matrix | None:
    """Return the CPU time of each step (ms), by rank and observation; None if many steps have none."""
    return _times(source, timings, rows, "nullif(cpu_ns, 0)")


def core_waits(source: Source, timings: Timings, rows: Ints) -> Matrix | None:
    """Return the wait for a core in each step (ms), by rank and observation; None if many steps have none."""
    return _times(source, timings, rows, "run_delay_ns")


def _times(source: Source, timings: Timings, rows: Ints, spent: str) -> Matrix | None:
    ranks, steps = timings.ranks[rows], timings.steps
    table = source.query(
        f"""
        SELECT rank, step, row_number() OVER (PARTITION BY rank, step ORDER BY start_ns DESC) AS run,
               {spent} AS spent_ns FROM steps
        WHERE attempt = ? AND step BETWEEN ? AND ? AND duration_ns IS NOT NULL AND rank IN ({_listed(ranks)})
        """,
        [timings.attempt, int(steps.min()), int(steps.max())],
    )
    rank, step, run = (ints(table[name]) for name in ("rank", "step", "run"))
    spent_ns, runs = floats(table["spent_ns"]), _runs_from_last(steps)
    each = 1 + max(int(runs.max()), int(run.max(initial=0)))
    keys, wanted = steps * each + runs, step * each + run
    row_order, column_order = np.argsort(ranks), np.argsort(keys)
    rows_of = row_order[np.searchsorted(ranks[row_order], rank)]
    columns_of = column_order[np.searchsorted(keys[column_order], wanted).clip(max=len(keys) - 1)]
    is_known = (keys[columns_of] == wanted) & (spent_ns >= 0)  # False for NaN
    values: Matrix = np.full((len(ranks), len(steps)), np.nan, dtype=np.float32)
    values[rows_of[is_known], columns_of[is_known]] = spent_ns[is_known] / 1e6
    return None if np.isnan(values).mean() > SHARED.cost_ratio else complete(values)


def _runs_from_last(steps: Ints) -> Ints:
    """Number each observation among the observations of the same step, counted back from the last one (1). A step has
    several observations if it ran again after a rollback."""
    reversed_steps = steps[::-1]
    order = np.argsort(reversed_steps, kind="stable")
    in_order = reversed_steps[order]
    numbers = np.empty(len(steps), dtype=np.int64)
    numbers[order] = 1 + np.arange(len(steps)) - np.searchsorted(in_order, in_order)
    return numbers[::-1]


def is_crowded(source: Source, attempt: int, first_step: int) -> bool:
    """True if the ranks, all on CPUs, wait for a core so long that their wall times do not show their work."""
    if not source.has("ranks"):
        return False
    ((num_others,),) = source.rows(
        "SELECT count(*) FROM ranks WHERE attempt = ? AND rank >= 0 AND device <> 'cpu'", [attempt]
    )
    ((waited, worked),) = source.rows(
        "SELECT sum(run_delay_ns), sum(cpu_ns) FROM steps WHERE attempt = ? AND step >= ?", [attempt, first_step]
    )
    return not num_others and bool(worked) and float(waited or 0) >= SHARED.explained_ratio * float(worked)


def _listed(ranks: Sequence[int] | Ints) -> str:
    return ", ".join(str(int(rank)) for rank in ranks)
