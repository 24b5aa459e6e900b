"""Decide when a run without progress counts as stalled: limits adapt to the run's steps and its current phase.

    limit_s(view, StallPolicy())        # 5.0 for steps of 50 ms, 120 s while a checkpoint is written
    stalled_s(view, now_ns, StallPolicy())  # seconds without progress, None while within the limit

Any record of any rank is progress: if one rank hangs, the others block in a collective within a step and stop recording
as well, so the limit does not depend on which rank hangs. Imports, compilation or a large batch leave no record, so CPU
time and file reads count as progress while no rank waits in a collective. The values are in `analyzers.run.policy`.
"""

from __future__ import annotations

from collections import Counter

from analyzers.policy import SHARED
from analyzers.run.calls.snapshot import AttemptView, RankView, first_end_ns
from analyzers.run.calls.step_ends import NEVER_NS
from analyzers.run.ends.endings import all_exited_with_zero
from analyzers.run.ends.stop_requests import stop_of_stalled_run_ns
from analyzers.run.policy import StallPolicy
from analyzers.run.records.event_log import EventLog
from probes.tape import event_kinds

__all__ = [
    "death_ns",
    "ended_cleanly",
    "has_orphaned_calls",
    "killed_by_watch",
    "limit_s",
    "next_launch_ns",
    "stalled_before_death",
    "stalled_s",
    "watched_ns",
]


def limit_s(view: AttemptView, policy: StallPolicy) -> float:
    """Longest silence allowed in the current phase of the attempt (seconds)."""
    alive = [rank for rank in view.ranks.values() if not rank.closed]
    limit = max(
        policy.floor_s,
        policy.step_factor * view.median_step_ns / 1e9,
        SHARED.beyond_few_factor * view.longest_step_ns / 1e9,
    )
    if any(rank.state == "stopped" for rank in alive):
        return limit  # the higher limits that some phases have do not apply to a stopped process
    is_starting = len(view.ranks) < view.world_size or any(rank.finished_steps == 0 for rank in alive)
    is_between_steps = not any(rank.step_is_open or rank.calls for rank in alive)  # for example in teardown
    if is_starting or is_between_steps:
        limit = max(limit, policy.startup_s)
    return max([limit, *(policy.of_phase(phase) for rank in alive for phase in rank.phases)])


def stalled_s(view: AttemptView, reference_ns: int, policy: StallPolicy) -> float | None:
    """Seconds of silence at the reference time (epoch nanoseconds); None while that is within the limit."""
    silent_s, limit = (reference_ns - view.last_ns) / 1e9, limit_s(view, policy)
    if not view.ranks or silent_s <= limit:
        return None
    return None if _works(view, silent_s, reference_ns, limit, policy) else silent_s


def _works(view: AttemptView, silent_s: float, reference_ns: int, limit: float, policy: StallPolicy) -> bool:
    """Return True if `watch` saw work that explains this silence: by any rank before its first step, for up to
    `startup_at_work_s`, or by every rank, for up to `startup_s`, because an endless loop also works. A rank that is in
    a collective, or may be waiting for its device, does not count as working, since waiting can use CPU time.
    """

    def works(rank: RankView) -> bool:
        allowed_s = policy.startup_s if rank.is_at_work else min(limit, policy.startup_s)
        is_free = rank.state == "running" and not rank.calls and rank.worked_ns > view.last_ns
        return is_free and (reference_ns - rank.worked_ns) / 1e9 <= allowed_s

    alive = [rank for rank in view.ranks.values() if not rank.closed]
    if silent_s <= policy.startup_at_work_s and any(rank.finished_steps == 0 and works(rank) for rank in alive):
        return True
    may_wait = any(rank.enqueued or (rank.has_accelerator and rank.phases[-1:] != ("data",)) for rank in alive)
    return silent_s <= policy.startup_s and not may_wait and bool(alive) and all(works(rank) for rank in alive)


def ended_cleanly(view: AttemptView, log: EventLog, policy: StallPolicy | None = None, *, is_last: bool = True) -> bool:
    """Return True if the attempt finished, or closed itself after an interruption. `is_last`: no attempt followed.

    Returns False if, when the attempt was interrupted, ranks had waited for a closed rank for longer than the limit.
    """
    if view.ranks and all(rank.closed for rank in view.ranks.values()):
        return not log.of(event_kinds.EXCEPTION, attempt=view.attempt)
    if all_exited_with_zero(view, log):
        return True
    if not is_last:
        return False
    reasons = {event.text("reason") for event in log.of(event_kinds.RUN_ENDED, attempt=view.attempt)}
    if "finished" in reasons:  # only rank 0 writes this, and ranks that do not communicate may fail all the same
        return "failed" not in reasons and not log.of(event_kinds.EXCEPTION, attempt=view.attempt)
    if not reasons & {"interrupted", "preempted"} or not any(rank.closed for rank in view.ranks.values()):
        return False
    return not (has_orphaned_calls(view) and stalled_before_death(view, log, policy or StallPolicy()) is not None)


