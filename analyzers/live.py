"""Findings on a live run, which `watch` reports once a second.

    state = LiveState(stall=stall_policy(run.manifest()))
    for finding in live_findings(store, state, now_ns): ...      # new, or materially changed since it was reported

They use the analyses of the post-mortem, over the last few hundred steps of the newest attempt. `LiveState` remembers
what was reported. A finding is reported once, again when it changes (status, cause, ranks, a higher severity, twice the
size), and a last time, with status `ok`, when it is over. Stragglers are checked less often than hangs.

`standstill_findings` and `ended_findings` return hangs and lost ranks, `plugin_findings` returns findings of plug-ins,
and `record_findings` all others. `watch` calls them in three threads with separate sources, because the first two must
not wait for a store, and none may wait for a plug-in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from analyzers.account.long_run import HISTORY_ROWS
from analyzers.analysis import Analysis, our_analyses, plugin_analyses
from analyzers.deaths import analyze as rank_lost
from analyzers.finding import SEVERITIES, Finding
from analyzers.hangs import analyze as hang
from analyzers.hangs.device_evidence import with_devices
from analyzers.hangs.stacks import StacksAtHang, roles_of
from analyzers.policy import SHARED
from analyzers.run.calls.snapshot import SNAPSHOT_EVENTS, AttemptView, attempts, take_snapshot
from analyzers.run.ends.restarts import restart_sentence
from analyzers.run.findings.open_findings import is_same_finding, may_last, reported_findings, why_closed
from analyzers.run.findings.past_tense import OVER, over
from analyzers.run.live.digest import Digest, joined, joined_log
from analyzers.run.live.stall_limits import killed_by_watch
from analyzers.run.policy import StallPolicy
from analyzers.run.records.event_log import EventLog
from analyzers.scope import Scope
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = [
    "LivePolicy", "LiveState", "changed", "ended_findings", "live_findings", "plugin_findings", "record_findings",
    "remembered", "standstill_findings", "window_start",
]  # fmt: skip

_Judge = Callable[[], list[Finding]]
MAX_FAILURES = 3
"""Maximum number of reasons reported for one failing analysis, because they may differ only in a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePolicy:
    """Window and frequency of live analyses."""

    window_steps: int = 300
    """Number of newest steps that are judged; the straggler analysis needs up to 100 of them."""
    periodic_ticks: int = 5
    """Calls between two runs of the periodic analyses, which need several new steps and cost the most."""
    periodic_ranks_per_tick: int = 256
    """Number of ranks above which periodic analyses run proportionally less often."""


@dataclass(slots=True, kw_only=True)
class LiveState:
    """The findings reported so far. `errors` counts analyses that failed, by their first kind."""

    policy: LivePolicy = field(default_factory=LivePolicy)
    stall: StallPolicy = field(default_factory=StallPolicy)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    reported: dict[tuple[object, ...], Finding] = field(default_factory=dict)
    newest_found: dict[tuple[object, ...], Finding] = field(default_factory=dict)
    """Each finding as it was last found, which may be after its last report: small changes are not reported."""
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
    attempt: int = 0
    """All attempts before this one are completely reported."""
    newest: int | None = None
    """The newest attempt at the last call."""
    missed: int | None = None
    """Attempt with steps older than this state's first window, until they are judged."""
    judged: dict[int, int] = field(default_factory=dict)
    """{attempt: its newest step when it was last judged}."""
    plugin_ticks: int = 0
    plugins_judged: dict[int, int] = field(default_factory=dict)
    """Like `judged`, for the plug-ins' last call."""
    failures: dict[str, list[str]] = field(default_factory=dict)
    """{analysis or plug-in: reasons why it failed}, without repeats."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards `reported` and `newest_found`."""


def live_findings(source: Source, state: LiveState, now_ns: int) -> list[Finding]:
    """New and changed findings at `now_ns` (epoch nanoseconds)."""
    return [
        *standstill_findings(source, state, now_ns),
        *record_findings(source, state, now_ns),
        *plugin_findings(source, state, now_ns),
    ]


def standstill_findings(source: Source, state: LiveState, now_ns: int) -> list[Finding]:
    """New and changed findings on a hang or lost ranks of the newest attempt. Only its newest records are needed."""
    known = attempts(source)
    if not known:
        return []
    attempt = known[-1]
    due: dict[tuple[str, ...], _Judge] = {("hang", "rank_lost"): lambda: _standstill(source, attempt, state, now_ns)}
    return _judged(state, due, attempt=attempt)[0]


def ended_findings(source: Source, state: LiveState, ended: Sequence[int]) -> list[Finding]:
    """New findings on how earlier attempts ended. Only the newest records of these attempts are needed."""
    if not (known := attempts(source)):
        return []
    due: dict[tuple[str, ...], _Judge] = {("ended",): lambda: _unreported_ends(source, ended, known, state)}
    return _judged(state, due, attempt=known[-1])[0]


