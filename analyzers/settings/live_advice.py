"""Advice on a live run: report the cost of a layout once its first steps are measured, not at the end of the run.

    state = AdviceState()
    for finding in live_advice(store, state, run.manifest, now_ns): ...     # each piece once

1. Wait until the newest attempt has finished as many steps as the next number in the policy's `at_steps`.
2. Run the analyses that advise (`Analysis.advises`) over its newest steps.
3. Return advice if this kind and cause has not been returned before. A restart of the ranks repeats no advice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from analyzers.analysis import our_analyses
from analyzers.finding import Finding
from analyzers.live import LivePolicy
from analyzers.run.calls.snapshot import attempts
from analyzers.scope import Scope
from analyzers.settings.policy import LiveAdvicePolicy
from analyzers.source import Source, lacking
from probes.tape import event_kinds

__all__ = ["AdviceState", "live_advice", "remembered_advice"]


@dataclass(slots=True, kw_only=True)
class AdviceState:
    """Advice that was already returned. `errors` counts failed analyses by their first kind."""

    policy: LiveAdvicePolicy = field(default_factory=LiveAdvicePolicy)
    reported: set[tuple[str, str]] = field(default_factory=set)
    """(kind, cause)."""
    errors: dict[str, int] = field(default_factory=dict)
    judged: int = 0
    """How many of the policy's step counts have been handled."""


def live_advice(
    source: Source,
    state: AdviceState,
    manifest: Callable[[], Mapping[str, Any]],
    now_ns: int,
    *,
    is_last: bool = False,
) -> list[Finding]:
    """New advice at `now_ns` (epoch nanoseconds). `is_last`: the run is ending, so no further step count will be
    reached.

    `manifest` is called when needed: rank 0 writes the plan into `run.json` after `watch` has started.
    """
    at_steps = state.policy.at_steps
    if state.judged >= len(at_steps) or lacking(source, steps=("duration_ns",)):
        return []
    known = attempts(source)
    if not known:
        return []
    ((num_steps, newest),) = source.rows(
        "SELECT count(DISTINCT step), max(step) FROM steps WHERE attempt = ? AND rank >= 0 AND duration_ns IS NOT NULL",
        [known[-1]],
    )
    if num_steps < at_steps[0 if is_last else state.judged]:
        return []
    state.judged = sum(each <= num_steps for each in at_steps)
    since_step = max(0, newest - LivePolicy().window_steps)
    scope = Scope(attempt=known[-1], since_step=since_step, now_ns=now_ns, manifest=manifest())
    news = []
    for finding in _advice(source, scope, state):
        if (key := (finding.kind, finding.cause)) not in state.reported:
            state.reported.add(key)
            news.append(finding)
    return news


def remembered_advice(events: Iterable[Mapping[str, Any]]) -> set[tuple[str, str]]:
    """(kind, cause) of the advice that an earlier `watch` of the same launch reported, from its events.

    After a resume all advice is reported again: settings may have changed, and the user reads another terminal.
    """
    reported: set[tuple[str, str]] = set()
    for event in events:
        if event.get("kind") == event_kinds.RUN_STARTED:
            reported.clear()
        elif event.get("kind") == event_kinds.ADVICE:
            reported.add((str(event.get("finding_kind")), str(event.get("cause"))))
    return reported


def _advice(source: Source, scope: Scope, state: AdviceState) -> list[Finding]:
    found: list[Finding] = []
    for analysis in our_analyses():
        if not analysis.advises:
            continue
        try:
            found += analysis.run(source, scope)
        except Exception:
            # one failed analysis must not suppress the others; the report of the finished run names the error
            state.errors[analysis.kinds[0]] = state.errors.get(analysis.kinds[0], 0) + 1
    return [finding for finding in found if finding.status == "advice"]
