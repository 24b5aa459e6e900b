"""Silent data corruption: replicas that differ, state that changed on its own, and gradients of a faulty device.

    findings = fingerprints(store, Scope())        # kinds replica_mismatch, fingerprint_chain_broken

A flipped bit spreads: the gradients that a rank computes from a wrong parameter reach all other ranks through the
reduction. So the state of all ranks is in doubt after the last check without a difference. The finding names the step
of that check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analyzers.analysis import Analysis
from analyzers.corruption.gradient_outlier import corrupted_gradients
from analyzers.corruption.replicas import ALL_TENSORS, Corruption, Fingerprint, judge
from analyzers.deaths.recovery_response import RESPONSE_EVENTS, Response, respond
from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.run.records.event_log import EventLog
from analyzers.run.records.not_recorded import missing, not_recorded
from analyzers.scope import Scope
from analyzers.source import Source, missing_tables
from probes.tape import event_kinds

__all__ = ["ANALYSES", "fingerprints"]

MAX_TENSORS = 16
"""Maximum number of tensor names in the evidence."""

_SETTLED = """
    SELECT attempt, min(newest_ns) FROM (SELECT attempt, rank, max(start_ns) AS newest_ns FROM steps GROUP BY ALL)
    GROUP BY attempt
"""
"""SQL: for each attempt, the time at which the rank that is furthest behind began its newest step. All earlier records
are in the store."""


def fingerprints(source: Source, scope: Scope) -> list[Finding]:
    """Findings of kind `replica_mismatch` and `fingerprint_chain_broken`, one per incident."""
    if missing_tables(source, "fingerprints"):
        why = f"Replicas were not compared: {not_recorded(['fingerprints'])}."
        return [Finding.insufficient("corruption", "replica_mismatch", why, evidence=missing(["fingerprints"]))]
    log = EventLog.load(source, RESPONSE_EVENTS)
    findings: list[Finding] = []
    before: tuple[int, Corruption] | None = None
    for attempt, step, execution, rows in _suspicious_checks(source, scope):
        found = judge(rows)
        if found is None:
            continue
        not_restored = findings and findings[-1].evidence["restored_step"] is None
        # If the run did not respond, every later check finds the same difference: report it once.
        if not_restored and before == (attempt, found):
            findings[-1] = replace(findings[-1], last_step=step)
            continue
        before = (attempt, found)
        findings.append(_finding(source, log, attempt, step, execution, found))
    return findings


def _suspicious_checks(source: Source, scope: Scope) -> list[tuple[int, int, int, Sequence[Fingerprint]]]:
    """Checks with a difference, as (attempt, step, execution, rows); `rows`: of all ranks, for the tensors that differ.

    On a live run, only checks after which all ranks have begun another step are returned. Before that, rows of some
    ranks may still be missing in the store, and the majority is not known.
    """
    found = source.rows(
        """
        WITH executions AS (
            SELECT *, row_number() OVER (PARTITION BY attempt, rank, step, replica_group, tensor ORDER BY taken_ns)
                   AS execution
            FROM fingerprints WHERE step >= ? AND attempt = coalesce(?, attempt)
        ), odd AS (
            SELECT attempt, step, execution, replica_group, tensor FROM executions
            GROUP BY ALL
            HAVING count(DISTINCT hash) > 1 OR bool_or(coalesce(hash <> expected_hash, false))
        )
        SELECT t.attempt, t.step, t.execution, t.rank, t.replica_group, t.tensor, t.hash, t.expected_hash,
               max(t.taken_ns) OVER (PARTITION BY t.attempt, t.step, t.execution)
        FROM executions t SEMI JOIN odd USING (attempt, step, execution, replica_group, tensor)
        ORDER BY t.attempt, min(t.taken_ns) OVER (PARTITION BY t.attempt, t.step, t.execution), t.step,
                 t.execution, t.rank
        """,
        [scope.since_step, scope.attempt],
    )
    settled = dict(source.rows(_SETTLED)) if scope.is_live else {}
    checks: dict[tuple[int, int, int], list[Fingerprint]] = {}
    for attempt, step, execution, rank, group, tensor, value, expected, taken_ns in found:
        if scope.is_live and taken_ns >= settled.get(attempt, 0):
            continue
        one = Fingerprint(rank=rank, group=group or "", tensor=tensor or "", hash=value, expected=expected)
        checks.setdefault((attempt, step, execution), []).append(one)
    return [(*key, rows) for key, rows in checks.items()]


def _finding(source: Source, log: EventLog, attempt: int, step: int, execution: int, found: Corruption) -> Finding:
    ((healthy,),) = source.rows("SELECT max(step) FROM fingerprints WHERE attempt = ? AND step < ?", [attempt, step])
    response = _response(log, attempt, step)
    cause = found.tensors[0].partition(".")[0] if found.tensors[0] != ALL_TENSORS else "unknown"
    return Finding(
        analyzer="corruption",
        kind=found.kind,
        severity="warning" if response.restored_step is not None else "critical",
        status="fired" if found.certain else "suspect",
        ranks=found.ranks,
        first_step=step,
        last_step=step,
        cause={"model": "parameter", "optimizer": "optimizer"}.get(cause, "unknown"),
        summary=f"At step {step}, {found.text}. {response.text}",
        evidence={
            "tensors": list(found.tensors[:MAX_TENSORS]),
            "num_tensors": len(found.tensors),
            "replica_groups": list(found.groups),
            "num_replicas": found.num_replicas if found.groups else None,
            "chain_broken_ranks": list(found.broken_ranks),
            "last_healthy_step": healthy,
            "step_executions": execution,
            **response.evidence(),
        },
        advice="replica-mismatch" if found.kind == "replica_mismatch" else "fingerprint-chain-broken",
        attempt=attempt,
    )


def _response(log: EventLog, attempt: int, step: int) -> Response:
    """The rollback that followed a check."""
    for event in log.of(event_kinds.ROLLBACK, attempt=attempt):
        if step < event.integer("from_step") <= step + SHARED.min_times and event.text("verdict") == "corruption":
            return respond(log, attempt=attempt, step=event.integer("from_step"))
    return respond(log, attempt=attempt, step=-1)  # no event has this step, so the response is empty


ANALYSES = (
    Analysis(
        kinds=("replica_mismatch", "fingerprint_chain_broken"), run=fingerprints, records="sampled", live="each_tick"
    ),
    Analysis(kinds=("gradient_corrupted",), run=corrupted_gradients, live="each_tick"),
)
