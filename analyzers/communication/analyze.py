"""Cost of communication: how much of it is exposed, its bandwidth, and what would make it cheaper.

    findings = communication(store, Scope())       # kinds exposed_communication, low_bandwidth, small_buckets

1. `account.device.exposure` separates exposed from overlapped communication. The share of exposed transfers is always
   reported, as advice if it is at least `SHARED.cost_ratio` of the step. Waits for late ranks do not count: they are
   the cost of stragglers.
2. `bandwidth` compares each operation, size and group with the fastest of the run. If large messages along one mesh
   dimension are slower by `SHARED.clear_factor` than along another, advice says that its links are slower.
3. Gradient buckets are too small if their latency exceeds the time to move their bytes, and merging them would save
   `SHARED.saving_ratio` of the step.

These findings are about the setup of the run. Faults are found elsewhere: a group slower than its peers is a slow link
(`link_search`, kind straggler), and a slowdown of the transfers of all groups is a throughput drop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from analyzers.account.device.exposure import Exposure, measure
from analyzers.account.device.measured_by import is_stamped
from analyzers.account.device.trace_check import contradiction
from analyzers.analysis import Analysis
from analyzers.communication.bandwidth import CallClass, call_classes, latency_ms
from analyzers.communication.policy import CommunicationPolicy
from analyzers.finding import Finding, evidence_of
from analyzers.policy import SHARED
from analyzers.run.calls.snapshot import attempts
from analyzers.run.records.elsewhere import ranks_with_lost_calls, ranks_without_steps
from analyzers.run.records.not_recorded import missing, not_recorded
from analyzers.run.records.shared_devices import devices_are_shared
from analyzers.scope import Scope
from analyzers.source import Source, lacking
from analyzers.wording import group_text, is_number, number, percent, ranks_text, rate_text

__all__ = ["ANALYSES", "communication"]

_SHOWN_CLASSES = 8
_GRADIENTS = ("all_reduce", "reduce_scatter")
_UNKNOWN_IDLE = "stalls of a device include the idle time of its pipeline, which is not known"


def communication(source: Source, scope: Scope, policy: CommunicationPolicy | None = None) -> list[Finding]:
    """Analyze the newest attempt with enough steps; a run of one rank has no findings."""
    policy = policy or CommunicationPolicy()
    needed = {"collectives": ("step", "op", "process_group", "bytes", "issue_ns", "end_ns"), "steps": ("duration_ns",)}
    if absent := lacking(source, **needed):
        if "steps" not in absent:
            ((num_ranks,),) = source.rows("SELECT count(DISTINCT rank) FROM steps WHERE rank >= 0")
            if num_ranks < 2:
                return []
        return [_insufficient(not_recorded(absent), missing(absent))]
    if lacking(source, collectives=("wait_ns",)) and not any(
        is_stamped(source, attempt) for attempt in attempts(source)
    ):
        return [
            _insufficient(
                "the time for which ranks were blocked in calls was not recorded", missing(["collectives.wait_ns"])
            )
        ]
    for attempt in reversed(attempts(source)):
        if scope.attempt not in (None, attempt):
            continue
        if absent_ranks := ranks_without_steps(source, attempt):
            who = ranks_text(sorted(absent_ranks))
            return [_insufficient(f"there are no records of {who}, so waiting for them would count as transfer time")]
        if lost := ranks_with_lost_calls(source, attempt):
            who = ranks_text(sorted(lost))
            return [_insufficient(f"records of calls of {who} were lost, so waiting would count as transfer time")]
        ((first,),) = source.rows("SELECT min(step) FROM steps WHERE attempt = ?", [attempt])
        measured = measure(source, attempt, since_step=max(scope.since_step, (first or 0) + SHARED.warm_up_steps))
        if contradicted := contradiction(source, attempt):
            return [_insufficient(contradicted)]
        if measured.has_unknown_idle:
            return [_insufficient(_UNKNOWN_IDLE)]
        if measured.num_steps >= SHARED.min_steps:
            # If ranks share a device, there is no planned share: a plan knows only the links between devices.
            planned_ratio = None if devices_are_shared(source) else _planned_ratio(scope.manifest)
            return _findings(source, attempt, measured, policy, planned_ratio)
    ((num_ranks,),) = source.rows("SELECT count(DISTINCT rank) FROM steps WHERE rank >= 0")
    if num_ranks < 2:
        return []
    return [_insufficient(f"it needs {SHARED.min_steps} steps with collectives after the first {SHARED.warm_up_steps}")]


def _planned_ratio(manifest: Mapping[str, Any]) -> float | None:
    """Share of the step that the trainer's plan expects for exposed communication."""
    plan = manifest.get("planned")
    ratio: Any = plan.get("communication_ratio") if isinstance(plan, Mapping) else None
    return float(ratio) if is_number(ratio) and 0 <= ratio <= 1 else None


