"""Findings while a run lives: what `watch` says once a second.

    state = LiveState(stall=stall_policy(run.manifest()))
    for finding in live_findings(store, state, now_ns): ...      # new, or materially changed since it was said

The analyzers are those of the post-mortem, over the newest attempt and its last few hundred steps. `LiveState`
remembers what was said: a finding is told once, again when its status, cause or ranks change or its size doubles,
and once more with status `ok` when it is over. A straggler is looked for less often than a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from analyzers.checkpoints import analyze as checkpoints
from analyzers.corruption import analyze as corruption
from analyzers.corruption import gradient_outlier
from analyzers.data import analyze as data_wait
from analyzers.deaths import analyze as rank_lost
from analyzers.deaths import node_exclusion as exclusion
from analyzers.deaths import resume_mismatch as resume
from analyzers.finding import Finding
from analyzers.hangs import analyze as hang
from analyzers.hangs import silent_node
from analyzers.hangs.device_evidence import with_devices
from analyzers.health import analyze as health
from analyzers.memory import analyze as memory
from analyzers.numerics import divergence, loss_scale, loss_spike, nonfinite
from analyzers.run.digest import Digest, joined, joined_log
from analyzers.run.event_log import EventLog
from analyzers.run.snapshot import SNAPSHOT_EVENTS, attempts, take_snapshot
from analyzers.run.stall_limits import StallPolicy
from analyzers.source import Source
from analyzers.stragglers import analyze as straggler
from analyzers.stragglers.slow_rank import StragglerPolicy

__all__ = ["LivePolicy", "LiveState", "live_findings", "remembered", "same_finding_key"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePolicy:
    """How far back and how often to look."""

    window_steps: int = 300
    """Newest steps that are looked at; the straggler's longest scale is 100, and a NaN is told within a second."""
    straggler_every_ticks: int = 5
    """Calls between two looks for stragglers: they take steps to show, and cost the most."""
    straggler_ranks_per_tick: int = 256
    """Ranks from which stragglers are looked for proportionally less often."""
    say_again_ratio: float = 2.0
    """Growth of the main number at which a finding is told again."""


@dataclass(slots=True, kw_only=True)
class LiveState:
    """What was said. `errors` counts analyzers that failed, by name."""

    policy: LivePolicy = field(default_factory=LivePolicy)
    stall: StallPolicy = field(default_factory=StallPolicy)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    said: dict[tuple[object, ...], Finding] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    digests: Sequence[Digest] = ()
    """What the other nodes' ranks do, where this one leads."""
    clock_offsets_ns: Mapping[int, int] = field(default_factory=dict)
    """How far the other nodes' clocks are ahead."""
    ticks: int = 0
    attempt: int | None = None
    """The newest attempt before which everything is said."""
    newest: int | None = None
    """The newest attempt at the last look."""


def live_findings(source: Source, state: LiveState, now_ns: int) -> list[Finding]:
    """What is new at `now_ns` (epoch nanoseconds)."""
    state.ticks += 1
    lives = attempts(source)
    if not lives:
        return []
    attempt = lives[-1]
    since_step = _since(source, attempt, state.policy.window_steps)
    found: list[Finding] = []
    looked: set[str] = set()
    looks: dict[str, Callable[[], list[Finding]]] = {
        "standstill": lambda: _standstill(source, attempt, state, now_ns),
        "nonfinite": lambda: nonfinite.analyze(
            source, nonfinite.NonFinitePolicy(since_step=since_step, ended_only=True)
        ),
        "spike": lambda: _of(attempt, loss_spike.analyze(source, loss_spike.LossSpikePolicy(since_step=since_step))),
        "divergence": lambda: _of(
            attempt, divergence.analyze(source, divergence.DivergencePolicy(since_step=since_step))
        ),
        "loss_scale": lambda: _of(attempt, loss_scale.analyze(source)),
        "resume": lambda: _of(attempt, resume.analyze(source)),
        "gradient_outlier": lambda: _of(attempt, gradient_outlier.analyze(source)),
        "exclusion": lambda: exclusion.analyze(source),
        "silent_node": lambda: silent_node.analyze(source, ongoing_only=True),
        "corruption": lambda: _of(
            attempt,
            corruption.analyze(source, corruption.CorruptionPolicy(since_step=since_step, settled_only=True)),
        ),
    }
    # A restart may be quicker than a tick: how an attempt ended is still to be said when the next one is there.
    ended = [] if state.attempt is None else [life for life in lives if state.attempt <= life < attempt]
    # It is said one look later: of what was written while this look's records were being read, some are missing, and
    # without its last calls a rank that aborted in a mismatch has just died.
    is_new, state.newest = attempt != state.newest, attempt
    if ended and not is_new:
        looks["ended"] = lambda: _unsaid(state, [f for life in ended for f in _ended(source, life, lives, state.stall)])
    if state.ticks % _period(source, attempt, state.policy) == 0:
        looks["straggler"] = lambda: _straggler(source, attempt, since_step)
        looks["data_wait"] = lambda: data_wait.analyze(source, data_wait.DataPolicy(since_step=since_step))
        looks["memory"] = lambda: memory.analyze(source)
        looks["health"] = lambda: health.analyze(source)
        looks["checkpoints"] = lambda: checkpoints.analyze(source, state.manifest)
    for name, look in looks.items():
        try:
            found += look()
            looked.add(name)
        except Exception:  # one look that fails must not silence the others; the post-mortem says the error
            state.errors[name] = state.errors.get(name, 0) + 1
    if "ended" in looked or not ended:
        state.attempt = attempt
    return _news(state, [f for f in found if f.status in ("fired", "suspect")], looked, attempt)


