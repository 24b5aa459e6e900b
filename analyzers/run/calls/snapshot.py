"""Snapshot of an attempt: step, open spans and calls in flight of each rank when its records end.

    view = take_snapshot(source, attempt=0, log=EventLog.load(source, SNAPSHOT_EVENTS))
    view.ranks[3].calls           # collectives that rank 3 had begun but not finished
    view.last_seq[("dp[0,1]", 3)] # number of the last collective that rank 3 entered in that group

The analyzers `hangs` and `deaths` judge it. Only the newest steps are read, back to the oldest call that a device has
not finished (a host may run many steps ahead of its device), so its cost does not grow with the run. If a process of
the attempt has ended or a hang was reported, the snapshot shows the moment before: later records of other ranks (failed
calls, errors) are consequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from analyzers.run.calls.device_calls import oldest_open_step
from analyzers.run.calls.recorded_calls import Call, CallSite, call_order, differing_calls, recorded_calls
from analyzers.run.calls.step_ends import NEVER_NS, ends_of_steps
from analyzers.run.records.elsewhere import ranks_elsewhere
from analyzers.run.records.event_log import EventLog
from analyzers.run.records.newest_steps import NEWEST_STEPS
from analyzers.run.records.standstills import last_standstill
from analyzers.source import Source
from probes.step_clock import PHASES
from probes.tape import event_kinds

__all__ = ["SNAPSHOT_EVENTS", "AttemptView", "RankView", "attempts", "first_end_ns", "take_snapshot"]

_WORK = ("startup_work", event_kinds.SILENT_WORK)  # the first name was used by earlier versions
SNAPSHOT_EVENTS = (
    event_kinds.RANK_STATE,
    event_kinds.RANK_EXIT,
    event_kinds.RANK_CLOSED,
    event_kinds.EXCEPTION,
    event_kinds.THREAD_EXCEPTION,
    event_kinds.RUN_ENDED,
    event_kinds.CULPRIT_KILLED,
    *_WORK,
    event_kinds.STACKS,
    event_kinds.FINDING,
    event_kinds.ATTEMPT_STARTED,
    event_kinds.RANK_STOPPED,
    event_kinds.STOP_REQUESTED,
    event_kinds.EXCLUDED,
    event_kinds.LAUNCHER_LOST,
    event_kinds.NODE_SILENT,
    event_kinds.NODE_HEARD,
    event_kinds.PREEMPTED,
    event_kinds.RUN_STARTED,
    event_kinds.WATCH_STARTED,
    event_kinds.WATCH_STOPPED,
)
ORDER_STEPS = 5
"""Number of earlier steps from which the order of a group's collectives is read."""
MAX_NUMBERS = 256
"""Maximum collectives in flight that are compared over all ranks, including ended calls."""
SKEW_NS = 60 * 10**9
"""If there are records this long after the first end (ns), the clocks of the nodes disagree, and no record is dropped.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank. `last_ns` is the time of its newest record; `phases` its open spans, outermost first."""

    rank: int
    last_ns: int = 0
    step: int | None = None
    step_is_open: bool = False
    finished_steps: int = 0
    """Finished steps of the attempt, or of its newest minutes if it is long."""
    phases: tuple[str, ...] = ()
    last_phase: str = ""
    """Phase of the newest finished span of the step."""
    calls: tuple[Call, ...] = ()
    """Oldest call in flight of each group or peer, in order of issue."""
    enqueued: tuple[Call, ...] = ()
    """Oldest call of each group or peer that the host has enqueued but the device has not started."""
    num_in_flight: int = 0
    unwaited: tuple[Call, ...] = ()
    """Open calls with a later completed one in the same group, and sends that have arrived: most likely not waited
    for."""
    closed: bool = False
    """True if the rank ended cleanly and closed its tapes."""
    state: str = "running"
    """State of the process when `watch` last saw it: running, stopped, dead."""
    os_state: str = ""
    """State letter of the process in /proc, such as `T`, when `watch` last saw it; empty if unknown."""
    worked_ns: int = 0
    """Time at which `watch` last saw its process at work while it recorded nothing; 0: never."""
    is_at_work: bool = False
    """False if `watch` has since seen it idle."""
    has_accelerator: bool = False
    """True if the rank trains on an accelerator."""
    holds_gil: bool = False
    """True if, after the last record, `watch` saw the process asleep in C while it held the GIL."""

    def may_have_left(self, call: Call) -> bool:
        """Return True if the host has left the phase in which it began a call. The call then stays open only until the
        host waits for its handle."""
        return not call.on_device and call.phase not in ("", *self.phases)

    @property
    def doing(self) -> str:
        """Activity outside of collectives, in a few words."""
        if self.phases:
            return f"in {self.phases[-1]}"
        # The rank is between two steps, or its process has ended and has left no span of its step open.
        return f"in user code after {self.last_phase}" if self.last_phase in PHASES else "in user code"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptView:
    """All ranks of an attempt by number, with their groups and the usual duration of a step."""

    attempt: int
    ranks: Mapping[int, RankView]
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    last_seq: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """Newest number of a collective that a rank entered, by (group, rank)."""
    may_have_entered: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """Number up to which missing calls of a rank prove nothing, by (group, rank), because records of its calls were
    lost.
    """
    last_p2p: Mapping[tuple[int, str, int], int] = field(default_factory=dict)
    """Newest number of a p2p call, by (rank, send or recv, peer)."""
    queued: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """Newest number of an enqueued collective by (group, rank), for devices that are behind their hosts."""
    queued_p2p: Mapping[tuple[int, str, int], int] = field(default_factory=dict)
    """Newest number of an enqueued p2p call by (rank, send or recv, peer)."""
    next_calls: Mapping[tuple[str, CallSite], frozenset[CallSite]] = field(default_factory=dict)
    """{(group, call): collectives that followed it in this group in the newest steps}."""
    differing: Mapping[tuple[str, int], tuple[Call, ...]] = field(default_factory=dict)
    """{(group, number): calls of all ranks, ended or not}, for collectives in flight in which the ranks' calls differ.
    """
    newest_calls: Mapping[str, CallSite] = field(default_factory=dict)
    """Newest collective of each group that the group's first member has finished."""
    median_step_ns: int = 0
    longest_step_ns: int = 0
    world_size: int = 0
    elsewhere: frozenset[int] = frozenset()
    """Ranks in an unknown state: on other nodes without records here, or with lost names of calls."""
    reported_stall_ns: int | None = None
    """Time at which `watch` reported the hang in which the attempt ended; None if it did not end in a hang."""

    @property
    def last_ns(self) -> int:
        """Time of the newest record of any rank."""
        return max((view.last_ns for view in self.ranks.values()), default=0)

    @property
    def step(self) -> int | None:
        """The newest step that any rank had begun."""
        return max((view.step for view in self.ranks.values() if view.step is not None), default=None)


