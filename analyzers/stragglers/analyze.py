"""Stragglers: who is slow, how much, since when, and why; with the evidence beside it.

    for finding in analyze(store):
        finding.ranks, finding.cause, finding.first_step, finding.evidence["pattern"]

1. `slow_rank` finds ranks that are persistently slower than their peers, in computing or in data; `slow_alone` those
   that became slower than they were, where no other rank has the same work (one rank a stage).
2. `witness` hears CPU time, the kernel's count of waits for a core, garbage collections and tokens: a rank whose core
   was taken (`host`) or whose sequences are longer (`sequence_length`) is no slow device. `device_beside` joins the
   readings of its GPU: a clock below those of its peers is the cause (`gpu_clock`).
3. `suspects` joins ranks of one node and ranks that are slow in turn, and says how the slowness lies in time.
4. `slow_group`: groups that do the same collective with the same size take the same time; a group whose transfers are
   persistently slow points to a link or, with several meshes, to a rank; unless a rank of it is slow meanwhile, for a
   cause that explains it.
5. Evidence: excess per phase, how often the rank arrived last in its collectives, step and run without it (`whatif`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from analyzers.account.timings import Timings, load_timings
from analyzers.communication.slow_group import slow_groups
from analyzers.communication.slow_link import SlowGroupPolicy, SlowLink
from analyzers.finding import Finding
from analyzers.run.snapshot import attempts
from analyzers.source import Source, missing_tables
from analyzers.stragglers.arrivals import load_arrivals
from analyzers.stragglers.corroboration import Witness, load_witness
from analyzers.stragglers.cost import cost_of, cost_of_link
from analyzers.stragglers.device_comparison import load_device
from analyzers.stragglers.single_rank import find_slower_alone
from analyzers.stragglers.slow_rank import Straggler, StragglerPolicy, find_stragglers
from analyzers.stragglers.suspects import Suspect, suspects, with_device

__all__ = ["analyze"]

SHOWN_RANKS = 8
SLOWS_TRANSFERS = ("compute", "host")
"""Causes of a slow rank that also slow its transfers."""


def analyze(source: Source, policy: StragglerPolicy | None = None) -> list[Finding]:
    """Findings of kind `straggler` with cause compute, data, host, sequence_length or communication, by attempt."""
    policy = policy or StragglerPolicy()
    if missing_tables(source, "steps"):
        return [_insufficient("no steps are recorded")]
    findings: list[Finding] = []
    judged = False
    for attempt in attempts(source):
        timings = load_timings(source, attempt, since_step=policy.since_step, skip_first=policy.warm_up_steps)
        if timings is None or len(timings.ranks) < 2:
            continue
        judged |= _can_judge(timings, policy)
        stragglers = _main_causes([*find_stragglers(timings, policy), *find_slower_alone(timings, policy)], policy)
        found: list[Suspect] = []
        if stragglers:
            found = suspects(
                stragglers, _witnesses(source, timings, stragglers), _nodes(source, attempt), int(timings.steps.min())
            )
            findings += [_finding(source, timings, _seen(source, timings, suspect), policy) for suspect in found]
        findings += _communication(source, timings, policy, found)
    if not judged and not findings:
        ((world_size,),) = source.rows("SELECT count(DISTINCT rank) FROM steps")
        if world_size > 1:
            with_peers = policy.warm_up_steps + policy.persistence.min_length
            by_itself = policy.warm_up_steps + policy.change.min_before + policy.change.min_length
            why = f"it takes {with_peers} steps of ranks with the same work, {by_itself} of one against its own past"
            return [_insufficient(why)]
    return findings


def _main_causes(stragglers: Sequence[Straggler], policy: StragglerPolicy) -> list[Straggler]:
    """Without what is but a side effect of a rank's larger cause, whichever way each of them was found."""
    largest: dict[int, float] = {}
    for straggler in stragglers:
        largest[straggler.rank] = max(straggler.excess_ms, largest.get(straggler.rank, 0.0))
    return [s for s in stragglers if s.excess_ms >= policy.second_cause_ratio * largest[s.rank]]


def _can_judge(timings: Timings, policy: StragglerPolicy) -> bool:
    """Whether there are enough steps to compare a rank with its peers, or with its own past if it has none."""
    num_steps, has_peers = len(timings.steps), any(len(peers) > 1 for peers in timings.peers)
    least = policy.persistence.min_length if has_peers else policy.change.min_before + policy.change.min_length
    return num_steps >= least