def has_orphaned_calls(view: AttemptView) -> bool:
    """Return True if some ranks have closed while others still wait in calls."""
    closed = [rank.closed for rank in view.ranks.values()]
    return any(closed) and any(rank.calls and not rank.closed for rank in view.ranks.values())


def killed_by_watch(log: EventLog, attempt: int) -> bool:
    """Return True if `watch` killed a process of the attempt because of a hang."""
    return bool(log.of(event_kinds.CULPRIT_KILLED, attempt=attempt))


def death_ns(view: AttemptView, log: EventLog) -> int | None:
    """Time at which the first process or the launch ended, or at which a hanging run was asked to end (epoch
    nanoseconds); None if unknown. From then on the launcher, not the run, waits for ranks that do not end.
    """
    ends = [ns for ns in (first_end_ns(log, view.attempt), stop_of_stalled_run_ns(view, log)) if ns is not None]
    if ends:
        return min(ends)
    excluded_ns = min((e.wall_ns for e in log.of(event_kinds.EXCLUDED, attempt=view.attempt)), default=None)
    if excluded_ns is not None:  # the launcher has excluded a device or a node, and then ends the attempt
        return max(excluded_ns, view.last_ns)
    next_ns = next_launch_ns(view, log)
    given_up_ns = min(
        (event.wall_ns for event in log.of(event_kinds.RUN_ENDED) if view.last_ns <= event.wall_ns < next_ns),
        default=None,
    )
    left_ns = watches_left_ns(view, log)
    return given_up_ns if given_up_ns is None or left_ns is None else min(given_up_ns, left_ns)


def next_launch_ns(view: AttemptView, log: EventLog) -> int:
    """Time of the next launch after an attempt (epoch nanoseconds); records after it do not describe this attempt's
    end.

    A node that joins launches nothing: only the first node's launches count.
    """
    started = (event for event in log.of(event_kinds.RUN_STARTED) if event.integer("node_rank", 0) == 0)
    launches = [event.wall_ns for event in started]
    later = [launched_ns for launched_ns in launches[1:] if launched_ns > view.last_ns]
    return min(later, default=NEVER_NS)


def watches_left_ns(view: AttemptView, log: EventLog) -> int | None:
    """Time at which the last `watch` ended (epoch nanoseconds); a `watch` ends once its ranks are gone. None if a
    `watch` may still be running, or if ranks have recorded anything since.

    An interrupted launcher, or the last tick of its watch, may end long after the ranks; this time does not count as
    silence of the ranks.
    """
    started, stopped = log.of(event_kinds.WATCH_STARTED), log.of(event_kinds.WATCH_STOPPED)
    if Counter(event.integer("pid") for event in started) != Counter(event.integer("pid") for event in stopped):
        return None
    left_ns = max((event.wall_ns for event in stopped), default=None)
    return left_ns if left_ns is not None and left_ns >= view.last_ns else None


def watched_ns(view: AttemptView, log: EventLog) -> int | None:
    """Time at which `watch` took the stacks of a silent attempt (epoch nanoseconds); None if it did not.

    `watch` takes stacks of stalled runs only, so they prove a hang even if the process that would report it has died.
    """
    times = [
        event.wall_ns for event in log.of(event_kinds.STACKS, attempt=view.attempt) if event.wall_ns > view.last_ns
    ]
    return max(times, default=None)


def stalled_before_death(view: AttemptView, log: EventLog, policy: StallPolicy) -> float | None:
    """Seconds of silence before the first process ended or stacks were taken; None while within the limit."""
    when_ns, seen_ns = death_ns(view, log), watched_ns(view, log)
    if view.reported_stall_ns is not None:
        return (max(when_ns or 0, view.reported_stall_ns) - view.last_ns) / 1e9
    if when_ns is None:
        return None if seen_ns is None else (seen_ns - view.last_ns) / 1e9
    return stalled_s(view, when_ns, policy)