def _findings(
    source: Source, attempt: int, measured: Exposure, policy: CommunicationPolicy, planned_ratio: float | None
) -> list[Finding]:
    phases = [
        str(phase)
        for (phase,) in source.rows(
            "SELECT DISTINCT phase FROM collectives WHERE attempt = ? AND phase NOT IN ('checkpoint', 'evaluate', '')",
            [attempt],
        )
    ]
    classes = call_classes(source, attempt, phases=phases)
    found = [_exposed(attempt, measured, classes, planned_ratio, policy)]
    if slow := _slow_dimension(attempt, classes, policy):
        found.append(slow)
    ((num_steps,),) = source.rows("SELECT count(DISTINCT step) FROM collectives WHERE attempt = ?", [attempt])
    # Leave out sizes that are also reduced in a forward pass: these are activations of tensor or sequence parallelism,
    # not gradients.
    rows = source.rows(
        "SELECT DISTINCT op, process_group, bytes FROM collectives WHERE attempt = ? AND phase = 'forward'", [attempt]
    )
    activations = {(str(op), str(group), int(size or 0)) for op, group, size in rows}
    if small := _small_buckets(attempt, measured, classes, activations, num_steps, policy):
        found.append(small)
    return found


def _exposed(
    attempt: int,
    measured: Exposure,
    classes: Sequence[CallClass],
    planned_ratio: float | None,
    policy: CommunicationPolicy,
) -> Finding:
    exposed, transfer = measured.ratio(measured.exposed_ms), measured.ratio(measured.transfer_ms)
    busy = float(measured.busy_ms.sum())
    hidden = float(measured.overlapped_ms.sum()) / busy if busy else 0.0
    step_ms = float(np.median(measured.step_ms))
    is_costly = transfer >= SHARED.cost_ratio
    planned = "" if planned_ratio is None else f" (planned: {percent(planned_ratio)})"
    return Finding(
        analyzer="communication",
        kind="exposed_communication",
        severity="info",
        status="advice" if is_costly else "ok",
        first_step=int(measured.step.min()),
        last_step=int(measured.step.max()),
        cause="transfer" if is_costly else "",
        summary=f"Exposed communication, not counting waits for stragglers, takes {100 * transfer:.0f} % of the step "
        f"time{planned} from step {int(measured.step.min())} to {int(measured.step.max())}. "
        f"{100 * hidden:.0f} % of all communication is overlapped.",
        evidence={
            "exposed_ratio": round(exposed, 4),
            "exposed_transfer_ratio": round(transfer, 4),
            "waiting_for_late_ratio": round(max(0.0, exposed - transfer), 4),
            "overlapped_ratio": round(hidden, 4),
            **({} if planned_ratio is None else {"planned_ratio": round(planned_ratio, 4)}),
            **_latency(classes, policy),
            "exposed_ms": round(exposed * step_ms, 3),
            "step_ms": round(step_ms, 3),
            "steps_measured": measured.num_steps,
            "classes": [_class_evidence(one) for one in classes[:_SHOWN_CLASSES]],
        },
        advice="exposed-communication",
        attempt=attempt,
    )


def _latency(classes: Sequence[CallClass], policy: CommunicationPolicy) -> dict[str, float]:
    """Evidence: the share of the transfer time that the bytes do not explain at the run's best bandwidth, and this
    bandwidth; empty if a small message reached it."""
    best = max(classes, key=lambda one: one.bus_gb_per_s, default=None)
    if best is None or best.num_bytes < policy.large_bytes:
        return {}
    lost_ms = sum(latency_ms(one, best.bus_gb_per_s) * one.num_calls for one in classes)
    whole_ms = sum(one.transfer_ms * one.num_calls for one in classes)
    return {"latency_ratio": round(lost_ms / whole_ms, 4), "best_gb_per_s": float(f"{best.bus_gb_per_s:.4g}")}


def _class_evidence(one: CallClass) -> dict[str, object]:
    return {
        "op": one.op,
        "process_group": one.process_group,
        "bytes": one.num_bytes,
        "num_members": one.num_members,
        "transfer_ms": round(one.transfer_ms, 4),
        "bus_gb_per_s": float(f"{one.bus_gb_per_s:.4g}"),
        "relative_bandwidth_ratio": round(one.relative_bandwidth_ratio, 4),
    }


