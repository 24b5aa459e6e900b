"""Goodput account: assigns every second of a run to one category. The categories add up to the wall time.

    account = measure(store)
    account.seconds["training"], account.goodput_ratio      # mean over the ranks; share of the wall time
    account.by_rank[3]["straggler"]

| category | what |
|---|---|
| training | a rank's own forward, backward and optimizer, in steps that were kept |
| data | the rank waits for its input or prepares it |
| gaps | the rank's own work between phases: a batch made by hand, logging, a pause |
| host_late | a GPU waits for its host to enqueue more: launches, loading, a pause |
| communication | blocked in collectives while the last member's data travels: exposed communication |
| straggler | blocked in collectives until the last member came |
| bubble | without work between a pipeline's first forward and last backward |
| checkpoint, evaluation | training was stopped for them |
| recomputed | steps that were refused, or whose result a rollback or restart discarded |
| restart | from the end of an attempt (or its last progress, if it was killed) to the first step of the next |
| stopped | between the end of one launch of the run and the next (`--resume`) |
| hang | a silence longer than the run's limit, until the attempt was ended |
| startup, shutdown | before the first step, after the last one |
| device | a GPU without stamps while no communication was in flight: computing or idle |
| in_flight | communication in flight on a GPU without stamps: exposed, or hidden behind computing or a late host |
| unmeasured | time in steps for which no phase or gap was recorded |
| other | between steps |

Boundaries (start of the run, first step, last step, ...) divide the whole timeline of a rank, so the pieces add up to
the wall time whatever was recorded. `step_account` divides the steps. Clocks of other hosts are shifted so that the
first steps begin together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from analyzers.account.committed_steps import RankTimes, step_times
from analyzers.account.device.device_timings import DEVICE
from analyzers.account.device.trace_check import contradiction
from analyzers.account.long_run import Views, whole_views
from analyzers.account.run_bounds import BrokenEnd, broken_ends, clock_shifts, launch_breaks, run_bounds
from analyzers.account.step_account import divide
from analyzers.account.time_classes import COMPUTE_PHASES, GAPS
from analyzers.account.wait_split import WaitSplit, split_waits
from analyzers.finding import Finding
from analyzers.run.calls.snapshot import SNAPSHOT_EVENTS
from analyzers.run.policy import StallPolicy
from analyzers.run.records.event_log import EventLog
from analyzers.run.records.not_recorded import missing, not_recorded
from analyzers.run.records.standstills import standstills
from analyzers.source import Source, lacking

__all__ = ["CATEGORIES", "CONTRADICTED", "UNSPLIT", "Account", "analyze", "measure"]

CATEGORIES = {
    "training": "training",
    "data": "data",
    "gaps": "between phases",
    "host_late": "GPU waiting for its host",
    "communication": "exposed communication",
    "straggler": "waiting for stragglers",
    "bubble": "pipeline bubble",
    "checkpoint": "checkpoint stall",
    "evaluation": "evaluation",
    "recomputed": "discarded steps",
    "restart": "restart",
    "stopped": "between launches",
    "hang": "hang",
    "startup": "start-up",
    "shutdown": "shutdown",
    "device": "on the device, phase unknown",
    "in_flight": "in-flight communication",
    "unmeasured": "not measured",
    "other": "other",
}
"""Display names, in the order in which they are shown."""
UNSPLIT = {"communication": "communication or waiting for others"}
"""Display names where waits were not split."""
CONTRADICTED = "Exposed communication was not judged: a profiler trace contradicts it ({why})."
"""Shown with each figure of exposed communication if `Account.contradicted` is set."""
NEED_PHASES = ("training", "gaps", "communication", "straggler", "bubble")
"""Categories that need the phases and waits of steps."""
_NEEDED = ("step", "start_ns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Seconds by category: of each rank, and their mean. Each adds up to `wall_s`."""

    wall_s: float
    seconds: Mapping[str, float]
    by_rank: Mapping[int, Mapping[str, float]]
    num_kept: int
    num_discarded: int
    num_unconfirmed: int
    """Number of kept steps that a restart of an attached loop may have discarded."""
    basis: str
    """Records by which waits were split: collectives, steps (coarser), durations of calls; empty if they were not."""
    contradicted: str = ""
    """Why exposed communication is not judged: the profiler's traces show a different number. Empty if they agree."""
    has_unknown_idle: bool = False
    """True if the idle time of some pipeline was not measured: it is part of `communication`."""
    has_absent_ranks: bool = False
    """True if ranks have no records in some attempt: waits for them are part of `communication`."""

    @property
    def names(self) -> dict[str, str]:
        """Display names; `communication` has another one if it was not judged or if waits were not split."""
        if self.contradicted:
            return CATEGORIES | {"communication": "exposed communication (not judged)"}
        if self.is_split:
            return CATEGORIES
        return CATEGORIES | UNSPLIT

    @property
    def is_split(self) -> bool:
        """True if `communication` has only transfers: all waits were split."""
        return bool(self.basis) and not (self.has_unknown_idle or self.has_absent_ranks)

    @property
    def open_text(self) -> str:
        """One sentence on the steps that may have been kept or not; empty without any."""
        if not self.num_unconfirmed:
            return ""
        were = "step was" if self.num_unconfirmed == 1 else "steps were"
        before = "training before a restart" if self.num_unconfirmed < self.num_kept else "training"
        return f"Unknown whether {self.num_unconfirmed:,} {were} kept: {before} includes all of them."

    @property
    def goodput_ratio(self) -> float | None:
        """Training's share of the wall time; None if no phase of a step was recorded."""
        no_phases = self.seconds["unmeasured"] or self.seconds["device"]
        if not self.wall_s or (no_phases and not self.seconds["training"]):
            return None
        return self.seconds["training"] / self.wall_s

    @property
    def known_seconds(self) -> dict[str, float]:
        """Seconds by category, without those that need phases or waits that were not recorded."""
        left_out: tuple[str, ...] = NEED_PHASES if self.goodput_ratio is None else ()
        if self.seconds["device"]:  # device calls show how long ranks wait for each other, but no phases
            left_out = tuple(name for name in left_out if name != "straggler")
        if self.has_unknown_idle and not self.seconds["bubble"]:
            left_out += ("bubble",)
        if not self.basis and (self.has_unknown_idle or self.seconds["communication"]):
            left_out += ("straggler",)
        return {name: value for name, value in self.seconds.items() if name not in left_out}

    def to_json(self) -> dict[str, object]:
        """Plain values of all categories: 0 for a category without time, None for one that was not measured."""
        known = self.known_seconds
        return {
            "wall_s": round(self.wall_s, 3),
            "goodput_ratio": None if self.goodput_ratio is None else round(self.goodput_ratio, 4),
            "seconds": {name: round(value, 3) if name in known else None for name, value in self.seconds.items()},
            "by_rank": {
                str(rank): {name: round(value, 3) if name in known else None for name, value in of_rank.items()}
                for rank, of_rank in self.by_rank.items()
            },
            "steps_kept": self.num_kept,
            "steps_discarded": self.num_discarded,
            "steps_not_known": self.num_unconfirmed,
            "waits_split_by": self.basis or None,
            "communication_not_judged": self.contradicted or None,
        }


