"""Findings on a live run, which `watch` reports once a second.

    state = LiveState(stall=stall_policy(run.manifest()))
    for finding in live_findings(store, state, now_ns): ...      # new, or materially changed since it was reported

The analyses are those of the post-mortem, over the newest attempt and its last few hundred steps. `LiveState` remembers
what was reported. A finding is reported once, again if its status, cause or ranks change or it becomes more severe or
twice as large, and a last time with status `ok` when it is over. Stragglers are checked less often than hangs.

`standstill_findings` returns hangs and lost ranks, `plugin_findings` those of plug-ins, `record_findings` all others.
`watch` calls the three in separate threads with separate sources, because the first must not wait for a store, and none
may wait for a plug-in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from analyzers.analysis import Analysis, our_analyses, plugin_analyses
from analyzers.deaths import analyze as rank_lost
from analyzers.finding import SEVERITIES, Finding
from analyzers.hangs import analyze as hang
from analyzers.hangs.device_evidence import with_devices
from analyzers.hangs.stacks import StacksAtHang, roles_of
from analyzers.policy import SHARED
from analyzers.run.calls.snapshot import SNAPSHOT_EVENTS, AttemptView, attempts, take_snapshot
from analyzers.run.ends.restarts import restart_sentence
from analyzers.run.findings.open_findings import may_last
from analyzers.run.live.digest import Digest, joined, joined_log
from analyzers.run.live.stall_limits import killed_by_watch
from analyzers.run.policy import StallPolicy
from analyzers.run.records.event_log import EventLog
from analyzers.scope import Scope
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = [
    "LivePolicy", "LiveState", "changed", "live_findings", "plugin_findings", "record_findings", "remembered",
    "standstill_findings", "window_start",
]  # fmt: skip

_Judge = Callable[[], list[Finding]]


MAX_FAILURES = 3
"""Maximum reported reasons of one failing analysis: they may differ in nothing but a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePolicy:
    """Window and frequency of live analyses."""

    window_steps: int = 300
    """Number of newest steps that are judged; the straggler analysis needs up to 100 of them."""
    periodic_ticks: int = 5
    """Calls between two runs of the periodic analyses, which need several new steps and cost the most."""
    periodic_ranks_per_tick: int = 256
    """Ranks from which periodic analyses run proportionally less often."""


@dataclass(slots=True, kw_only=True)
class LiveState:
    """The findings reported so far. `errors` counts analyses that failed, by their first kind."""

    policy: LivePolicy = field(default_factory=LivePolicy)
    stall: StallPolicy = field(default_factory=StallPolicy)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    reported: dict[tuple[object, ...], Finding] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    stacks_dir: Path | None = None
    """Folder of the stacks that `watch` has the ranks write in a hang."""
    digests: Sequence[Digest] = ()
    """Newest digests of the other nodes, if this node leads."""
    clock_offsets_ns: Mapping[int, int] = field(default_factory=dict)
    """How far the clocks of the other nodes are ahead of this one's (ns)."""
    sees_part: bool = False
    """True if ranks may run on other nodes without records or digests here."""
    is_stopping: bool = False
    """True while the run is being stopped: no finding is reported as over."""
    ticks: int = 0
    attempt: int | None = None
    """All attempts before this one are completely reported."""
    newest: int | None = None
    """The newest attempt at the last call."""
    judged: tuple[int, int] = (-1, 0)
    """The newest attempt and its newest step at the last call."""
    plugin_ticks: int = 0
    plugins_judged: tuple[int, int] = (-1, 0)
    """Like `judged`, for the plug-ins' last call."""
    failures: dict[str, list[str]] = field(default_factory=dict)
    """{analysis or plug-in: reasons why it failed}, without repeats."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards `reported`."""


def live_findings(source: Source, state: LiveState, now_ns: int) -> list[Finding]:
    """New and changed findings at `now_ns` (epoch nanoseconds)."""
    return [
        *standstill_findings(source, state, now_ns),
        *record_findings(source, state, now_ns),
        *plugin_findings(source, state, now_ns),
    ]


def standstill_findings(source: Source, state: LiveState, now_ns: int) -> list[Finding]:
    """New and changed findings on a hang or lost ranks of the newest attempt; they only need its newest records."""
    known = attempts(source)
    if not known:
        return []
    attempt = known[-1]
    due: dict[tuple[str, ...], _Judge] = {("hang", "rank_lost"): lambda: _standstill(source, attempt, state, now_ns)}
    return _judged(state, due, attempt=attempt)[0]