def attempts(source: Source) -> list[int]:
    """Numbers of the attempts that left any record, in order."""
    found: set[int] = set()
    for table in ("ranks", "steps"):
        if source.has(table):
            found |= {row[0] for row in source.rows(f"SELECT DISTINCT attempt FROM {table} WHERE rank >= 0")}
    return sorted(found)


def take_snapshot(source: Source, attempt: int, log: EventLog) -> AttemptView:
    """Read the end of an attempt. Missing tables leave their part empty."""
    identities = _identities(source, attempt)
    views = {
        rank: RankView(rank=rank, last_ns=wall_ns, has_accelerator=device not in ("", "cpu"))
        for rank, (wall_ns, _, device) in identities.items()
    }
    standstill = last_standstill(source, attempt, log)
    reported_ns = standstill.reported_ns if standstill else None
    cut_ns = min(_cut_ns(source, attempt, log), reported_ns or NEVER_NS)
    steps_until_ns = min(cut_ns, standstill.steps_until_ns) if standstill else cut_ns
    median_ns, longest_ns = _steps(source, attempt, views, steps_until_ns)
    since_step = _read_spans(source, attempt, views, cut_ns)
    calls = recorded_calls(source, attempt, since_step, cut_ns)
    for rank, last_ns in calls.last_ns.items():
        view = views.get(rank, RankView(rank=rank))
        views[rank] = replace(view, last_ns=max(view.last_ns, last_ns))
    for rank, found in calls.in_flight.items():
        in_order = tuple(sorted(found.calls, key=lambda call: call.issue_ns))
        views[rank] = replace(
            views[rank],
            calls=in_order,
            enqueued=tuple(found.enqueued),
            unwaited=tuple(found.unwaited),
            num_in_flight=found.num_in_flight,
        )
    in_flight = {(c.group, c.seq) for view in views.values() for c in (*view.calls, *view.unwaited) if not c.is_p2p}
    numbers = sorted(in_flight)[:MAX_NUMBERS]
    before = None if since_step is None else since_step - ORDER_STEPS
    next_calls, newest_calls = call_order(source, attempt, before, cut_ns)
    _process_states(log, attempt, views, cut_ns, closed_until_ns=reported_ns or NEVER_NS)
    world_size = max([len(views), *(size for _, size, _ in identities.values())])
    last_ns = max((view.last_ns for view in views.values()), default=0)
    return AttemptView(
        attempt=attempt,
        ranks=views,
        members=_members(source, attempt, calls.last_seq),
        last_seq=calls.last_seq,
        last_p2p=calls.last_p2p,
        queued=calls.queued,
        queued_p2p=calls.queued_p2p,
        next_calls=next_calls,
        differing=differing_calls(source, attempt, since_step, cut_ns, numbers),
        newest_calls=newest_calls,
        median_step_ns=median_ns,
        longest_step_ns=longest_ns,
        world_size=world_size,
        elsewhere=calls.unnamed
        | (ranks_elsewhere(source, log, attempt=attempt, world_size=world_size, last_ns=last_ns) - views.keys()),
        reported_stall_ns=reported_ns,
    )


