"""Standstills that ended: a step in which a rank stood still for longer than a hang, and then went on.

1. A step of at least `StallPolicy.floor_s`, `step_factor` median steps and `longest_factor` of the longest other steps
   near it, less what was spent in checkpoints and evaluation, which have limits of their own. An attempt's first step
   compiles and warms up.
2. A rank stood still if it spent that time itself, not ready to run on a core that others had, while others of the
   step waited for it in collectives. Where no rank waited, that is reported only if `watch` had seen a hang.
3. Its place is the phase or gap in which it spent most. What `watch` had reported of the hang while it lasted (cause,
   stacks) is added.

On a GPU that is one of several the host knows no waits, so nothing is judged by them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from analyzers.finding import Finding
from analyzers.run.open_findings import reported_findings
from analyzers.run.policy import StallPolicy, stall_policy
from analyzers.scope import Scope
from analyzers.source import Source, lacking
from analyzers.wording import counted, number, ranks_text, sentence

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
_WAITS = {name: name.replace("_ns", "_wait_ns") for name in _PLACES}
_OWN_RATIO = 0.5
"""Share of the step's time that a rank spent itself if it stood still, and that another waited if it did not."""
_NEIGHBOURS = 200


class _Step(NamedTuple):
    attempt: int
    step: int
    rank: int
    duration_ns: int
    wait_ns: int
    place: str
    delay_ns: int

    @property
    def own_ns(self) -> int:
        return self.duration_ns - self.wait_ns - self.delay_ns


def past_standstills(source: Source, scope: Scope, policy: StallPolicy | None = None) -> list[Finding]:
    """Findings of kind `standstill`, the longest first."""
    if lacking(source, steps=("duration_ns", "collective_wait_ns")):
        return []  # `hangs` says what is not recorded
    policy = policy or stall_policy(scope.manifest)
    reports = [report for report in reported_findings(source) if report.kind == "hang" and report.status == "fired"]
    found = [finding for rows in _long_steps(source, scope, policy) if (finding := _finding(rows, reports)) is not None]
    return sorted(found, key=lambda finding: -(finding.cost_s or 0.0))[:MAX_FINDINGS]


def _long_steps(source: Source, scope: Scope, policy: StallPolicy) -> list[list[_Step]]:
    """The rows of each step that was longer than a hang on all ranks that recorded it."""
    own = " , ".join(f"coalesce({name}, 0) - coalesce({wait}, 0)" for name, wait in _WAITS.items())
    names = ", ".join(f"'{name}'" for name in _WAITS)
    rows = source.rows(
        f"""
        WITH took AS (
            SELECT *, duration_ns - coalesce(checkpoint_ns, 0) - coalesce(evaluate_ns, 0) AS took_ns,
                   list_value({own}) AS own
            FROM steps WHERE duration_ns IS NOT NULL AND attempt = coalesce(?, attempt) AND step >= ?
        ), whole AS (
            SELECT attempt, step, min(took_ns) AS took_ns FROM took GROUP BY attempt, step
        ), usual AS (
            SELECT attempt, min(step) AS first_step, median(took_ns) AS median_ns FROM whole GROUP BY attempt
        ), long AS (
            SELECT * FROM (
                SELECT *, max(took_ns) OVER (PARTITION BY attempt ORDER BY step ROWS BETWEEN {_NEIGHBOURS} PRECEDING
                    AND 1 PRECEDING) AS before_ns FROM whole) JOIN usual USING (attempt)
            WHERE step > first_step AND took_ns > ? AND took_ns > ? * median_ns
              AND took_ns > ? * coalesce(CASE WHEN step > first_step + 1 THEN before_ns END, 0)
        )
        SELECT attempt, step, rank, took.took_ns, coalesce(collective_wait_ns, 0),
               (list_value({names}))[list_position(own, list_max(own))],
               coalesce(run_delay_ns, 0)
        FROM took JOIN long USING (attempt, step) WHERE collective_wait_ns IS NOT NULL ORDER BY attempt, step, rank
        """,
        [scope.attempt, scope.since_step, policy.floor_s * 1e9, policy.step_factor, policy.longest_factor],
    )
    grouped: dict[tuple[int, int], list[_Step]] = {}
    for row in rows:
        grouped.setdefault((row[0], row[1]), []).append(_Step(*row))
    return list(grouped.values())


def _finding(rows: Sequence[_Step], reports: Sequence[Finding]) -> Finding | None:
    first = rows[0]
    still = [row for row in rows if row.own_ns >= _OWN_RATIO * row.duration_ns]
    waiting = sorted(row.rank for row in rows if row.wait_ns >= _OWN_RATIO * row.duration_ns)
    named = still if waiting else []
    worst = max(named or rows, key=lambda row: row.own_ns)
    cost_s = max(row.own_ns for row in named) / 1e9 if named else min(row.duration_ns for row in rows) / 1e9
    ranks = tuple(sorted(row.rank for row in named))
    report = _reported(first, ranks, reports)
    if not named and report is None:
        return None
    seconds, at = number(round(cost_s, 1), 4), f"at step {first.step}"
    where = _PLACES[worst.place] if still else "in a collective"
    if named:
        waited = f", and {ranks_text(waiting)} waited for {'it' if len(ranks) == 1 else 'them'}" if waiting else ""
        text = f"{ranks_text(ranks)} stood still for {seconds} s {at}, {where}{waited}"
    else:
        text = f"all {counted(len(rows), 'rank')} stood still for {seconds} s {at}, {where}"
    evidence: dict[str, Any] = {
        "silent_s": round(cost_s, 1),
        "place": where,
        "waiting_ranks": waiting,
        "ongoing": False,
    }
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
        cause=(report.cause if report is not None else "") or ("rank" if named else "all"),
        summary=f"{sentence(text)} Then the run went on.",
        evidence=evidence,
        advice="standstill",
        attempt=first.attempt,
        cost_s=round(cost_s, 1),
    )


def _reported(first: _Step, ranks: Sequence[int], reports: Sequence[Finding]) -> Finding | None:
    """What `watch` reported while it lasted: of that step, and of the same ranks if any are named."""
    for report in reports:
        same_step = report.first_step is not None and abs(report.first_step - first.step) <= 1
        if same_step and report.attempt == first.attempt and (not ranks or set(report.ranks) & set(ranks)):
            return report
    return None