def record_findings(source: Source, state: LiveState, now_ns: int, *, num_ticks: int = 1) -> list[Finding]:
    """New and changed findings of all other kinds, and those on how earlier attempts ended.

    `num_ticks`: ticks since the last call, if calls are less frequent than ticks.
    """
    ticks, state.ticks = state.ticks, state.ticks + num_ticks
    known = attempts(source)
    if not known:
        return []
    attempt = known[-1]
    since_step, state.judged = _since_step(source, attempt, state.judged, state.policy)
    scope = Scope(attempt=attempt, since_step=since_step, now_ns=now_ns, manifest=state.manifest)
    due: dict[tuple[str, ...], _Judge] = {}
    # A restart may be quicker than a tick: the end of an attempt must still be reported once the next one exists.
    ended = [] if state.attempt is None else [one for one in known if state.attempt <= one < attempt]
    # Judge an ended attempt only at the next call. Records written while this call was reading are partly missing, and
    # without its last calls a rank that aborted in a mismatch would look like any lost rank.
    is_new, state.newest = attempt != state.newest, attempt
    if ended and not is_new:
        due["ended",] = lambda: [
            finding
            for one in ended
            for finding in _ended(source, one, known, state)
            if finding.identity not in state.reported
        ]
    due |= _due(our_analyses(), source, scope, state.policy, ticks, state.ticks)
    news, judged = _judged(state, due, attempt=attempt)
    if "ended" in judged or not ended:
        state.attempt = attempt
    return news


def plugin_findings(source: Source, state: LiveState, now_ns: int, *, num_ticks: int = 1) -> list[Finding]:
    """New and changed findings of plug-ins. A call may take the time limit of `store.plugins` for each of them."""
    ticks, state.plugin_ticks = state.plugin_ticks, state.plugin_ticks + num_ticks
    if not (known := attempts(source)):
        return []
    attempt = known[-1]
    since_step, state.plugins_judged = _since_step(source, attempt, state.plugins_judged, state.policy)
    scope = Scope(attempt=attempt, since_step=since_step, now_ns=now_ns, manifest=state.manifest)
    due = _due(plugin_analyses(), source, scope, state.policy, ticks, state.plugin_ticks)
    return _judged(state, due, attempt=attempt)[0]


def _due(
    analyses: Iterable[Analysis], source: Source, scope: Scope, policy: LivePolicy, before: int, ticks: int
) -> dict[tuple[str, ...], _Judge]:
    """The analyses that are due at tick `ticks`; `before` is the tick of the last call."""
    assert scope.attempt is not None
    period = _period(source, scope.attempt, policy)
    is_due = ticks // period > before // period
    due: dict[tuple[str, ...], _Judge] = {}
    for analysis in analyses:
        if analysis.live == "each_tick" or (analysis.live == "periodic" and is_due):
            others = due.get(analysis.kinds)
            one = _judge(analysis, source, scope)
            due[analysis.kinds] = one if others is None else _both(others, one)
    return due


def _both(first: _Judge, second: _Judge) -> _Judge:
    return lambda: [*first(), *second()]


def _judged(state: LiveState, due: Mapping[tuple[str, ...], _Judge], *, attempt: int) -> tuple[list[Finding], set[str]]:
    """Run the due analyses; returns findings worth reporting, and the kinds whose analysis did not fail."""
    found: list[Finding] = []
    judged: set[str] = set()
    for kinds, judge in due.items():
        try:
            of_analysis = judge()
        except Exception as error:  # a failing analysis must not prevent the others
            _note_failure(state, kinds[0], f"{type(error).__name__}: {error}")
            continue
        failed = [one for one in of_analysis if one.status == "insufficient_data" and "plugin" in one.evidence]
        for one in failed:
            _note_failure(state, f"plug-in {one.evidence['plugin']}", str(one.evidence.get("error")))
        if not failed:
            judged.update(kinds)
        found += of_analysis
    with state.lock:
        return _news(state, [f for f in found if f.status in ("fired", "suspect")], judged, attempt), judged


def _note_failure(state: LiveState, name: str, reason: str) -> None:
    with state.lock:
        state.errors[name] = state.errors.get(name, 0) + 1
        known = state.failures.setdefault(name, [])
        if reason not in known and len(known) < MAX_FAILURES:
            known.append(reason)


def remembered(events: Iterable[Mapping[str, Any]]) -> dict[tuple[object, ...], Finding]:
    """Findings that an earlier watch reported, from its events; its successor starts with them as `reported`.

    Hangs are left out: a report of a hang triggers an action, and the earlier watch may have been killed before it.
    """
    reported = (Finding.of_event(event) for event in events if event.get("kind") == event_kinds.FINDING)
    return {finding.identity: finding for finding in reported if finding is not None and finding.kind != "hang"}


def _judge(analysis: Analysis, source: Source, scope: Scope) -> Callable[[], list[Finding]]:
    return lambda: analysis.run(source, scope)


def window_start(source: Source, attempt: int, window_steps: int) -> int:
    """First of the newest `window_steps` steps of an attempt."""
    return max(0, _newest_step(source, attempt) - window_steps)


def _since_step(
    source: Source, attempt: int, judged: tuple[int, int], policy: LivePolicy
) -> tuple[int, tuple[int, int]]:
    """Return the first step of the window, and the attempt and step that are judged now. The window reaches back from
    the newest step of the last call, so that each step is judged with equally many steps before it, however many steps
    there are between two calls.
    """
    newest = _newest_step(source, attempt)
    before = judged[1] if judged[0] == attempt else newest
    return max(0, min(before, newest) - policy.window_steps), (attempt, newest)