def analyze(source: Source) -> list[Finding]:
    """Return no finding, or the reason why there is no account."""
    lost = lacking(source, steps=_NEEDED, events=())
    if not lost:
        return []
    what = "There is no time account" if lost != ["events"] else "Start-up, restarts and the end are not known"
    return [Finding.insufficient("goodput", "goodput", f"{what}: {not_recorded(lost)}.", evidence=missing(lost))]


def measure(
    source: Source, policy: StallPolicy | None = None, now_ns: int | None = None, views: Views | None = None
) -> Account | None:
    """The account; None if no step was recorded. `now_ns`: epoch time while the run is alive, None afterwards."""
    views = views or whole_views(source)
    if lacking(source, steps=_NEEDED):
        return None
    log = EventLog.load(source, SNAPSHOT_EVENTS)
    standstill_ns = standstills(source, log)
    times = step_times(source, views, standstill_ns)
    shifts = clock_shifts(source, {key: spent.first_ns for key, spent in times.items()})
    begin_ns, end_ns = run_bounds(source, log, times, shifts, now_ns)
    ends = broken_ends(views.sampled, log, times, policy or StallPolicy(), now_ns, standstill_ns)
    split = split_waits(views.sampled)
    outside = _outside_steps(source, times)
    breaks = launch_breaks(log, times)
    attempts_of: dict[int, dict[int, RankTimes]] = {}
    for (attempt, rank), spent in times.items():
        attempts_of.setdefault(rank, {})[attempt] = spent
    by_rank: dict[int, dict[str, float]] = {}
    trained = {attempt for (attempt, _), spent in times.items() if spent.kept.num_steps}
    absent = {rank for attempt in trained for rank in split.absent.get(attempt, ())}
    for rank in sorted(attempts_of.keys() - absent or attempts_of):  # of the others a part of the time is unknown
        line = _Timeline(begin_ns, end_ns, shifts.get(rank, 0))
        _assign(line, attempts_of[rank], rank, ends, split, outside, breaks)
        by_rank[rank] = {name: line.spent[name] / 1e9 for name in CATEGORIES}
    newest_attempt, last_rank = max(times)
    of_last_rank = [spent for (_, rank), spent in times.items() if rank == last_rank]
    return Account(
        wall_s=(end_ns - begin_ns) / 1e9,
        seconds={name: float(np.mean([seconds[name] for seconds in by_rank.values()])) for name in CATEGORIES},
        by_rank=by_rank,
        num_kept=sum(spent.kept.num_steps for spent in of_last_rank),
        num_discarded=sum(spent.num_discarded for spent in of_last_rank),
        num_unconfirmed=sum(spent.num_unconfirmed for spent in of_last_rank),
        basis=split.basis,
        contradicted=contradiction(source, newest_attempt),
        has_unknown_idle=not times.keys().isdisjoint(split.idle_unknown),
        has_absent_ranks=bool(absent),
    )


