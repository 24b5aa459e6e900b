"""Standstills that ended: steps in which a rank made no progress for longer than the hang limit, then continued.

1. A rank's own time in a step excludes waiting in collectives, waiting for a core, checkpoints and evaluation (these
   have separate limits). The step is a standstill if this time exceeds all of `StallPolicy.floor_s`, `step_factor`
   median steps, and twice the rank's longest own time in recent steps. An attempt's first step is not judged, because
   it compiles and warms up. Two ends of a step are not standstills: an interruption during a hang (see `hangs`), and an
   exception that ended the rank after the update (see `deaths`).
2. Other ranks must have waited for the rank in collectives in the same step, or in the next one if the rank stalled
   between two steps. If no rank waited, the standstill is reported only if `watch` had seen a hang.
3. The place is the phase or gap that took most of the time. If the compiler ran for most of the time, the place is the
   compiler, with the failed guard. The cause and stacks that `watch` reported at the time are added.

Jobs on several GPUs are not judged: waits for other ranks happen on the devices, where the hosts do not see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.run.findings.open_findings import reported_findings
from analyzers.run.policy import StallPolicy, stall_policy
from analyzers.run.records.event_log import EventLog
from analyzers.run.records.standstills import before_standstill, standstills
from analyzers.scope import Scope
from analyzers.source import Source, lacking
from analyzers.wording import number, ranks_text, sentence
from probes.tape import event_kinds

__all__ = ["past_standstills"]

MAX_FINDINGS = 8
_PLACES = {
    "data_ns": "loading data",
    "forward_ns": "in forward",
    "backward_ns": "in backward",
    "optimizer_ns": "in the optimizer",
    "before_forward_ns": "before the forward pass",
    "forward_to_backward_ns": "between forward and backward",
    "backward_to_optimizer_ns": "between backward and the optimizer",
    "after_optimizer_ns": "after the optimizer",
}
_COMPILING = "compiling"
_WAITS = {name: name.replace("_ns", "_wait_ns") for name in _PLACES}
_STEPS_BEFORE = 200


class _StalledStep(NamedTuple):
    """A step in which a rank's own time exceeds the hang limit."""

    attempt: int
    step: int
    rank: int
    own_ns: int
    place: str


def past_standstills(source: Source, scope: Scope, policy: StallPolicy | None = None) -> list[Finding]:
    """Findings of kind `standstill`, the longest first."""
    if lacking(source, steps=("duration_ns", "collective_wait_ns")):
        return []  # `hangs` reports missing records
    policy = policy or stall_policy(scope.manifest)
    by_step: dict[tuple[int, int], list[_StalledStep]] = {}
    long_steps = _standstill_steps(source, scope, policy)
    raised = _steps_of_exceptions(source) if long_steps else {}
    for one in long_steps:
        if one.place == "after_optimizer_ns" and _ended_by_exception(source, one, raised):
            continue
        by_step.setdefault((one.attempt, one.step), []).append(one)
    if not by_step:
        return []
    reports = [report for report in reported_findings(source) if report.kind == "hang" and report.status == "fired"]
    found = [_finding(steps, _waiting(source, steps), reports, _guard(source, steps[0])) for steps in by_step.values()]
    findings = [finding for finding in found if finding is not None]
    return sorted(findings, key=lambda finding: -(finding.cost_s or 0.0))[:MAX_FINDINGS]


def _standstill_steps(source: Source, scope: Scope, policy: StallPolicy) -> list[_StalledStep]:
    names = ", ".join(f"'{name}'" for name in _WAITS)
    times = ", ".join(f"coalesce({name}, 0) - coalesce({wait}, 0)" for name, wait in _WAITS.items())
    rows = source.rows(
        f"""
        WITH own AS (
            SELECT attempt, step, rank, duration_ns - collective_wait_ns - coalesce(run_delay_ns, 0)
                   - coalesce(checkpoint_ns, 0) - coalesce(evaluate_ns, 0) AS own_ns
            FROM steps WHERE {before_standstill(standstills(source))} AND collective_wait_ns IS NOT NULL
              AND attempt = coalesce(?, attempt) AND step >= ?
        ), usual AS (
            SELECT attempt, median(duration_ns) AS median_ns, min(step) AS first_step FROM steps
            WHERE duration_ns IS NOT NULL GROUP BY attempt
        ), long AS (
            SELECT own.* FROM own JOIN usual USING (attempt)
            WHERE step > first_step AND own_ns > ? AND own_ns > ? * median_ns
        ), before AS (
            SELECT long.attempt, long.step, long.rank, max(own.own_ns) AS before_ns FROM long
            JOIN own ON own.attempt = long.attempt AND own.rank = long.rank
             AND own.step BETWEEN long.step - {_STEPS_BEFORE} AND long.step - 1
            JOIN usual ON usual.attempt = long.attempt AND own.step > usual.first_step GROUP BY ALL
        )
        SELECT attempt, step, rank, own_ns,
               (list_value({names}))[list_position(list_value({times}), list_max(list_value({times})))]
        FROM long JOIN steps USING (attempt, step, rank) LEFT JOIN before USING (attempt, step, rank)
        WHERE own_ns > ? * coalesce(before_ns, 0) ORDER BY attempt, step, rank
        """,
        [scope.attempt, scope.since_step, policy.floor_s * 1e9, policy.step_factor, SHARED.beyond_few_factor],
    )
    return [_with_compiler(source, _StalledStep(*row)) for row in rows]


