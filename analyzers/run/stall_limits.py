"""When a run that makes no progress is stalled: limits that adapt to the run and know its phases.

    limit_s(view, StallPolicy())        # 5.0 for steps of 50 ms, 120 s while a checkpoint is written
    stalled_since(view, now_ns, policy) # seconds without progress, None while within the limit

Progress is any record of any rank: when one rank hangs, the others run into their next collective within a step and
fall silent too. That also makes the limit independent of who hangs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from analyzers.run.event_log import EventLog
from analyzers.run.snapshot import AttemptView, first_end_ns
from probes.tape import event_kinds

__all__ = [
    "StallPolicy",
    "death_ns",
    "ended_cleanly",
    "is_left_alone",
    "killed_by_watch",
    "limit_s",
    "stall_policy",
    "stalled_before_death",
    "stalled_s",
    "watched_ns",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StallPolicy:
    """Limits in seconds, factors of a step's time. Sources: issue 2 (floor, adaptive) and the traps of others, whose
    limits are minutes because they do not know the phases."""

    floor_s: float = 5.0
    """Never stalled before this (seconds); `recovery.hang_floor_s`. A full garbage collection takes less."""
    step_factor: float = 5.0
    """Median steps without any record; a step holds dozens of records, so even one full step is long."""
    longest_factor: float = 2.0
    """Longest of the recent 50 steps (without evaluation and checkpoint): a run with uneven steps is given more."""
    startup_s: float = 180.0
    """Before the first finished step of an attempt and outside of steps (seconds): imports, compilation, first batch,
    rendezvous, teardown."""
    compile_s: float = 600.0
    """In a span `compile` (seconds)."""
    checkpoint_s: float = 120.0
    """In a span `checkpoint` (seconds): a slow file system is a fault of its own, not a hang."""
    evaluate_s: float = 120.0
    """In a span `evaluate` (seconds), whose inside may leave no record."""

    replay_s: float = 120.0
    """In a span `replay` (seconds): a step in which every operation is looked at takes several times its time."""

    def of_phase(self, phase: str) -> float:
        """The limit that a span's kind asks for; 0 where it asks for none."""
        return {
            "compile": self.compile_s,
            "checkpoint": self.checkpoint_s,
            "evaluate": self.evaluate_s,
            "eval": self.evaluate_s,
            "replay": self.replay_s,
        }.get(phase, 0.0)


def limit_s(view: AttemptView, policy: StallPolicy) -> float:
    """How long this attempt may be silent, in what it is doing now (seconds)."""
    alive = [rank for rank in view.ranks.values() if not rank.closed]
    limit = max(
        policy.floor_s,
        policy.step_factor * view.median_step_ns / 1e9,
        policy.longest_factor * view.longest_step_ns / 1e9,
    )
    if any(rank.state == "stopped" for rank in alive):
        return limit  # no phase stops a process
    if len(alive) < view.world_size and len(view.ranks) < view.world_size:
        limit = max(limit, policy.startup_s)
    if any(rank.finished_steps == 0 for rank in alive):
        limit = max(limit, policy.startup_s)
    if not any(rank.step_is_open or rank.calls for rank in alive):
        limit = max(limit, policy.startup_s)
    return max([limit, *(policy.of_phase(phase) for rank in alive for phase in rank.phases)])


def stalled_s(view: AttemptView, reference_ns: int, policy: StallPolicy) -> float | None:
    """Seconds of silence at the reference time (epoch nanoseconds); None while that is within the limit."""
    silent_s = (reference_ns - view.last_ns) / 1e9
    return silent_s if view.ranks and silent_s > limit_s(view, policy) else None


def ended_cleanly(view: AttemptView, log: EventLog, policy: StallPolicy | None = None) -> bool:
    """Whether the last attempt came to its end, or was interrupted and closed itself.

    One that was interrupted while ranks waited for one that had closed long before was stuck, and did not.
    """
    if view.ranks and all(rank.closed for rank in view.ranks.values()):
        return not log.of(event_kinds.EXCEPTION, attempt=view.attempt)
    reasons = {event.text("reason") for event in log.of(event_kinds.RUN_ENDED, attempt=view.attempt)}
    if "finished" in reasons:
        return True
    if not reasons & {"interrupted", "preempted"} or not any(rank.closed for rank in view.ranks.values()):
        return False
    return not (is_left_alone(view) and stalled_before_death(view, log, policy or StallPolicy()) is not None)


def is_left_alone(view: AttemptView) -> bool:
    """Whether some ranks have closed and others still wait in calls."""
    closed = [rank.closed for rank in view.ranks.values()]
    return any(closed) and any(rank.calls and not rank.closed for rank in view.ranks.values())


def killed_by_watch(log: EventLog, attempt: int) -> bool:
    """Whether watch ended a process of the attempt because of a hang."""
    return bool(log.of(event_kinds.CULPRIT_KILLED, attempt=attempt))


def death_ns(view: AttemptView, log: EventLog) -> int | None:
    """When the first process of the attempt ended, or the launcher gave up (epoch nanoseconds); None if unknown."""
    ended_ns = first_end_ns(log, view.attempt)
    if ended_ns is not None:
        return ended_ns
    return min(
        (event.wall_ns for event in log.of(event_kinds.RUN_ENDED) if event.wall_ns >= view.last_ns), default=None
    )


def watched_ns(view: AttemptView, log: EventLog) -> int | None:
    """When `watch` took the stacks of an attempt that had fallen silent (epoch nanoseconds); None if it did not.

    It does so when a run stands still, and never else: proof of a hang, although whoever would have said so has died.
    """
    times = [
        event.wall_ns for event in log.of(event_kinds.STACKS, attempt=view.attempt) if event.wall_ns > view.last_ns
    ]
    return max(times, default=None)


def stalled_before_death(view: AttemptView, log: EventLog, policy: StallPolicy) -> float | None:
    """Seconds of silence before the first process ended, or was looked at, if they were beyond the limit."""
    when_ns, seen_ns = death_ns(view, log), watched_ns(view, log)
    if when_ns is None:
        return None if seen_ns is None else (seen_ns - view.last_ns) / 1e9
    return stalled_s(view, when_ns, policy)


def stall_policy(manifest: Mapping[str, Any]) -> StallPolicy:
    """The stall limits that the run was configured with."""
    config = manifest.get("config")
    recovery = config.get("recovery") if isinstance(config, dict) else None
    floor_s = recovery.get("hang_floor_s") if isinstance(recovery, dict) else None
    if isinstance(floor_s, (int, float)) and not isinstance(floor_s, bool) and 0 < floor_s < 86400:
        return StallPolicy(floor_s=float(floor_s))
    return StallPolicy()