def record_findings(source: Source, state: LiveState, now_ns: int, *, num_ticks: int = 1) -> list[Finding]:
    """New and changed findings of all other kinds. Findings on earlier attempts are included if they have not been
    reported: how an attempt ended, and incidents in its last steps (in all its steps if no `watch` ran meanwhile).

    `num_ticks`: ticks since the last call, if calls are less frequent than ticks.
    """
    ticks, state.ticks = state.ticks, state.ticks + num_ticks
    known = attempts(source)
    if not known:
        return []
    attempt = known[-1]
    scope = _live_scope(source, attempt, state, state.judged, now_ns)
    due: dict[tuple[str, ...], _Judge] = {}
    # A restart may take less time than a tick. So the ends of former attempts are reported when the next one exists.
    ended = [one for one in known if state.attempt <= one < attempt]
    # An attempt that has ended is judged only at the next call. Records that were written while this call was reading
    # may be missing, and without its last calls, a rank that aborted in a mismatch would look like any lost rank.
    is_new = attempt != state.newest
    if state.newest is None and scope.since_step:
        state.missed = attempt
    state.newest = attempt
    if not is_new:
        if ended:
            due["ended",] = lambda: _unreported_ends(source, ended, known, state)
        missed = [] if state.missed is None or state.missed in ended else [state.missed]
        due |= _incidents(source, [*ended, *missed], state, scope)
        state.missed = None
    due |= _due(our_analyses(), source, scope, state.policy, ticks, state.ticks)
    news, judged = _judged(state, due, attempt=attempt)
    if "ended" in judged or not ended:
        state.attempt = attempt
        state.judged = {attempt: state.judged[attempt]}
    return news


def plugin_findings(source: Source, state: LiveState, now_ns: int, *, num_ticks: int = 1) -> list[Finding]:
    """New and changed findings of plug-ins. A call may take the time limit of `store.plugins` for each of them."""
    ticks, state.plugin_ticks = state.plugin_ticks, state.plugin_ticks + num_ticks
    if not (known := attempts(source)):
        return []
    attempt = known[-1]
    scope = _live_scope(source, attempt, state, state.plugins_judged, now_ns)
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
            one = partial(analysis.run, source, scope)
            due[analysis.kinds] = one if others is None else _both(others, one)
    return due


def _both(first: _Judge, second: _Judge) -> _Judge:
    return lambda: [*first(), *second()]


def _judged(state: LiveState, due: Mapping[tuple[str, ...], _Judge], *, attempt: int) -> tuple[list[Finding], set[str]]:
    """Run the due analyses; returns findings worth reporting, and the kinds of the analyses that did not fail."""
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


def window_start(source: Source, attempt: int, window_steps: int) -> int:
    """First of the newest `window_steps` steps of an attempt."""
    return max(0, _newest_step(source, attempt) - window_steps)


def _live_scope(source: Source, attempt: int, state: LiveState, judged: dict[int, int], now_ns: int) -> Scope:
    """The newest attempt's window; its newest step is noted in `judged`. It begins `window_steps` before the newest
    step of the last call. So every step is judged with as many earlier steps, however long it is between two calls.
    """
    newest = _newest_step(source, attempt)
    before, judged[attempt] = judged.get(attempt, newest), newest
    since_step = max(0, min(before, newest) - state.policy.window_steps)
    return Scope(attempt=attempt, since_step=since_step, now_ns=now_ns, manifest=state.manifest)


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


def _unreported_ends(source: Source, ended: Sequence[int], known: Sequence[int], state: LiveState) -> list[Finding]:
    found = [finding for attempt in ended for finding in _end_of_attempt(source, attempt, known, state)]
    return _unreported(source, found, state)


def _incidents(source: Source, unjudged: Sequence[int], state: LiveState, live: Scope) -> dict[tuple[str, ...], _Judge]:
    """Analyses of incidents in attempts since they were last judged. Findings that may last are left to the analyses of
    the newest steps. The keys are not names of kinds, because these kinds are not judged for the newest attempt here.
    """
    scopes = [
        replace(
            live,
            attempt=one,
            since_step=_since_step(source, one, state),
            now_ns=None if one != live.attempt else live.now_ns,
        )
        for one in unjudged
    ]
    due: dict[tuple[str, ...], _Judge] = {}
    for analysis in our_analyses() if scopes else ():
        if analysis.live != "never" and not all(map(may_last, analysis.kinds)):
            due[f"{analysis.kinds[0]} before the newest steps",] = partial(
                _incidents_of, analysis, source, scopes, state
            )
    return due


def _incidents_of(analysis: Analysis, source: Source, scopes: Sequence[Scope], state: LiveState) -> list[Finding]:
    found = [one for scope in scopes for one in analysis.run(source, scope)]
    judged = {scope.attempt for scope in scopes}
    return _unreported(source, [one for one in found if one.attempt in judged and not may_last(one.kind)], state)