def _witnesses(source: Source, timings: Timings, stragglers: Sequence[Straggler]) -> dict[tuple[int, str], Witness]:
    found: dict[tuple[int, str], Witness] = {}
    for straggler in stragglers:
        peers = timings.ranks.tolist() if straggler.alone else _peers_of(timings, straggler)
        heard = load_witness(
            source, timings.attempt, straggler.rank, peers, straggler.first_step, straggler.last_step,
            means=straggler.paused_ratio > 0,
        )  # fmt: skip
        if straggler.alone:  # others do other work, but wait for a core, page and collect garbage as little
            heard = replace(heard, cpu_ms=None, cpu_ratio=None, tokens_ratio=None)
        found[straggler.rank, straggler.cause] = heard
    return found


def _seen(source: Source, timings: Timings, suspect: Suspect) -> Suspect:
    """The suspect with what was read of its device meanwhile."""
    worst = suspect.worst
    peers = [rank for rank in _peers_of(timings, worst) if rank not in suspect.ranks]
    device = load_device(source, timings.attempt, worst.rank, peers, worst.first_step, worst.last_step)
    return with_device(suspect, device)


def _peers_of(timings: Timings, straggler: Straggler) -> list[int]:
    """The ranks with the same work, itself included."""
    groups = timings.data_peers if straggler.cause == "data" else timings.peers
    return next([int(r) for r in timings.ranks[rows]] for rows in groups if straggler.rank in timings.ranks[rows])


def _nodes(source: Source, attempt: int) -> dict[int, str]:
    """Each rank's node, as people call it; empty where it is not recorded."""
    if not source.has("ranks"):
        return {}
    rows = source.rows(
        "SELECT rank, arg_max(node_rank, wall_ns), arg_max(host, wall_ns) FROM ranks "
        "WHERE attempt = ? AND rank >= 0 GROUP BY rank",
        [attempt],
    )
    return {rank: f"node {node} ({host})" if host else f"node {node}" for rank, node, host in rows if node is not None}


# ---- findings ----


def _finding(source: Source, timings: Timings, suspect: Suspect, policy: StragglerPolicy) -> Finding:
    worst = suspect.worst
    cost = cost_of(source, timings, suspect)
    evidence: dict[str, Any] = {
        "pattern": suspect.pattern,
        "factor_ratio": round(worst.factor, 3),
        "excess_ms": round(worst.excess_ms, 3),
        "phase_factors_ratio": {p: _json_number(f) for p, f in worst.phase_factors.items()},
        "phase_excess_ms": {phase: round(value, 3) for phase, value in worst.phase_excess_ms.items()},
        "peers_wait_more_ms": round(worst.peers_wait_more_ms, 3),
        **cost.evidence(),
        "steps_slow": worst.num_steps,
        "agreeing_steps_ratio": round(min(segment.agreement for segment in worst.segments), 3),
        "noise_ratio": round(max(segment.noise for segment in worst.segments), 4),
        "episodes": sum(len(member.segments) for member in suspect.members),
        "ongoing": suspect.ongoing,
    }
    if worst.alone:
        evidence["compared_with"] = "its own past"
    if suspect.node:
        evidence["node"] = suspect.node
    if suspect.why:
        evidence["reason"] = suspect.why
    evidence |= suspect.witness.evidence() | (suspect.device.evidence() if suspect.device else {})
    arrivals = load_arrivals(source, timings.attempt, worst.rank, worst.first_step, worst.last_step)
    if arrivals.num_checked and not worst.alone:  # a stage keeps others waiting for its messages
        caused = arrivals.caused_wait_ratio
        evidence["arrives_last_ratio"] = round(arrivals.num_last / arrivals.num_checked, 3)
        evidence["caused_wait_ratio"] = None if caused is None else round(caused, 3)
        evidence["collectives_checked"] = arrivals.num_checked
    return Finding(
        analyzer="straggler",
        kind="straggler",
        severity="critical" if cost.speedup >= policy.critical_slowdown_ratio else "warning",
        status="fired",
        summary=_summary(suspect),
        ranks=suspect.ranks,
        first_step=suspect.first_step,
        last_step=suspect.last_step,
        cause=suspect.cause,
        evidence=evidence,
        advice=f"straggler-{suspect.cause.replace('_', '-')}",
        attempt=timings.attempt,
        cost_s=round(cost.saved_s, 3),
    )