def _read_spans(source: Source, attempt: int, views: dict[int, RankView], cut_ns: int) -> int | None:
    """Read the spans into `views`; return the first step from which calls are read, or None without recorded steps."""
    since_step = min((view.step for view in views.values() if view.step is not None), default=0) - 1
    _spans(source, attempt, views, since_step, cut_ns)
    if not source.has("steps"):
        return None
    return min(since_step, oldest_open_step(source, attempt, cut_ns) or since_step)


def first_end_ns(log: EventLog, attempt: int) -> int | None:
    """Time at which the first process of an attempt ended (epoch nanoseconds); None if none is recorded."""
    closed = {event.rank for event in log.of(event_kinds.RANK_CLOSED, attempt=attempt)}
    times = [
        e.wall_ns for kind in (event_kinds.CULPRIT_KILLED, event_kinds.EXCEPTION) for e in log.of(kind, attempt=attempt)
    ]
    times += [e.wall_ns for e in log.of(event_kinds.RANK_EXIT, attempt=attempt) if e.integer("exit_code", 1) != 0]
    times += [
        event.wall_ns
        for event in log.of(event_kinds.RANK_STATE, attempt=attempt)
        if event.text("state") == "dead" and event.integer("state_rank") not in closed
    ]
    return min(times, default=None)


def _cut_ns(source: Source, attempt: int, log: EventLog) -> int:
    """Time after which records are ignored: the first end of a process, or never if the clocks disagree."""
    cut_ns = first_end_ns(log, attempt)
    if cut_ns is None or not source.has("steps"):
        return NEVER_NS
    ((last_ns,),) = source.rows(
        "SELECT max(start_ns + coalesce(duration_ns, 0)) FROM steps WHERE attempt = ?", [attempt]
    )
    return cut_ns if last_ns is None or last_ns <= cut_ns + SKEW_NS else NEVER_NS


def _identities(source: Source, attempt: int) -> dict[int, tuple[int, int, str]]:
    if not source.has("ranks"):
        return {}
    sql = """
        SELECT rank, max(wall_ns), max(world_size), max(device) FROM ranks WHERE attempt = ? AND rank >= 0 GROUP BY rank
    """
    return {rank: (ns or 0, size or 0, device or "") for rank, ns, size, device in source.rows(sql, [attempt])}