def _since_step(source: Source, attempt: int, state: LiveState) -> int:
    """First of the missed steps to judge; in a very long attempt, only the newest `HISTORY_ROWS` rows are judged."""
    if attempt != state.missed and (before := state.judged.get(attempt)) is not None:
        return max(0, before - state.policy.window_steps)
    num_ranks = source.rows("SELECT count(DISTINCT rank) FROM ranks WHERE attempt = ?", [attempt])[0][0]
    return window_start(source, attempt, HISTORY_ROWS // max(1, num_ranks))


def _unreported(source: Source, found: Sequence[Finding], state: LiveState) -> list[Finding]:
    """The findings that, according to the source, neither this `watch` nor another `watch` of the run has reported."""
    if not (found := [one for one in found if one.status in ("fired", "suspect")]):
        return []
    with state.lock:
        reports = [*state.reported.values()]
    reports += reported_findings(source)
    return [one for one in found if not any(is_same_finding(one, report) for report in reports)]


def _end_of_attempt(source: Source, attempt: int, known: Sequence[int], state: LiveState) -> list[Finding]:
    """Findings on the end of an earlier attempt, as in the post-mortem."""
    log, policy = EventLog.load(source, SNAPSHOT_EVENTS), state.stall
    view = _with_elsewhere(take_snapshot(source, attempt, log), state)
    restart = restart_sentence(source, attempt, known)
    stuck = hang.hang_of_attempt(view, log, policy, is_last=False, restart=restart)
    lost = rank_lost.deaths_of_attempt(view, log, policy, is_last=False, restart=restart)
    return [*lost, *([with_devices(source, stuck, view.last_ns)] if stuck else [])]


def _with_elsewhere(view: AttemptView, state: LiveState) -> AttemptView:
    if not state.sees_part:
        return view  # the records of all ranks are here, so a rank without records has never started
    return replace(view, elsewhere=frozenset(range(view.world_size)) - view.ranks.keys())


def _period(source: Source, attempt: int, policy: LivePolicy) -> int:
    ((num_ranks,),) = source.rows("SELECT count(DISTINCT rank) FROM ranks WHERE attempt = ?", [attempt])
    return policy.periodic_ticks * max(1, int(num_ranks) // policy.periodic_ranks_per_tick)


# ---- what is worth reporting ----


def _news(state: LiveState, found: list[Finding], judged: set[str], attempt: int) -> list[Finding]:
    news: list[Finding] = []
    current = {finding.identity: finding for finding in found}
    for key, finding in current.items():
        state.newest_found[key], before = finding, state.reported.get(key)
        is_closed = bool(why_closed(finding, None))  # for example, the loss has fallen back
        if before is not None and before.status != "ok" and is_closed and not why_closed(before, None):
            news += [] if state.is_stopping else [_over(state, key, finding)]
        elif before is None or (not is_closed if before.status == "ok" else changed(before, finding)):
            state.reported[key] = finding
            news.append(finding)
    if state.is_stopping:
        return news
    # A finding of a lasting kind is over when it is no longer found. A death, a NaN or a spike is never "over".
    for key, before in list(state.reported.items()):
        if not may_last(before.kind) or before.status == "ok" or key in current:
            continue
        if before.kind in judged and before.attempt in (None, attempt):
            news.append(_over(state, key, before))
    return news


def _over(state: LiveState, key: tuple[object, ...], finding: Finding) -> Finding:
    newest = state.newest_found.get(key)  # None if this `watch` never found it, but one before it did
    past = over(newest or finding, newest.last_step if newest else None)
    state.reported[key] = ended = replace(past, status="ok", severity="info", summary=f"{OVER}{past.summary}")
    return ended


def changed(before: Finding, now: Finding) -> bool:
    """Return True if a finding that was reported is to be reported again."""
    if (before.status, before.cause, before.ranks) != (now.status, now.cause, now.ranks):
        return True
    # A lower severity alone is no news, because the severity may alternate.
    if SEVERITIES.index(now.severity) < SEVERITIES.index(before.severity):
        return True
    if any(now.evidence.get(name) and not before.evidence.get(name) for name in ("line", "stacks")):
        return True  # stacks, or the line of code, have become known since the last report
    is_comparable = before.evidence.get("measured_by") == now.evidence.get("measured_by")
    old, new = _size(before, is_comparable), _size(now, is_comparable)
    return old is not None and new is not None and new >= SHARED.doubled_factor * old > 0


def _size(finding: Finding, is_comparable: bool) -> float | None:
    """Excess of a straggler (ms); its ratio instead if the two findings measure different times."""
    name = "excess_ms" if is_comparable else "factor_ratio"
    value = finding.evidence.get(name) if finding.kind == "straggler" else None
    return float(value) - (not is_comparable) if isinstance(value, (int, float)) else None
