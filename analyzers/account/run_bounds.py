"""Time bounds of a run's account: its start and end, broken attempts, launches, clock offsets of hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from analyzers.account.committed_steps import RankTimes
from analyzers.run.calls.snapshot import take_snapshot
from analyzers.run.live.stall_limits import death_ns, killed_by_watch, stalled_s
from analyzers.run.policy import StallPolicy
from analyzers.run.records.event_log import EventLog
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["BrokenEnd", "broken_ends", "clock_shifts", "launch_breaks", "run_bounds"]

CLOCK_NS = 500_000_000
"""Difference between hosts' first steps above which their clocks are taken to disagree: an attempt starts on all
hosts at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenEnd:
    """End of an attempt that broke off in the middle of a step or hung (epoch nanoseconds)."""

    progress_ns: int
    end_ns: int
    is_hung: bool
    is_alive: bool


def run_bounds(
    source: Source,
    log: EventLog,
    times: Mapping[tuple[int, int], RankTimes],
    shifts: Mapping[int, int],
    now_ns: int | None,
) -> tuple[int, int]:
    """Start and end of the run, epoch nanoseconds by the first node's clock."""
    first = [spent.first_ns + shifts.get(rank, 0) for (_, rank), spent in times.items()]
    last = [spent.last_ns + shifts.get(rank, 0) for (_, rank), spent in times.items()]
    first += [event.wall_ns for event in log.of(event_kinds.RUN_STARTED)]
    if source.has("ranks"):
        starts = source.rows("SELECT rank, min(wall_ns) FROM ranks WHERE wall_ns > 0 AND rank >= 0 GROUP BY rank")
        first += [wall_ns for rank, wall_ns in starts if rank not in shifts]
    if now_ns is not None:
        return min(first), max(now_ns, *last)
    ended = max((event.wall_ns for event in log.of(event_kinds.RUN_ENDED)), default=0)
    if ended > 0 and ended >= max((event.wall_ns for event in log.of(event_kinds.ATTEMPT_STARTED)), default=0):
        return min(first), max(ended, *last)
    newest = {"events": "wall_ns", "spans": "coalesce(end_ns, start_ns)", "collectives": "coalesce(end_ns, issue_ns)"}
    for table, when in newest.items():
        found = source.rows(f"SELECT rank, max({when}) FROM {table} GROUP BY rank") if source.has(table) else []
        last += [when_ns + shifts.get(rank, 0) for rank, when_ns in found if when_ns]
    return min(first), max(last)


def broken_ends(
    source: Source,
    log: EventLog,
    times: Mapping[tuple[int, int], RankTimes],
    policy: StallPolicy,
    now_ns: int | None,
    standstill_ns: Mapping[int, int],
) -> dict[int, BrokenEnd]:
    """The attempts that broke off in the middle of a step, or hung."""
    attempts = sorted({attempt for attempt, _ in times})
    found: dict[int, BrokenEnd] = {}
    for attempt in attempts:
        is_open = any(spent.open_ns is not None for (a, _), spent in times.items() if a == attempt)
        if not is_open and attempt not in standstill_ns and not killed_by_watch(log, attempt):
            continue
        view = take_snapshot(source, attempt, log)
        death = death_ns(view, log)
        is_alive = attempt == attempts[-1] and death is None and now_ns is not None
        end_ns = death or (now_ns if is_alive and now_ns is not None else view.last_ns)
        is_hung = (
            attempt in standstill_ns or stalled_s(view, end_ns, policy) is not None or killed_by_watch(log, attempt)
        )
        if not is_open and not is_hung:
            continue
        found[attempt] = BrokenEnd(
            progress_ns=view.last_ns, end_ns=max(end_ns, view.last_ns), is_hung=is_hung, is_alive=is_alive
        )
    return found


def launch_breaks(log: EventLog, times: Mapping[tuple[int, int], RankTimes]) -> dict[int, tuple[int, int]]:
    """{first attempt of each later launch: (end of the previous launch, start of this one)}, epoch nanoseconds.

    A node that joins a running run records a start too, so only starts recorded by the first node count.
    """
    first_ns: dict[int, int] = {}
    last_ns: dict[int, int] = {}
    for (attempt, _), spent in times.items():
        first_ns[attempt] = min(first_ns.get(attempt, spent.first_ns), spent.first_ns)
        last_ns[attempt] = max(last_ns.get(attempt, 0), spent.last_ns, spent.open_ns or 0)
    launches = sorted(event.wall_ns for event in log.of(event_kinds.RUN_STARTED) if event.integer("node_rank", 0) == 0)
    found: dict[int, tuple[int, int]] = {}
    for launched_ns in launches[1:]:
        later = [attempt for attempt, start_ns in first_ns.items() if start_ns >= launched_ns]
        earlier = [attempt for attempt in first_ns if later and attempt < min(later)]
        # If the previous attempt still recorded after this launch, a later launch replaced it.
        if not later or not earlier or last_ns[max(earlier)] > launched_ns:
            continue
        before_ns = max(start_ns for start_ns in launches if start_ns < launched_ns)
        ended_ns = [
            event.wall_ns
            for event in (*log.of(event_kinds.RUN_ENDED), *log.of(event_kinds.RANK_EXIT))
            if before_ns < event.wall_ns <= launched_ns
        ]
        found[min(later)] = (max([*ended_ns, last_ns[max(earlier)]]), launched_ns)
    return found


def clock_shifts(source: Source, first_steps_ns: Mapping[tuple[int, int], int]) -> dict[int, int]:
    """{rank: ns to add to its clock}, so that the first steps of its host and of the first rank's host begin together.

    `first_steps_ns`: {(attempt, rank): start of its first step}. Ranks with a clock that differs by at most `CLOCK_NS`
    are left out.
    """
    if not source.has("ranks"):
        return {}
    hosts = dict(source.rows("SELECT rank, arg_max(host, wall_ns) FROM ranks WHERE rank >= 0 GROUP BY rank"))
    ranks = sorted({rank for _, rank in first_steps_ns})
    home = hosts.get(ranks[0])
    first_ns: dict[tuple[int, str | None], list[int]] = {}
    for (attempt, rank), begin_ns in first_steps_ns.items():
        first_ns.setdefault((attempt, hosts.get(rank)), []).append(begin_ns)
    differences_ns: dict[str | None, list[int]] = {}
    for (attempt, host), there_ns in first_ns.items():
        if host != home and (home_ns := first_ns.get((attempt, home))):
            differences_ns.setdefault(host, []).append(int(np.median(home_ns)) - int(np.median(there_ns)))
    by_host = {host: int(np.median(each_ns)) for host, each_ns in differences_ns.items()}
    shifts = {rank: by_host.get(hosts.get(rank), 0) for rank in ranks}
    return {rank: shift_ns for rank, shift_ns in shifts.items() if abs(shift_ns) > CLOCK_NS}