class _Timeline:
    """A rank's timeline from the start to the end of the run, assigned to categories from left to right."""

    def __init__(self, begin_ns: int, end_ns: int, shift_ns: int) -> None:
        self.spent: dict[str, float] = dict.fromkeys(CATEGORIES, 0.0)
        self._at, self._end, self._shift = begin_ns, end_ns, shift_ns

    def until(self, time_ns: int, category: str) -> None:
        """Assign the time up to `time_ns` (the rank's clock) to the category."""
        self._add(time_ns + self._shift, {category: 1.0})

    def until_on_first_node(self, time_ns: int, category: str) -> None:
        """Assign the time up to `time_ns` (the first node's clock, which is the launcher's) to the category."""
        self._add(time_ns, {category: 1.0})

    def divide_until(self, time_ns: int, parts: Mapping[str, float]) -> None:
        """Divide the time up to `time_ns` (the rank's clock) in proportion to the parts."""
        self._add(time_ns + self._shift, parts)

    def rest(self, category: str) -> None:
        """Assign the remaining time to the category."""
        self._add(self._end, {category: 1.0})

    def _add(self, time_ns: int, parts: Mapping[str, float]) -> None:
        length = min(max(time_ns, self._at), self._end) - self._at
        total = sum(parts.values())
        for name, part in parts.items():
            self.spent[name] += length * part / total if total else 0.0
        if not total:
            self.spent["other"] += length
        self._at += length


@dataclass(slots=True)
class _Outside:
    """Checkpoints and evaluations of a rank that lie between or after its steps, nanoseconds."""

    between: dict[str, int] = field(default_factory=dict)
    after: list[tuple[int, int, str]] = field(default_factory=list)


