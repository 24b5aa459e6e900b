"""Evidence and next step of stragglers and of drops in throughput."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from analyzers.finding import Finding, evidence_of
from analyzers.policy import SHARED
from analyzers.stragglers.comparison.corroboration import REASONS
from analyzers.stragglers.slow_place import PLACE_TEXTS, phase_text
from analyzers.wording import is_number, number, percent, ranks_text, signed

__all__ = ["NEXT", "WHY"]

_GAPS = {
    "before_forward": "before forward", "forward_to_backward": "forward to backward",
    "backward_to_optimizer": "backward to optimizer", "after_optimizer": "after optimizer",
}  # fmt: skip


def _straggler(finding: Finding) -> str:
    facts = evidence_of(finding)
    if finding.cause == "communication":
        others = f"{number(facts.get('transfer_of_others_ms'))} ms in the other groups"
        if "transfer_before_ms" in facts:
            others = f"{number(facts['transfer_before_ms'])} ms before"
        return f"A transfer takes {number(facts.get('transfer_ms'))} ms, against {others}."
    factors, excess = facts.get("phase_factors_ratio") or {}, facts.get("phase_excess_ms") or {}
    if "whole_step" in factors:  # no phases were recorded, only whole steps
        factors = {"whole step": factors["whole_step"]}
    phases = ", ".join(
        f"{_GAPS.get(name, name)} {value:.2f}x"
        if is_number(value) and value < 10
        else f"{_GAPS.get(name, name)} +{number(excess.get(name, 0))} ms"
        for name, value in factors.items()
        if name not in _GAPS or excess.get(name, 0) >= SHARED.cost_ratio * (facts.get("excess_ms") or 0)
    )
    others = "its own past" if facts.get("compared_with") else "its peers"
    caused: Any = facts.get("caused_wait_ratio")
    share = ""
    if is_number(caused) and round(caused, 2):
        share = f"caused {percent(caused)} of the waiting in collectives"
    if not phases:  # phases were not compared, only the order of arrival in collectives
        share = share and f" and {share}"
        return f"It was the last to enter {percent(facts.get('arrives_last_ratio'))} of the collectives{share}."
    where = ""
    if facts.get("measured_by") and not facts.get("place"):
        is_cpu_time = facts["measured_by"] == "CPU time"
        what = "These are wall times: CPU time is known for whole steps only"
        where = f" {what if is_cpu_time else 'Where in the step was not measured'}."
    gaps = [name for name in factors if f"{_GAPS.get(name, name)} +" in phases]
    total = facts.get("excess_ms")
    if gaps and is_number(total) and abs(excess.get(gaps[0], 0) - total) >= SHARED.equal_ratio * total:  # type: ignore[operator]
        phases += f", all together {total:+.1f} ms"
    longer = facts.get("host_excess_ms")
    hidden = (
        f" Its host takes {number(longer)} ms longer there, partly hidden because it runs ahead of its device."
        if longer
        else ""
    )
    return f"Against {others}: {phases}{share and f'. It {share}'}.{hidden}{_profile(facts) or _line(facts) or where}"


def _profile(facts: Mapping[str, Any]) -> str:
    """The operator with the largest excess over a peer, from a profiler capture of both."""
    operators = facts.get("profile_operators")
    if not isinstance(operators, list) or not operators:
        return ""
    steps = f"{facts.get('profile_first_step')} to {facts.get('profile_last_step')}"
    return f" A trace of steps {steps} has {operators[0]} a step against rank {facts.get('profile_peer_rank')}."


def _line(facts: Mapping[str, object]) -> str:
    """The line of code in which only this rank was sampled, not its peers."""
    if not facts.get("line"):
        return ""
    share = percent(facts.get("line_share_ratio"))
    return f" In {share} of {facts.get('num_stack_samples')} stacks it is in {facts['line']}."


def _throughput(finding: Finding) -> str:
    facts = finding.evidence
    if "factor_low_ratio" in facts:
        return f"A step takes {number(facts.get('step_ms'))} ms, against {number(facts.get('step_before_ms'))} ms."
    if finding.cause == "periodic":
        return f"{facts.get('times')} steps at regular intervals took {number(facts.get('slow_step_ms'))} ms."
    rises = ", ".join(
        f"{name.removesuffix('_rise_ms')} {signed(value)} ms"
        for name, value in facts.items()
        if name.endswith("_rise_ms") and is_number(value)
    )
    if not rises and "step_ms" not in facts:
        return "Every line after this step prints a lower throughput than the lines before it."
    if not rises:
        return (
            f"A step takes {number(facts.get('step_ms'))} ms, against {number(facts.get('step_before_ms'))} ms before."
        )
    return f"Changes per step: {rises}."


_HOST_NEXT = {
    "": "Check what else runs on the host of {rank} (top, numactl, cgroup limits), and swapping.",
    REASONS["gc"]: "Call `gc.freeze()` after start-up, or collect on all ranks in the same step.",
    REASONS["paging"]: "Check the memory of the host of {rank}: its pages were reclaimed (cgroup limit, swap).",
    REASONS["blocked"]: "Look at what {rank} waits for: its stacks (`rankscope stacks`), locks and disk.",
}


def _host_next(finding: Finding) -> str:
    reason, line = str(finding.evidence.get("reason")), finding.evidence.get("line")
    if reason == REASONS["blocked"] and line:  # stacks have been taken, so the line is known
        return f"Look at {line}, where {{rank}} waits: for a lock, a disk, the network or a sleep."
    return _HOST_NEXT.get(reason, _HOST_NEXT[""])


def _straggler_next(finding: Finding) -> str:
    rank = ranks_text(finding.ranks)
    if finding.status == "advice":
        return f"All ranks wait for {rank}, which may log or evaluate for them: do that less often, or in a thread."
    return {
        "compute": _compute_next(finding, rank),
        "gpu_clock": f"Check cooling, power and locked clocks of the GPU of {rank} (nvidia-smi -q -d CLOCK).",
        "data": f"Check the data loader and the disk on the host of {rank}.",
        "host": _host_next(finding).format(rank=rank),
        "sequence_length": "Balance the tokens per rank (pack or sort sequences by length).",
        "communication": f"Check the network card and the cable of {rank}.",
    }.get(finding.cause, f"Check {rank}.")


def _compute_next(finding: Finding, rank: str) -> str:
    facts = finding.evidence
    place, phase = str(facts.get("place")), facts.get("named_phase")
    where = phase_text(str(phase)) if phase else PLACE_TEXTS.get(place, "")
    if facts.get("late_side") == "host":
        return f"Look at what the host of {rank} does{where}: the device waits for its host there."
    if facts.get("reason"):  # `reason` is given if most of the excess is waiting for a core
        return f"Give the host of {rank} more cores or fewer processes, then look at what {rank} computes{where}."
    if phase or place in _GAPS:
        return f"Look at what {rank} computes{where}: most of its lost time is there."
    return f"Check clocks, temperature and other jobs on the device and host of {rank}."


def _throughput_next(finding: Finding) -> str:
    if finding.cause == "between_runs":
        return "Check what differs between the runs: code, settings, versions, hosts."
    if finding.cause == "periodic" and "core_wait_excess_ms" in finding.evidence:
        return "Give the host more cores or fewer processes."
    if finding.cause == "periodic":
        return "Find what runs at this interval: evaluation, checkpoints, logging, opening a shard, garbage collection."
    return "Check what changed for all ranks at that step: clocks, a shared disk, the network, the data."


WHY: Mapping[str, Callable[[Finding], str]] = {"straggler": _straggler, "throughput": _throughput}
NEXT: Mapping[str, Callable[[Finding], str]] = {"straggler": _straggler_next, "throughput": _throughput_next}