def _steps(source: Source, attempt: int, views: dict[int, RankView], cut_ns: int) -> tuple[int, int]:
    if not source.has("steps"):
        return 0, 0
    rows = ends_of_steps(source, attempt, views.keys(), cut_ns)
    for rank, step, is_open, finished, last_ns in rows:
        view = views.get(rank, RankView(rank=rank))
        views[rank] = replace(
            view,
            step=step,
            step_is_open=bool(is_open),
            finished_steps=finished,
            last_ns=max(view.last_ns, last_ns or 0),
        )
    newest = max((row[1] for row in rows if row[1] is not None), default=0)
    ((median_ns, longest_ns),) = source.rows(
        """
        SELECT median(duration_ns), max(duration_ns - coalesce(checkpoint_ns, 0) - coalesce(evaluate_ns, 0))
        FROM steps WHERE attempt = ? AND step > ? AND start_ns + duration_ns <= ?
        """,
        [attempt, newest - NEWEST_STEPS, cut_ns],
    )
    return int(median_ns or 0), int(longest_ns or 0)


def _spans(source: Source, attempt: int, views: dict[int, RankView], since_step: int, cut_ns: int) -> None:
    if not source.has("spans"):
        return
    rows = source.rows(
        """
        SELECT rank, max(CASE WHEN end_ns <= ? THEN end_ns ELSE start_ns END),
               coalesce(list(kind ORDER BY start_ns) FILTER (end_ns IS NULL OR end_ns > ?), []),
               max(step) FILTER (end_ns IS NULL OR end_ns > ?),
               arg_max({'kind': kind, 'step': step}, end_ns) FILTER (end_ns <= ?)
        FROM spans WHERE attempt = ? AND step >= ? AND start_ns <= ? GROUP BY rank
        """,
        [cut_ns, cut_ns, cut_ns, cut_ns, attempt, since_step, cut_ns],
    )
    for rank, last_ns, kinds, step, ended in rows:
        view = views.get(rank, RankView(rank=rank))
        phases = tuple(str(kind) for kind in kinds if kind)
        last_phase = str(ended["kind"]) if ended and ended["step"] == view.step else ""
        view = replace(view, last_ns=max(view.last_ns, last_ns or 0), phases=phases, last_phase=last_phase)
        if step is not None and view.step is not None and step > view.step:
            # The span belongs to a step that has no record yet: a step begins with its first fetch of data, but its
            # record is written only after the fetch.
            view = replace(view, step=step, step_is_open=True)
        views[rank] = view


def _members(source: Source, attempt: int, last_seq: Mapping[tuple[str, int], int]) -> dict[str, tuple[int, ...]]:
    members: dict[str, set[int]] = {}
    for group, rank in last_seq:
        members.setdefault(group, set()).add(rank)
    if source.has("process_groups"):
        # All ranks that list a group under this name list the same members. So parse one list instead of thousands.
        sql = "SELECT process_group, any_value(members) FROM process_groups WHERE attempt = ? GROUP BY process_group"
        for group, listed in source.rows(sql, [attempt]):
            members.setdefault(group or "", set()).update(int(rank) for rank in listed or ())
    return {group: tuple(sorted(ranks)) for group, ranks in members.items()}


def _process_states(log: EventLog, attempt: int, views: dict[int, RankView], cut_ns: int, closed_until_ns: int) -> None:
    for event in log.of(event_kinds.RANK_STATE, attempt=attempt):
        rank = event.integer("state_rank")
        if rank in views and event.wall_ns <= cut_ns:
            views[rank] = replace(views[rank], state=event.text("state", "running"), os_state=event.text("os_state"))
    work = (event for kind in _WORK for event in log.of(kind, attempt=attempt) if event.wall_ns <= cut_ns)
    for event in work:
        for field_name in ("ranks", "idle_ranks"):
            for rank in views.keys() & event.integers(field_name):
                at_work = field_name == "ranks"
                views[rank] = replace(views[rank], worked_ns=event.wall_ns, is_at_work=at_work)
    for event in log.of(event_kinds.STACKS, attempt=attempt):
        for rank in event.integers("gil_ranks"):
            if rank in views and event.wall_ns > views[rank].last_ns:
                views[rank] = replace(views[rank], holds_gil=True)
    for event in log.of(event_kinds.RANK_CLOSED, attempt=attempt):
        if event.rank in views and event.wall_ns <= closed_until_ns:
            views[event.rank] = replace(views[event.rank], closed=True)