def _slow_dimension(attempt: int, classes: Sequence[CallClass], policy: CommunicationPolicy) -> Finding | None:
    """Find a mesh dimension along which even the fastest large messages are much slower than along another."""
    fastest: dict[str, CallClass] = {}
    for one in classes:
        if one.num_bytes >= policy.large_bytes and one.num_members > 1:
            known = fastest.get(one.dimension)
            if known is None or one.bus_gb_per_s > known.bus_gb_per_s:
                fastest[one.dimension] = one
    if len(fastest) < 2:
        return None
    ordered = sorted(fastest.values(), key=lambda one: one.bus_gb_per_s)
    slow, best = ordered[0], ordered[-1]
    factor = best.bus_gb_per_s / slow.bus_gb_per_s
    if factor < SHARED.clear_factor:
        return None
    return Finding.advise(
        "communication",
        "low_bandwidth",
        f"Link bandwidth of {slow.text} is {rate_text(slow.bus_gb_per_s)}, {factor:.1f}x less than that of "
        f"{best.text} ({rate_text(best.bus_gb_per_s)}).",
        attempt=attempt,
        cause=slow.dimension,
        evidence={
            "factor_ratio": round(factor, 3),
            "bus_gb_per_s": float(f"{slow.bus_gb_per_s:.4g}"),
            "best_gb_per_s": float(f"{best.bus_gb_per_s:.4g}"),
            "transfer_ms": round(slow.transfer_ms, 4),
            "transfer_at_best_ms": round(slow.transfer_ms / factor, 4),
            "process_group": slow.process_group,
            "best_process_group": best.process_group,
        },
    )


def _small_buckets(
    attempt: int,
    measured: Exposure,
    classes: Sequence[CallClass],
    activations: Collection[tuple[str, str, int]],
    num_steps: int,
    policy: CommunicationPolicy,
) -> Finding | None:
    """Find gradient buckets of one group that are mostly latency; `activations` (op, group, bytes) are excluded."""
    step_ms = float(np.median(measured.step_ms))
    exposed_ms = measured.ratio(measured.transfer_ms) * step_ms
    best = max((one.bus_gb_per_s for one in classes), default=0.0)
    fastest_ms: dict[tuple[str, str, int], float] = {}
    for one in classes:
        kind = (one.dimension, one.op, one.num_bytes)
        fastest_ms[kind] = min(one.transfer_ms, fastest_ms.get(kind, one.transfer_ms))
    found: list[Finding] = []
    for group, op in sorted({(one.process_group, one.op) for one in classes if one.op in _GRADIENTS}):
        small = [
            one
            for one in classes
            if (one.process_group, one.op) == (group, op)
            and (op, group, one.num_bytes) not in activations
            and one.num_bytes >= SHARED.min_payload_bytes
            and latency_ms(one, best) >= SHARED.explained_ratio * one.transfer_ms
            # If equal calls of another group are much faster, the time is lost on a slow link.
            and one.transfer_ms < SHARED.slow_factor * fastest_ms[one.dimension, one.op, one.num_bytes]
        ]
        calls_per_step = sum(one.num_calls for one in small) / num_steps
        if calls_per_step < policy.min_buckets:
            continue
        lost_ms = sum(latency_ms(one, best) * one.num_calls for one in small) / num_steps
        # After merging, one call's latency remains. Latency that the backward pass already hides cannot be saved.
        gain_ms = min(lost_ms * (1 - 1 / calls_per_step), exposed_ms)
        if gain_ms < SHARED.saving_ratio * step_ms:
            continue
        mean_bytes = sum(one.num_bytes * one.num_calls for one in small) / sum(one.num_calls for one in small)
        found.append(
            Finding.advise(
                "communication",
                "small_buckets",
                f"{calls_per_step:.0f} {op} calls per step in {group_text(group)} are mostly latency "
                f"({mean_bytes / 2**10:,.0f} KiB each). "
                f"Larger buckets would save up to {number(gain_ms)} of {number(step_ms)} ms per step.",
                attempt=attempt,
                cause=op,
                evidence={
                    "calls_per_step": round(calls_per_step, 2),
                    "mean_bytes": round(mean_bytes),
                    "latency_ms": round(lost_ms / calls_per_step, 4),
                    "gain_ms": round(gain_ms, 3),
                    "gain_ratio": round(gain_ms / step_ms, 4),
                    "best_gb_per_s": float(f"{best:.4g}"),
                },
            )
        )
    return max(found, key=lambda one: float(evidence_of(one)["gain_ms"]), default=None)


_insufficient = partial(
    Finding.not_judged, "communication", "exposed_communication", "The cost of communication was not measured"
)


ANALYSES = (
    Analysis(
        kinds=("exposed_communication", "low_bandwidth", "small_buckets"),
        run=communication,
        records="sampled",
        advises=True,
    ),
)