def _assign(
    line: _Timeline,
    attempts: Mapping[int, RankTimes],
    rank: int,
    ends: Mapping[int, BrokenEnd],
    split: WaitSplit,
    outside: Mapping[tuple[int, int], _Outside],
    breaks: Mapping[int, tuple[int, int]],
) -> None:
    """Assign one rank's timeline, attempt by attempt."""
    last_attempt = max(attempts)
    for number, (attempt, times) in enumerate(sorted(attempts.items())):
        outside_of_rank = outside.get((attempt, rank), _Outside())
        if number and attempt in breaks:
            ended_ns, launched_ns = breaks[attempt]
            line.until_on_first_node(ended_ns, "restart")
            line.until_on_first_node(launched_ns, "stopped")
        line.until(times.first_ns, "restart" if number else "startup")
        line.divide_until(times.last_ns, _in_steps(times, split, (attempt, rank), outside_of_rank.between))
        after_end = "shutdown" if attempt == last_attempt else "restart"
        end = ends.get(attempt)
        if end is None:
            for start_ns, end_ns, kind in outside_of_rank.after:
                line.until(start_ns, after_end)
                line.until(end_ns, kind)
        elif times.open_ns is not None:  # a step was not finished; its time is lost, unless it still runs
            line.until(times.open_ns, "other")
            line.until(end.progress_ns, "training" if end.is_alive and not end.is_hung else "recomputed")
            line.until(end.end_ns, "hang" if end.is_hung else ("training" if end.is_alive else after_end))
        elif end.is_hung:  # the hang began between two steps
            line.until(end.end_ns, "hang")
    line.rest("shutdown")


def _in_steps(
    times: RankTimes, split: WaitSplit, attempt_rank: tuple[int, int], between: Mapping[str, int]
) -> dict[str, float]:
    """Nanoseconds by category from the start of the first step to the end of the last finished one."""
    steps = divide(times.kept, split, *attempt_rank)
    own = steps.own_ns
    is_split = steps.transfer_ns is not None or DEVICE in own
    parts: dict[str, float] = {
        "training": sum(own.get(phase, 0) for phase in COMPUTE_PHASES),
        "data": own.get("data", 0),
        "gaps": sum(own.get(gap, 0) for gap in GAPS),
        "communication": (steps.transfer_ns or 0) if is_split else steps.waiting_ns,
        "straggler": steps.waiting_ns if is_split else 0,
        "bubble": steps.idle_ns or 0,
        "checkpoint": own.get("checkpoint", 0),
        "evaluation": own.get("evaluate", 0),
        "recomputed": times.discarded_ns,
        "host_late": steps.host_late_ns,
        "device": own.get(DEVICE, 0),
        "in_flight": steps.in_flight_ns,
        "unmeasured": steps.not_measured_ns,
    }
    outside = max(0, times.last_ns - times.first_ns - steps.duration_ns - times.discarded_ns)
    for kind, taken in between.items():
        parts[kind] += min(taken, outside)
        outside -= min(taken, outside)
    return parts | {"other": outside}


def _outside_steps(source: Source, times: Mapping[tuple[int, int], RankTimes]) -> dict[tuple[int, int], _Outside]:
    """Spans of checkpoints and evaluations that began when no step ran."""
    if not source.has("spans"):
        return {}
    rows = source.rows(
        """
        SELECT p.attempt, p.rank, p.kind, p.start_ns, any_value(p.end_ns) FROM spans p
        LEFT JOIN steps s ON s.attempt = p.attempt AND s.rank = p.rank AND s.step = p.step
        WHERE p.kind IN ('checkpoint', 'evaluate') AND p.end_ns IS NOT NULL AND p.rank >= 0
        GROUP BY p.attempt, p.rank, p.kind, p.start_ns
        HAVING NOT coalesce(bool_or(p.start_ns >= s.start_ns
                                    AND (s.duration_ns IS NULL OR p.start_ns < s.start_ns + s.duration_ns)), false)
        ORDER BY p.start_ns
        """
    )
    found: dict[tuple[int, int], _Outside] = {}
    for attempt, rank, kind, start_ns, end_ns in rows:
        spent = times.get((attempt, rank))
        if spent is None or start_ns < spent.first_ns:
            continue  # this save or evaluation is part of the start-up
        category = "checkpoint" if kind == "checkpoint" else "evaluation"
        outside = found.setdefault((attempt, rank), _Outside())
        if start_ns >= spent.last_ns:
            outside.after.append((start_ns, end_ns, category))
        else:
            outside.between[category] = outside.between.get(category, 0) + end_ns - start_ns
    return found
