"""Start-up: the parts from the launch to the first finished step, and the rank that the others waited for.

    measure(source)                 # seconds: launch, imports, set-up, first step; by attempt
    slow_startup(store, Scope())    # advice slow_startup, cause launch | imports | setup | first_step

| piece | from | to |
|---|---|---|
| launch | `run_started` (or the end of the attempt before) | `attempt_started`: rendezvous, and waiting for nodes |
| imports | `attempt_started` | a rank's first record: process start, imports, the first connection |
| setup | its first record | its first step: model, data, process groups, loading a checkpoint |
| first_step | | excess of its first step over a usual step: compilation, autotuning, caches |

Clocks of other hosts are shifted as in the goodput account: all hosts' first steps begin together.

A piece is reported if it takes at least `slow_s`, and at least `saving_ratio` of the run. If one rank took much longer
for the piece than the median rank, that rank is named, because all ranks wait for it in the first collective. Examples
are rank 0 while it prepares data for all ranks, and a host that reads its imports over the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from statistics import median

from analyzers.account.run_bounds import clock_shifts
from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.run.records.event_log import Event, EventLog
from analyzers.run.records.not_recorded import missing, not_recorded
from analyzers.scope import Scope
from analyzers.settings.policy import StartupPolicy
from analyzers.source import READ_CALLS, Source, every_kth, lacking
from analyzers.wording import listed
from probes.tape import event_kinds

__all__ = ["PIECES", "Startup", "measure", "slow_startup"]

PIECES = {
    "launch": "launching the ranks",
    "imports": "starting processes and importing modules",
    "setup": "building the model, the data and the process groups",
    "first_step": "the first step beyond the duration of a usual one",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """Start-up of one attempt in seconds, as `by_rank[piece][rank]`. A piece without a recorded start is missing."""

    attempt: int
    by_rank: Mapping[str, Mapping[int, float]]

    def longest(self, piece: str) -> float:
        """The longest time of any rank (seconds); the other ranks wait for that rank."""
        return max(self.by_rank.get(piece, {}).values(), default=0.0)


def slow_startup(source: Source, scope: Scope, policy: StartupPolicy | None = None) -> list[Finding]:
    """At most one finding per part of the start-up, if in some attempt this part is slow and takes longest."""
    policy = policy or StartupPolicy()
    needed = {"steps": ("start_ns", "duration_ns"), "ranks": ("wall_ns",), "events": ("wall_ns",)}
    if absent := lacking(source, **needed):
        return [_insufficient(not_recorded(absent), missing(absent))]
    starts = measure(source)
    if not any(start.by_rank for start in starts):
        return [_insufficient("neither the launch nor the first record of any rank is known")]
    ((run_s,),) = source.rows(
        "SELECT (max(start_ns + coalesce(duration_ns, 0)) - (SELECT min(wall_ns) FROM events)) / 1e9 FROM steps"
    )
    by_piece: dict[str, list[Startup]] = {}
    for start in starts:
        slow = [
            piece
            for piece in PIECES
            if start.longest(piece) >= max(policy.slow_s, SHARED.saving_ratio * float(run_s or 0.0))
        ]
        if slow:
            by_piece.setdefault(max(slow, key=start.longest), []).append(start)
    return [_finding(slow_starts, piece, policy) for piece, slow_starts in by_piece.items()]


def measure(source: Source) -> list[Startup]:
    """Measure the start-up of each attempt that reached a step."""
    min_steps = SHARED.block_steps
    log = EventLog.load(source, (event_kinds.RUN_STARTED, event_kinds.ATTEMPT_STARTED, event_kinds.RANK_EXIT))
    first_steps = source.rows(
        """
        SELECT attempt, rank, min(start_ns), arg_min(duration_ns, start_ns),
               median(duration_ns) FILTER (step % ? = 0), count(*) FROM steps
        WHERE rank >= 0 AND duration_ns IS NOT NULL GROUP BY attempt, rank ORDER BY attempt, rank
        """,
        [every_kth(source, "steps", READ_CALLS, READ_CALLS)],
    )
    first_records = {
        (attempt, rank): wall_ns
        for attempt, rank, wall_ns in source.rows(
            "SELECT attempt, rank, min(wall_ns) FROM ranks WHERE rank >= 0 AND wall_ns > 0 GROUP BY attempt, rank"
        )
    }
    shifts_ns = clock_shifts(source, {(int(row[0]), int(row[1])): int(row[2]) for row in first_steps})
    node_of = source.rows("SELECT DISTINCT node_rank, rank FROM ranks WHERE rank >= 0 AND node_rank IS NOT NULL")
    node_shifts_ns = {node: shifts_ns.get(rank, 0) for node, rank in node_of}

    def at(event: Event) -> int:
        of_node = node_shifts_ns.get(event.integer("node_rank"), 0)
        return event.wall_ns + shifts_ns.get(event.integer("exit_rank"), of_node)

    before = [at(event) for kind in (event_kinds.RUN_STARTED, event_kinds.RANK_EXIT) for event in log.of(kind)]
    found = []
    for attempt, rows in groupby(first_steps, key=lambda row: int(row[0])):
        by_rank: dict[str, dict[int, float]] = {}
        started = log.of(event_kinds.ATTEMPT_STARTED, attempt=attempt)
        started_ns = min(map(at, started), default=None)
        launched_ns = max((ns for ns in before if started_ns is not None and ns <= started_ns), default=None)
        launch_s = None if started_ns is None or launched_ns is None else (started_ns - launched_ns) / 1e9
        for _, rank, start_ns, first_ns, usual_ns, num_steps in rows:
            record_ns = first_records.get((attempt, rank))
            joined_ns = None if record_ns is None else record_ns + shifts_ns.get(rank, 0)
            pieces = {
                "launch": launch_s,
                "imports": None if joined_ns is None or started_ns is None else (joined_ns - started_ns) / 1e9,
                "setup": None if record_ns is None else (start_ns - record_ns) / 1e9,
                "first_step": (first_ns - usual_ns) / 1e9 if num_steps >= min_steps and usual_ns else None,
            }
            for piece, seconds in pieces.items():
                if seconds is not None and seconds >= 0:  # negative if the clocks of two hosts differ
                    by_rank.setdefault(piece, {})[rank] = seconds
        found.append(Startup(attempt=attempt, by_rank=by_rank))
    return found


def _finding(starts: Sequence[Startup], piece: str, policy: StartupPolicy) -> Finding:
    """Return a finding on the longest of these starts. Its cost is the sum over all of them."""
    start = max(starts, key=lambda start: start.longest(piece))
    whole_s = sum(start.longest(piece) for start in starts)
    seconds = start.by_rank[piece]
    slowest = max(seconds, key=lambda rank: seconds[rank])
    most = seconds[slowest]
    usual = median(own for rank, own in seconds.items() if rank != slowest) if len(seconds) > 1 else most
    alone = most >= SHARED.doubled_factor * usual and most - usual >= policy.rank_s
    compared = f": rank {slowest} took {most:.1f} s, the median of the others {usual:.1f} s" if alone else ""
    attempts = [start.attempt for start in starts]
    several = f"The starts of attempts {listed(attempts)} spent {whole_s:.1f} s, up to {most:.1f} s each,"
    one = f"The start{f' of attempt {start.attempt}' if start.attempt else ''} spent {most:.1f} s"
    return Finding.advise(
        "startup",
        "slow_startup",
        f"{several if len(starts) > 1 else one} on {PIECES[piece]}{compared}.",
        ranks=(slowest,) if alone else (),
        cause=piece,
        attempt=start.attempt,
        cost_s=round(whole_s, 3),
        evidence={f"{name}_s": round(start.longest(name), 3) for name in PIECES if name in start.by_rank}
        | {"median_rank_s": round(usual, 3)},
    )


_insufficient = partial(Finding.not_judged, "startup", "slow_startup", "The start was not checked")