def remembered(events: Iterable[Mapping[str, Any]]) -> dict[tuple[object, ...], Finding]:
    """What a watch has said already, from its events: for the `said` of one that takes its place.

    Not hangs: what is said is acted upon, and the other may have been killed in between.
    """
    told = (Finding.of_event(event) for event in events if event.get("kind") == "finding")
    return {same_finding_key(finding): finding for finding in told if finding is not None and finding.kind != "hang"}


def _since(source: Source, attempt: int, window_steps: int) -> int:
    ((newest,),) = source.rows("SELECT max(step) FROM steps WHERE attempt = ?", [attempt])
    return max(0, (newest or 0) - window_steps)


def _standstill(source: Source, attempt: int, state: LiveState, now_ns: int) -> list[Finding]:
    log, policy = EventLog.load(source, SNAPSHOT_EVENTS), state.stall
    view = take_snapshot(source, attempt, log)
    if state.digests:
        view = joined(view, state.digests, state.clock_offsets_ns)
        log = joined_log(log, state.digests, state.clock_offsets_ns)
    lost = rank_lost.explain(view, log, policy, is_last=True, now_ns=now_ns)
    stuck = hang.explain(view, log, policy, is_last=True, now_ns=now_ns)
    return [*lost, *([with_devices(source, stuck, view.last_ns)] if stuck else [])]


def _ended(source: Source, attempt: int, lives: Sequence[int], policy: StallPolicy) -> list[Finding]:
    """How a former attempt ended, as the post-mortem sees it."""
    log = EventLog.load(source, SNAPSHOT_EVENTS)
    view = take_snapshot(source, attempt, log)
    again = rank_lost.restart(source, attempt, lives)
    stuck = hang.explain(view, log, policy, is_last=False, again=again)
    lost = rank_lost.explain(view, log, policy, is_last=False, again=again)
    return [*lost, *([with_devices(source, stuck, view.last_ns)] if stuck else [])]


def _unsaid(state: LiveState, findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if same_finding_key(finding) not in state.said]


def _straggler(source: Source, attempt: int, since_step: int) -> list[Finding]:
    policy = StragglerPolicy(since_step=since_step)
    return [f for f in _of(attempt, straggler.analyze(source, policy)) if f.evidence.get("ongoing", True)]


def _of(attempt: int, findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.attempt == attempt]


def _period(source: Source, attempt: int, policy: LivePolicy) -> int:
    ((num_ranks,),) = source.rows("SELECT count(DISTINCT rank) FROM ranks WHERE attempt = ?", [attempt])
    return policy.straggler_every_ticks * max(1, int(num_ranks) // policy.straggler_ranks_per_tick)


# ---- what is worth saying ----


_ONE_EACH = ("hang", "divergence", "loss_scale_collapse", "data_bound", "memory_growth", "checkpoint_failed",
             "checkpoint_age", "memory_limit")  # fmt: skip
"""Kinds of which an attempt has one at a time, wherever it begins."""
_PASSING = {
    "straggler": "straggler",
    "hang": "standstill",
    "data_bound": "data_wait",
    "memory_growth": "memory",
    "checkpoint_age": "checkpoints",
    "node_silent": "silent_node",
}
"""Kinds that can be over, and the look that would still see them."""


def same_finding_key(finding: Finding) -> tuple[object, ...]:
    """What makes two findings the same one, seen at different times."""
    if finding.kind in _ONE_EACH:
        return (finding.kind, finding.attempt)
    if finding.kind == "rank_lost":
        return (finding.kind, finding.attempt, finding.ranks)
    if finding.kind == "straggler":
        return (finding.kind, finding.attempt, finding.ranks, finding.cause)
    if finding.analyzer == "health":
        of = finding.evidence
        return (finding.kind, finding.cause, of.get("node"), of.get("device"), of.get("xid"))
    if finding.kind == "node_silent":
        return (finding.kind, finding.evidence.get("node_rank"))
    return (finding.kind, finding.attempt, finding.first_step)


def _news(state: LiveState, found: list[Finding], looked: set[str], attempt: int) -> list[Finding]:
    news: list[Finding] = []
    current = {same_finding_key(finding): finding for finding in found}
    for key, finding in current.items():
        before = state.said.get(key)
        if before is None or before.status == "ok" or _changed(before, finding, state.policy):
            state.said[key] = finding
            news.append(finding)
    # Only what can pass is ever declared over: a death, a NaN or a spike has happened.
    for key, before in list(state.said.items()):
        if before.kind not in _PASSING or before.status == "ok" or key in current:
            continue
        if _PASSING[before.kind] in looked and before.attempt in (None, attempt):
            over = replace(before, status="ok", severity="info", summary=f"over: {before.summary}")
            state.said[key] = over
            news.append(over)
    return news


def _changed(before: Finding, now: Finding, policy: LivePolicy) -> bool:
    if (before.status, before.cause, before.ranks, before.severity) != (now.status, now.cause, now.ranks, now.severity):
        return True
    old, new = _size(before), _size(now)
    return old is not None and new is not None and new >= policy.say_again_ratio * old > 0


def _size(finding: Finding) -> float | None:
    value = finding.evidence.get("excess_ms") if finding.kind == "straggler" else None
    return float(value) if isinstance(value, (int, float)) else None