def _steps_of_exceptions(source: Source) -> dict[tuple[int, int], int]:
    """The step of the exception that ended a rank, by attempt and rank."""
    events = EventLog.load(source, (event_kinds.EXCEPTION,)).of(event_kinds.EXCEPTION)
    return {(event.attempt, event.rank): event.step for event in events if event.step is not None}


def _ended_by_exception(source: Source, stalled: _StalledStep, raised: dict[tuple[int, int], int]) -> bool:
    """Return True if an exception ended the rank in or right after that step, before the rank began other work."""
    step = raised.get((stalled.attempt, stalled.rank))
    if step is None or step - stalled.step not in (0, 1):
        return False
    tables = [table for table in ("spans", "collectives") if source.has(table)]
    later = (f"SELECT 1 FROM {table} WHERE attempt = ? AND rank = ? AND step > ? LIMIT 1" for table in tables)
    return not any(source.rows(query, [stalled.attempt, stalled.rank, stalled.step]) for query in later)


def _with_compiler(source: Source, stalled: _StalledStep) -> _StalledStep:
    """Set the place to the compiler if it was running for most of the time."""
    ((compile_ns,),) = source.rows(
        "SELECT coalesce(sum(end_ns - start_ns), 0) FROM spans "
        "WHERE kind = 'compile' AND attempt = ? AND step = ? AND rank = ?",
        [stalled.attempt, stalled.step, stalled.rank],
    )
    return stalled._replace(place=_COMPILING) if compile_ns > stalled.own_ns / 2 else stalled


def _guard(source: Source, stalled: _StalledStep) -> str:
    """The guard of torch.compile that failed, so that the rank recompiled for most of that step; empty if none is
    known."""
    if stalled.place != _COMPILING:
        return ""
    for event in EventLog.load(source, (event_kinds.RECOMPILE,)).of(event_kinds.RECOMPILE, attempt=stalled.attempt):
        if (event.rank, event.step) == (stalled.rank, stalled.step):
            return f"{event.text('function')} ({event.text('file')}:{event.integer('line')}): {event.text('guard')}"
    return ""


def _waiting(source: Source, steps: Sequence[_StalledStep]) -> list[int]:
    """Ranks that waited for the given ranks in the same step or in the next one."""
    first, stalled = steps[0], {one.rank for one in steps}
    rows = source.rows(
        "SELECT rank FROM steps WHERE attempt = ? AND step BETWEEN ? AND ? + 1 GROUP BY rank "
        "HAVING max(collective_wait_ns) >= ? ORDER BY rank",
        [first.attempt, first.step, first.step, SHARED.explained_ratio * min(one.own_ns for one in steps)],
    )
    return [rank for (rank,) in rows if rank not in stalled]


def _finding(
    steps: Sequence[_StalledStep], waiting: Sequence[int], reports: Sequence[Finding], guard: str
) -> Finding | None:
    first, worst = steps[0], max(steps, key=lambda one: one.own_ns)
    ranks = tuple(one.rank for one in steps)
    report = _reported(first, ranks, reports)
    if not waiting and report is None:
        return None
    cost_s, where = worst.own_ns / 1e9, _PLACES.get(worst.place, worst.place)
    waited = f", and {ranks_text(waiting)} waited for {'it' if len(ranks) == 1 else 'them'}" if waiting else ""
    text = f"{ranks_text(ranks)} stalled for {number(round(cost_s, 1), 4)} s at step {first.step}, {where}{waited}"
    evidence: dict[str, Any] = {
        "silent_s": round(cost_s, 1),
        "place": where,
        "waiting_ranks": list(waiting),
        "ongoing": False,
    }
    if guard:
        evidence["recompiled"] = guard
    if report is not None:
        evidence |= {"reported_cause": report.cause, "reported": report.summary}
        evidence |= {name: report.evidence[name] for name in ("stacks", "stack_groups") if name in report.evidence}
    return Finding(
        analyzer="standstill",
        kind="standstill",
        severity="warning",
        status="fired",
        ranks=ranks,
        first_step=first.step,
        last_step=first.step,
        cause="compile" if worst.place == _COMPILING else (report.cause if report is not None else "") or "not_entered",
        summary=f"{sentence(text)} Then the run continued.",
        evidence=evidence,
        advice="standstill",
        attempt=first.attempt,
        cost_s=round(cost_s, 1),
    )


def _reported(first: _StalledStep, ranks: Sequence[int], reports: Sequence[Finding]) -> Finding | None:
    """The live report of a hang of these ranks, at that step or the next."""
    for report in reports:
        same_step = report.first_step is not None and 0 <= report.first_step - first.step <= 1
        if same_step and report.attempt == first.attempt and set(report.ranks) & set(ranks):
            return report
    return None