def _summary(suspect: Suspect) -> str:
    worst = suspect.worst
    listed = ", ".join(map(str, suspect.ranks[:SHOWN_RANKS])) + (", ..." if len(suspect.ranks) > SHOWN_RANKS else "")
    measure = "what it took before" if worst.alone else "the median rank"
    excess = f"+{worst.excess_ms:.3g} ms per step ({worst.factor:.2f}x {measure})"
    steps = f"steps {suspect.first_step} to {suspect.last_step}"
    if suspect.node:
        who, amount = f"{suspect.node}, ranks {listed}, is slow", f"up to {excess}"
    elif suspect.pattern == "rotating":
        who, amount = f"ranks {listed} are stragglers in turn", f"up to {excess}"
    else:
        who, amount = f"rank {worst.rank} is a straggler", excess
    when = {
        "chronic": f"since step {suspect.first_step}, the first that was compared",
        "since": f"since step {suspect.first_step}",
        "transient": f"from step {suspect.first_step} to {suspect.last_step}, then over",
        "intermittent": f"again and again in {steps} ({len(worst.segments)} times)",
        "pauses": f"in {100 * worst.paused_ratio:.0f} % of {steps}, in which it pauses",
        "rotating": f"in {steps}",
    }[suspect.pattern]
    reason = f": {suspect.why}" if suspect.why else ""
    return f"{who} {when}: {amount} in {suspect.cause.replace('_', ' ')}{reason}"


def _json_number(value: float) -> float | None:
    return round(value, 3) if np.isfinite(value) else None


def _communication(
    source: Source, timings: Timings, policy: StragglerPolicy, found: Sequence[Suspect]
) -> list[Finding]:
    if missing_tables(source, "collectives") or len(timings.steps) < policy.persistence.min_length:
        return []
    slow = slow_groups(source, timings.attempt, policy.slow_group, since_step=int(timings.steps.min()))
    step_ms = float(np.nanmedian(timings.duration))
    findings = []
    for link in slow:
        if not link.is_worth_telling(step_ms, policy.slow_group):
            continue
        if any(_explains(suspect, link, timings, policy.slow_group) for suspect in found):
            continue
        beside = "before" if link.alone else "between the others" if link.is_pair else "in the groups beside it"
        when = f"since step {link.first_step}" if link.ongoing else f"from step {link.first_step} to {link.last_step}"
        cost = None if link.is_pair else cost_of_link(source, timings, link)
        findings.append(
            Finding(
                analyzer="straggler",
                kind="straggler",
                severity="warning",
                status="fired",
                summary=f"{link.text} is slow in communication {when}: {_what(link)} takes "
                f"{link.factor:.1f}x as long as {beside} (+{link.excess_ms:.3g} ms per step)",
                ranks=link.ranks,
                first_step=link.first_step,
                last_step=link.last_step,
                cause="communication",
                evidence={
                    "process_groups": list(link.groups),
                    "op": link.op,
                    "bytes": link.num_bytes,
                    "factor_ratio": round(link.factor, 3),
                    "excess_ms": round(link.excess_ms, 3),
                    "transfer_ms": round(link.transfer_ms, 3),
                    "transfer_before_ms" if link.alone else "transfer_of_others_ms": round(link.others_ms, 3),
                    **(cost.evidence() if cost else {}),
                },
                advice="straggler-communication",
                attempt=timings.attempt,
                cost_s=round(
                    cost.saved_s if cost else link.excess_ms * (link.last_step - link.first_step + 1) / 1e3, 3
                ),
            )
        )
    return findings


def _explains(suspect: Suspect, link: SlowLink, timings: Timings, policy: SlowGroupPolicy) -> bool:
    """Whether a slow rank is why transfers with it take longer: one that computes slowly or lacks a core moves its
    bytes slowly, too, while it does. Who loads for long, or has more tokens, is late and then as fast as ever."""
    if suspect.cause not in SLOWS_TRANSFERS:
        return False
    slow = np.zeros(len(timings.steps), dtype=bool)
    for member in suspect.members:
        for segment in member.segments if member.rank in link.ranks else ():
            slow[segment.begin : segment.end] = True
    of_link = (timings.steps >= link.first_step) & (timings.steps <= link.last_step)
    return bool(slow[of_link].sum() >= max(1.0, policy.explained_share_ratio * of_link.sum()))


def _what(link: SlowLink) -> str:
    if link.is_pair:
        return f"a message of {link.num_bytes / 2**10:,.0f} KiB"
    return f"{link.op} in {', '.join(link.groups)}"


def _insufficient(why: str) -> Finding:
    return Finding.insufficient("straggler", "straggler", f"ranks were not compared: {why}")
