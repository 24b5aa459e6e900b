"""Samples of a node's metrics, one function per table or part of the store: steps, experts, ranks, findings,
recovery.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from analyzers.account.bubble import expected_idle
from analyzers.account.device.trace_check import contradiction
from analyzers.account.goodput import measure
from analyzers.account.step_account import StepAccount, step_accounts
from analyzers.account.time_classes import OWN_WORK
from analyzers.finding import Finding, evidence_of
from analyzers.numerics.expert_load import layer_loads
from analyzers.run.calls.snapshot import attempts
from analyzers.run.findings.open_findings import may_last
from analyzers.run.policy import StallPolicy
from analyzers.run.records.evaluations import evaluations
from analyzers.run.records.event_log import EventLog, parsed_detail
from analyzers.run.records.newest_steps import NEWEST_STEPS, newest_pace
from analyzers.run.records.token_copies import token_copies
from analyzers.source import Source, missing_tables
from analyzers.wording import is_number, ranks_text
from probes.settings.described import ParallelFacts
from probes.settings.section import read
from probes.tape import event_kinds
from watch.exporting.metrics.catalogue import Sample

__all__ = [
    "account_samples",
    "expert_samples",
    "finding_samples",
    "planned_bubble_samples",
    "rank_samples",
    "recovery_samples",
    "scalar_samples",
    "step_samples",
    "validation_samples",
]

WINDOW_STEPS = NEWEST_STEPS
EXPERT_SAMPLES = 5
MAX_SCALARS = 50
"""Maximum number of series of user-logged numbers, since each name is a label value."""
OPEN_FOR_S = 300
MAX_REPORTS = 10_000
"""Number of newest reports of an attempt that are read. Open findings are reported repeatedly, so older reports are not
needed.
"""
_NEWEST = "attempt = (SELECT max(attempt) FROM steps) AND rank >= 0 AND duration_ns IS NOT NULL"


def step_samples(source: Source, manifest: Mapping[str, Any]) -> Iterator[Sample]:
    """Samples of the newest steps over all ranks of the node."""
    if missing_tables(source, "steps"):
        return
    ((step, last_ns),) = source.rows(
        "SELECT min(newest), max(end_ns) FROM (SELECT max(step) AS newest, max(start_ns + duration_ns) AS end_ns "
        f"FROM steps WHERE {_NEWEST} GROUP BY rank)"
    )
    if step is None:
        return
    yield Sample("rankscope_step", step)
    yield Sample("rankscope_last_step_timestamp_seconds", last_ns / 1e9)
    pace = newest_pace(source, token_copies(source, manifest))
    if pace is not None:
        for stat, value in (("min", pace.shortest_ms), ("median", pace.step_ms), ("max", pace.longest_ms)):
            yield Sample("rankscope_step_duration_seconds", value / 1e3, {"stat": stat})
        has_exposed = not contradiction(source, pace.attempt)
        yield from _shares(step_accounts(source, pace.attempt, pace.first_step), has_exposed=has_exposed)
        if pace.tokens_per_s is not None:
            yield Sample("rankscope_tokens_per_second", pace.tokens_per_s)
    ((loss, norm, rate),) = source.rows(
        f"SELECT arg_max(loss, step), arg_max(grad_norm, step), arg_max(lr, step) FROM steps WHERE {_NEWEST} "
        "AND step > ? AND rank = (SELECT min(rank) FROM steps WHERE rank >= 0)",
        [step - WINDOW_STEPS],
    )
    for name, value in (("loss", loss), ("grad_norm", norm), ("learning_rate", rate)):
        if value is not None:
            yield Sample(f"rankscope_{name}", value)


def _shares(accounts: Sequence[StepAccount], *, has_exposed: bool) -> Iterator[Sample]:
    """Shares of the steps' time over all ranks. Shares that were not measured, or that a trace contradicts, are
    omitted.
    """
    took = sum(account.duration_ns for account in accounts)
    data = [account.own_ns["data"] for account in accounts if account.has_phases and "data" in account.own_ns]
    exposed = [account.transfer_ns for account in accounts if account.transfer_ns is not None and has_exposed]
    for name, values in (("data_wait", data), ("exposed_communication", exposed)):
        if values and took:
            yield Sample(f"rankscope_{name}_ratio", sum(values) / took)


def scalar_samples(source: Source) -> Iterator[Sample]:
    """Mean over the ranks of each number that the user logged, from the newest attempt that has it."""
    if not source.has("scalars"):
        return
    rows = source.rows(
        """
        WITH newest AS (
            SELECT name, attempt, arg_max(value, step) AS value FROM scalars GROUP BY name, attempt, rank
            QUALIFY attempt = max(attempt) OVER (PARTITION BY name))
        SELECT name, avg(value) FROM newest GROUP BY name ORDER BY name LIMIT ?
        """,
        [MAX_SCALARS],
    )
    for name, value in rows:
        yield Sample("rankscope_logged_value", value, {"name": name})


def validation_samples(source: Source) -> Iterator[Sample]:
    """The newest evaluation: mean over the validation sets, and each named set."""
    found = evaluations(source)
    if not found:
        return
    newest = max(found, key=lambda each: each.wall_ns)
    yield Sample("rankscope_validation_loss", newest.loss, {"set": ""})
    for name, loss in list(newest.sets.items())[:MAX_SCALARS]:
        yield Sample("rankscope_validation_loss", loss, {"set": name})


def expert_samples(source: Source) -> Iterator[Sample]:
    """Load balance of the MoE experts in the newest samples."""
    _, layers = layer_loads(source, EXPERT_SAMPLES)
    if not layers:
        return
    yield Sample("rankscope_expert_load_ratio", min(float(layer.mean_load.min()) for layer in layers), {"stat": "min"})
    yield Sample("rankscope_expert_load_ratio", max(float(layer.mean_load.max()) for layer in layers), {"stat": "max"})
    chosen = sum(float(layer.tokens.sum()) for layer in layers)
    yield Sample(
        "rankscope_expert_dropped_ratio", sum(float(layer.dropped.sum()) for layer in layers) / max(1.0, chosen)
    )


def planned_bubble_samples(source: Source, manifest: Mapping[str, Any]) -> Iterator[Sample]:
    """Theoretical idle share of the configured pipeline schedule. No sample for attached loops, or for schedules
    without a closed form.
    """
    parallel = read(ParallelFacts, manifest)
    if not parallel.schedule or missing_tables(source, "spans", "ranks"):
        return
    ((stages,),) = source.rows("SELECT count(DISTINCT pp) FROM ranks WHERE rank >= 0")
    ((last,),) = source.rows("SELECT max(microbatch) FROM spans")
    if stages < 2 or last is None:
        return
    stages_per_rank = int(parallel.stages_per_rank or 0) or (2 if "interleaved" in parallel.schedule else 1)
    ratio = expected_idle(
        parallel.schedule, ranks=stages, microbatches=last + 1, times=(1.0, 1.0, 1.0), stages_per_rank=stages_per_rank
    )
    if ratio is not None:
        yield Sample("rankscope_bubble_planned_ratio", ratio)


def account_samples(
    source: Source, stall: StallPolicy, now_ns: int | None, manifest: Mapping[str, Any]
) -> Iterator[Sample]:
    """How the time of the whole run was spent; `now_ns` is None once the run has ended."""
    account = measure(source, stall, now_ns)
    if account is None:
        return
    known = account.known_seconds
    for category, seconds in known.items():
        yield Sample("rankscope_time_seconds", seconds, {"category": category})
    if account.goodput_ratio is not None:
        yield Sample("rankscope_goodput_ratio", account.goodput_ratio)
        if "bubble" in known:
            yield Sample("rankscope_bubble_ratio", known["bubble"] / account.wall_s)
    yield Sample("rankscope_steps_total", account.num_kept)
    yield Sample("rankscope_steps_discarded_total", account.num_discarded)
    ((tokens,),) = source.rows("SELECT sum(tokens) FROM steps WHERE rank >= 0 AND coalesce(committed, true)")
    yield Sample("rankscope_tokens_total", int(tokens or 0) // token_copies(source, manifest))


def rank_samples(source: Source, log: EventLog) -> Iterator[Sample]:
    """State, host, device, speed and memory of each rank of the newest attempt."""
    numbers = attempts(source)
    if not numbers or missing_tables(source, "ranks"):
        return
    attempt = numbers[-1]
    exits = log.of(event_kinds.RANK_EXIT, attempt=attempt)
    dead = {e.integer("exit_rank") for e in exits if e.text("signal") or e.integer("exit_code", 0)}
    closed = {event.rank for event in log.of(event_kinds.RANK_CLOSED, attempt=attempt)}
    states = {
        event.integer("state_rank"): event.text("state") for event in log.of(event_kinds.RANK_STATE, attempt=attempt)
    }
    dead |= {rank for rank, state in states.items() if state == "dead"} - closed
    for rank, local_rank, host, uuid in source.rows(
        "SELECT rank, arg_max(local_rank, wall_ns), arg_max(host, wall_ns), arg_max(device_uuid, wall_ns) FROM ranks "
        "WHERE attempt = ? AND rank >= 0 GROUP BY rank ORDER BY rank",
        [attempt],
    ):
        labels = {"rank": str(rank)}
        info = {
            "local_rank": "" if local_rank is None else str(local_rank),
            "host": host or "",
            "gpu_uuid": uuid or "",
        }
        yield Sample("rankscope_rank_info", 1, labels | info)
        if rank not in closed or rank in dead:  # no sample for a rank that has finished: it is neither up nor lost
            yield Sample("rankscope_rank_up", float(rank not in dead), labels)
    if missing_tables(source, "steps"):
        return
    ((newest,),) = source.rows(f"SELECT max(step) FROM steps WHERE {_NEWEST}")
    for rank, step, end_ns, took, own, memory in source.rows(
        f"SELECT rank, max(step), max(start_ns + duration_ns), median(duration_ns), "
        f"median({OWN_WORK}), arg_max(memory_bytes, step) FROM steps "
        f"WHERE {_NEWEST} AND step > ? GROUP BY rank ORDER BY rank",
        [(newest or 0) - WINDOW_STEPS],
    ):
        labels = {"rank": str(rank)}
        yield Sample("rankscope_rank_step", step, labels)
        yield Sample("rankscope_rank_last_record_timestamp_seconds", end_ns / 1e9, labels)
        yield Sample("rankscope_rank_step_duration_seconds", took / 1e9, labels)
        if own is not None:
            yield Sample("rankscope_rank_own_seconds", own / 1e9, labels)
        if memory is not None:
            yield Sample("rankscope_rank_memory_bytes", memory, labels)


def finding_samples(source: Source, attempt: int, now_ns: int) -> Iterator[Sample]:
    """Findings as `watch` reported them, and the findings of `attempt` that are still open."""
    if missing_tables(source, "findings"):
        return
    newest_ns: dict[str, int] = {}
    for kind, severity, fired, last_ns in source.rows(
        "SELECT finding_kind, severity, count(*), max(wall_ns) FROM findings WHERE status = 'fired' "
        "GROUP BY ALL ORDER BY ALL"
    ):
        newest_ns[kind] = max(last_ns, newest_ns.get(kind, 0))
        yield Sample("rankscope_findings_total", fired, {"kind": str(kind), "severity": str(severity)})
    for kind, last_ns in newest_ns.items():
        yield Sample("rankscope_last_finding_timestamp_seconds", last_ns / 1e9, {"kind": str(kind)})
    counts: Counter[tuple[str, str]] = Counter()
    for finding in _open_findings(source, attempt, now_ns):
        counts[finding.kind, finding.severity] += 1
        labels = {
            "kind": finding.kind,
            "severity": finding.severity,
            "culprit": ranks_text(finding.ranks) if finding.ranks else "the run",
            "cause": finding.cause.replace("_", " "),
        }
        yield Sample("rankscope_finding_info", 1, labels)
        factor = evidence_of(finding).get("factor_ratio")
        if finding.kind == "straggler" and factor is not None and is_number(factor):
            for rank in finding.ranks:
                labels = {"rank": str(rank), "cause": finding.cause}
                yield Sample("rankscope_straggler_excess_ratio", float(factor) - 1, labels)
    for (kind, severity), count in counts.items():
        yield Sample("rankscope_findings", count, {"kind": kind, "severity": severity})


def _open_findings(source: Source, attempt: int, now_ns: int) -> list[Finding]:
    """Open findings: lasting kinds until they are reported as over, incidents for `OPEN_FOR_S` after their report."""
    reports: dict[tuple[object, ...], tuple[Finding, int]] = {}
    for kind, severity, status, ranks, first_step, cause, evidence, wall_ns in source.rows(
        "SELECT finding_kind, severity, status, finding_ranks, first_step, cause, evidence, wall_ns FROM findings "
        "WHERE attempt = ? ORDER BY wall_ns DESC LIMIT ?",
        [attempt, MAX_REPORTS],
    ):
        finding = Finding(
            analyzer="", kind=str(kind), severity=severity, status=status, summary="", ranks=tuple(ranks or ()),
            first_step=first_step, cause=str(cause or ""), evidence=parsed_detail(evidence), attempt=attempt,
        )  # fmt: skip
        reports.setdefault(finding.identity, (finding, wall_ns))
    oldest_ns = now_ns - OPEN_FOR_S * 10**9
    return [
        finding
        for finding, wall_ns in reports.values()
        if finding.status == "fired" and (may_last(finding.kind) or wall_ns > oldest_ns)
    ]


def recovery_samples(log: EventLog) -> Iterator[Sample]:
    """Rollbacks, skipped batches and deaths of ranks."""
    rollbacks = log.of(event_kinds.ROLLBACK)
    yield Sample("rankscope_rollbacks_total", len(rollbacks))
    if rollbacks:
        yield Sample("rankscope_last_rollback_timestamp_seconds", rollbacks[-1].wall_ns / 1e9)
    yield Sample(
        "rankscope_batches_skipped_total", len({e.detail.get("batch_index") for e in log.of(event_kinds.BATCH_SKIPPED)})
    )
    died = [e for e in log.of(event_kinds.RANK_EXIT) if e.text("signal") or e.integer("exit_code", 0)]
    yield Sample("rankscope_rank_deaths_total", len(died))
