"""State of a run: one word, the reason, and the time of its newest record.

    state = run_state(store, stall_policy(run.manifest()), now_ns=time.time_ns(), is_watched=True)
    state.word, state.reason            # "stalled", "no record for 12 s, the limit is 5 s"
    state.is_live                       # True if more records may come

The words of a live run are starting, training, stalled and recovering. The words of an ended run are finished,
preempted, interrupted, failed, given up and fenced (as recorded by the launcher), and died (no process recorded why the
run stopped). A run without any record is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analyzers.run.calls.snapshot import SNAPSHOT_EVENTS, AttemptView, attempts, take_snapshot
from analyzers.run.ends.run_ends import run_ends
from analyzers.run.live.stall_limits import limit_s, stalled_s
from analyzers.run.policy import StallPolicy
from analyzers.run.records.event_log import Event, EventLog
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["LIVE_WORDS", "RunState", "run_state"]

LIVE_WORDS = ("starting", "training", "stalled", "recovering")
_EVENTS = (
    *SNAPSHOT_EVENTS,
    event_kinds.ROLLBACK,
    event_kinds.PREEMPTED,
    event_kinds.RUN_STOPPED,
)
NO_WATCH = "no watch process; read from its tapes"
_ENDS = {"given_up": "given up", "launcher_lost": "died"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """`last_ns`: the newest record of any process, epoch nanoseconds by the writer's clock; None without records.
    `as_of_ns`: the moment for which the state is judged (epoch nanoseconds)."""

    word: str
    reason: str = ""
    attempt: int | None = None
    step: int | None = None
    last_ns: int | None = None
    as_of_ns: int = 0

    @property
    def is_live(self) -> bool:
        """True if the run may write further records."""
        return self.word in LIVE_WORDS


def run_state(source: Source, policy: StallPolicy, *, now_ns: int, is_watched: bool, is_copy: bool = False) -> RunState:
    """The state at `now_ns` (epoch nanoseconds).

    `is_watched`: a `watch` process follows the run, or a mirror follows its copy. `is_copy`: the records are a copy of
    those that the run's nodes publish.
    """
    log = EventLog.load(source, _EVENTS)
    known = attempts(source)
    last_event_ns = _last_event_ns(source)
    if not known:
        if ends := run_ends(log, last_ns=last_event_ns or 0):
            word, reason = _end_word(ends[-1]), _why_ended(ends[-1], log) or "no rank wrote a record"
        else:
            word, reason = "starting" if is_watched else "empty", "no rank has written a record yet"
        return RunState(word=word, reason=reason, last_ns=last_event_ns, as_of_ns=now_ns)
    view = take_snapshot(source, known[-1], log)
    last_ns = max(view.last_ns, last_event_ns or 0)
    word, reason = _word_and_reason(view, log, policy, now_ns=now_ns, is_watched=is_watched, last_ns=last_ns)
    if is_copy and reason == NO_WATCH:
        reason = "a copy of its published records, no longer updated"
    return RunState(word=word, reason=reason, attempt=known[-1], step=view.step, last_ns=last_ns, as_of_ns=now_ns)


def _word_and_reason(
    view: AttemptView, log: EventLog, policy: StallPolicy, *, now_ns: int, is_watched: bool, last_ns: int
) -> tuple[str, str]:
    if ends := run_ends(log, last_ns=view.last_ns):
        return _end_word(ends[-1]), _why_ended(ends[-1], log) or _lost(view, log)
    silent_s = (now_ns - last_ns) / 1e9
    rollback = _rolled_back(view, log.of(event_kinds.ROLLBACK, attempt=view.attempt))
    lost = _lost(view, log)
    if not is_watched:
        if silent_s > max(policy.unwatched_s, limit_s(view, policy)):
            where = "before the first step" if view.step is None else f"at step {view.step}"
            return "died", lost or f"its records end {where} without a reason"
        return "training", rollback or NO_WATCH
    if lost:
        return "recovering", lost
    if view.attempt > 0 and not _has_finished_step(view):
        return "recovering", f"attempt {view.attempt} is starting"
    if not _has_finished_step(view):
        return "starting", "the first step is still running"
    silence_s = stalled_s(view, now_ns, policy)
    if silence_s is not None:
        return "stalled", f"no record for {silence_s:.0f} s, the limit is {limit_s(view, policy):.0f} s"
    unrecorded_s = (now_ns - view.last_ns) / 1e9
    if unrecorded_s > limit_s(view, policy):
        return "training", f"no record for {unrecorded_s:.0f} s, while its ranks compute or read files"
    return "training", rollback


def _end_word(end: Event) -> str:
    reason = end.text("reason") or "ended"
    return _ENDS.get(reason, reason)


def _why_ended(ended: Event, log: EventLog) -> str:
    if stopped := log.of(event_kinds.RUN_STOPPED):
        return stopped[-1].text("reason")
    if ended.text("reason") == "preempted" and log.of(event_kinds.PREEMPTED):
        step = log.of(event_kinds.PREEMPTED)[-1].integer("checkpoint_step")
        return f"stopped by SIGTERM, checkpoint at step {step}" if step >= 0 else "stopped by SIGTERM"
    if ended.text("reason") == "launcher_lost":
        return "its launcher was killed or crashed"
    return ""


def _lost(view: AttemptView, log: EventLog) -> str:
    """The first rank of the newest attempt that did not end cleanly; it is not necessarily the cause."""
    exits = [
        e for e in log.of(event_kinds.RANK_EXIT, attempt=view.attempt) if e.text("signal") or e.integer("exit_code", 0)
    ]
    if not exits:
        return ""
    first = exits[0]
    how = first.text("signal") or f"exit code {first.integer('exit_code', 0)}"
    rank = first.integer("exit_rank")
    others = len({event.integer("exit_rank") for event in exits} - {rank})
    return f"rank {rank} ended first of {others + 1} ranks: {how}" if others else f"rank {rank} ended: {how}"


def _has_finished_step(view: AttemptView) -> bool:
    return any(rank.finished_steps for rank in view.ranks.values())


def _rolled_back(view: AttemptView, rollbacks: Sequence[Event]) -> str:
    if not rollbacks or view.step is None:
        return ""
    last = rollbacks[-1]
    begun = last.integer("from_step")
    why = last.text("reason")
    repeated = f"rolled back, repeating steps {last.integer('to_step') + 1} to {begun}"
    return "" if view.step > begun else f"{repeated}: {why}" if why else repeated


def _last_event_ns(source: Source) -> int | None:
    if not source.has("events"):
        return None
    ((newest_ns,),) = source.rows("SELECT max(wall_ns) FROM events")
    return None if newest_ns is None else int(newest_ns)