def _newest_step(source: Source, attempt: int) -> int:
    ((newest,),) = source.rows("SELECT max(step) FROM steps WHERE attempt = ?", [attempt])
    return int(newest or 0)


def _standstill(source: Source, attempt: int, state: LiveState, now_ns: int) -> list[Finding]:
    log, policy = EventLog.load(source, SNAPSHOT_EVENTS), state.stall
    view = take_snapshot(source, attempt, log)
    if state.digests:
        view = joined(view, state.digests, state.clock_offsets_ns)
        log = joined_log(log, state.digests, state.clock_offsets_ns)
    view = _with_elsewhere(view, state)
    lost = rank_lost.deaths_of_attempt(view, log, policy, is_last=True, now_ns=now_ns)
    stacks = _stacks(source, view, log, state)
    stuck = hang.hang_of_attempt(view, log, policy, is_last=True, now_ns=now_ns, stacks=stacks)
    return [*lost, *([with_devices(source, stuck, view.last_ns)] if stuck else [])]


def _stacks(source: Source, view: AttemptView, log: EventLog, state: LiveState) -> StacksAtHang | None:
    """Stacks that were taken during this standstill, if it still lasts. Stacks of an earlier standstill are no
    evidence.
    """
    taken_ns = [event.wall_ns for event in log.of(event_kinds.STACKS, attempt=view.attempt)]
    if state.stacks_dir is None or max(taken_ns, default=0) <= view.last_ns or killed_by_watch(log, view.attempt):
        return None
    return StacksAtHang(state.stacks_dir, roles_of(source, view.attempt))


def _ended(source: Source, attempt: int, known: Sequence[int], state: LiveState) -> list[Finding]:
    """Findings on the end of an earlier attempt, as in the post-mortem."""
    log, policy = EventLog.load(source, SNAPSHOT_EVENTS), state.stall
    view = _with_elsewhere(take_snapshot(source, attempt, log), state)
    again = restart_sentence(source, attempt, known)
    stuck = hang.hang_of_attempt(view, log, policy, is_last=False, again=again)
    lost = rank_lost.deaths_of_attempt(view, log, policy, is_last=False, again=again)
    return [*lost, *([with_devices(source, stuck, view.last_ns)] if stuck else [])]


def _with_elsewhere(view: AttemptView, state: LiveState) -> AttemptView:
    if not state.sees_part:
        return view  # all ranks record here, so one without records has never started
    return replace(view, elsewhere=frozenset(range(view.world_size)) - view.ranks.keys())


def _period(source: Source, attempt: int, policy: LivePolicy) -> int:
    ((num_ranks,),) = source.rows("SELECT count(DISTINCT rank) FROM ranks WHERE attempt = ?", [attempt])
    return policy.periodic_ticks * max(1, int(num_ranks) // policy.periodic_ranks_per_tick)


# ---- what is worth reporting ----


def _news(state: LiveState, found: list[Finding], judged: set[str], attempt: int) -> list[Finding]:
    news: list[Finding] = []
    current = {finding.identity: finding for finding in found}
    for key, finding in current.items():
        before = state.reported.get(key)
        if before is None or before.status == "ok" or changed(before, finding):
            state.reported[key] = finding
            news.append(finding)
    if state.is_stopping:
        return news
    # Only lasting kinds can be over; a death, a NaN or a spike cannot.
    for key, before in list(state.reported.items()):
        if not may_last(before.kind) or before.status == "ok" or key in current:
            continue
        if before.kind in judged and before.attempt in (None, attempt):
            over = replace(before, status="ok", severity="info", summary=f"Over: {before.summary}")
            state.reported[key] = over
            news.append(over)
    return news


def changed(before: Finding, now: Finding) -> bool:
    """Return True if a finding that was reported is to be reported again."""
    if (before.status, before.cause, before.ranks) != (now.status, now.cause, now.ranks):
        return True
    # not if less severe, because the severity may alternate
    if SEVERITIES.index(now.severity) < SEVERITIES.index(before.severity):
        return True
    if any(now.evidence.get(code) and not before.evidence.get(code) for code in ("line", "stacks")):
        return True  # stacks have been taken since the last report
    is_comparable = before.evidence.get("measured_by") == now.evidence.get("measured_by")
    old, new = _size(before, is_comparable), _size(now, is_comparable)
    return old is not None and new is not None and new >= SHARED.doubled_factor * old > 0


def _size(finding: Finding, is_comparable: bool) -> float | None:
    """Excess of a straggler (ms); its ratio instead if the two findings measure different times."""
    name = "excess_ms" if is_comparable else "factor_ratio"
    value = finding.evidence.get(name) if finding.kind == "straggler" else None
    return float(value) - (not is_comparable) if isinstance(value, (int, float)) else None
