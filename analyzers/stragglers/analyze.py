"""Stragglers: slow ranks, nodes and links, with onset, cost and cause; and drops in throughput.

    for finding in stragglers(store, Scope()):
        finding.ranks, finding.cause, finding.first_step, finding.evidence["pattern"]

1. `peer_comparison` finds ranks that are persistently slower than their peers, in computing, in data or between phases.
   If no other rank has the same work, `past_comparison` finds ranks that became slower than they were.
2. `corroboration` compares CPU time, waits for a core, garbage collections and tokens. A rank's device is not slow if
   another process took its core (`host`) or its sequences are longer (`sequence_length`). `device_comparison` reads the
   GPU: a clock below its peers' is the cause (`gpu_clock`). If the rank computes more, `onset` finds the first slow
   step from its CPU time.
3. `suspects` joins ranks of one node and ranks that are slow in turn, and names the pattern in time.
4. `slow_link_findings` reports persistently slow transfers of a group, which point to a link or a rank. They are not
   reported if a rank of the group is slow at the same time for a cause that explains them.
5. Evidence: excess per phase, how often the rank arrived last in its collectives, and how long step and run would be
   without the rank (`cost`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from analyzers.account.device.device_timings import DEVICE
from analyzers.account.timings import WHOLE_STEP, Timings, load_timings
from analyzers.analysis import Analysis
from analyzers.communication.link_search import slow_links
from analyzers.communication.slow_link import SlowLink
from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.profiling.captures import EVENTS as PROFILE_EVENTS
from analyzers.profiling.captures import against_peer
from analyzers.run.calls.snapshot import attempts
from analyzers.run.records.event_log import EventLog
from analyzers.scope import Scope
from analyzers.source import Source, missing_tables
from analyzers.stragglers.comparison.arrivals import load_arrivals, without_late_by_others
from analyzers.stragglers.comparison.corroboration import Counters, load_counters
from analyzers.stragglers.comparison.cpu_comparison import find_more_work
from analyzers.stragglers.comparison.device_comparison import load_device
from analyzers.stragglers.comparison.device_or_host import is_late_as_peers, late_side
from analyzers.stragglers.comparison.peer_comparison import (
    Straggler,
    find_stragglers,
    within_step_growth,
    without_side_effects,
)
from analyzers.stragglers.cost import cost_of
from analyzers.stragglers.onsets.host_onset import with_host_onset
from analyzers.stragglers.onsets.onset import with_onset
from analyzers.stragglers.onsets.past_comparison import find_slower_than_before
from analyzers.stragglers.onsets.periodic_work import throughput
from analyzers.stragglers.policy import StragglerPolicy, ThroughputPolicy
from analyzers.stragglers.slow_link_findings import slow_link_findings
from analyzers.stragglers.slow_place import host_place, named_phase, slow_line
from analyzers.stragglers.summary import straggler_summary
from analyzers.stragglers.suspects import Suspect, is_duty, suspects, with_device
from probes.step_clock import GAPS
from probes.tape import event_kinds

__all__ = ["ANALYSES", "OF_FILES", "slow_ranks", "stragglers"]

_GAPS_OF_GPUS = "The time between phases was not compared over ranks: on a GPU it is time of the host only."


def stragglers(source: Source, scope: Scope, policy: StragglerPolicy | None = None) -> list[Finding]:
    """Report stragglers with cause compute, data, host, sequence_length, gpu_clock or communication, by attempt.

    In a live run only stragglers that are slow now and cause the slowdown are reported.
    """
    policy = policy or StragglerPolicy()
    if missing_tables(source, "steps"):
        return [_insufficient("no steps are recorded")]
    findings: list[Finding] = []
    judged = is_whole = is_uncompared = False
    for attempt in attempts(source):
        if scope.attempt not in (None, attempt):
            continue
        timings = load_timings(source, attempt, since_step=scope.since_step, skip_first=SHARED.warm_up_steps)
        if timings is None or len(timings.ranks) < 2 or not len(timings.steps):
            continue
        is_uncompared |= timings.has_uncompared_gaps
        timings = timings.until_all_have(policy.node_lag_s)
        if not len(timings.steps):
            continue
        judged |= timings.has_enough_steps() and WHOLE_STEP not in timings.own
        is_whole |= WHOLE_STEP in timings.own
        links = slow_links(source, attempt, policy.slow_link, since_step=int(timings.steps.min()))
        slow, suspected = slow_ranks(source, timings, policy, links)
        findings += [*slow, *slow_link_findings(source, timings, links, policy, suspected)]
    if not judged and not findings:
        ((world_size,),) = source.rows("SELECT count(DISTINCT rank) FROM steps")
        if world_size > 1 and is_whole:
            return [_insufficient("no phase of a step was recorded, and ranks in lockstep have equal steps")]
        if world_size > 1:
            with_peers = SHARED.warm_up_steps + SHARED.min_steps
            by_itself = with_peers + SHARED.history
            why = f"it needs {with_peers} steps of ranks with the same work, {by_itself} of a rank without peers"
            return [_insufficient(why)]
    if scope.is_live:
        return [one for one in findings if one.evidence.get("ongoing", True) and one.status != "advice"]
    return findings + [Finding.insufficient("straggler", "straggler", _GAPS_OF_GPUS)] * is_uncompared


def _slower_steps(source: Source, scope: Scope) -> list[Finding]:
    """Return the findings of `throughput`. A rise of steps of which only the duration is known is left out if it begins
    with a slow rank: all ranks wait for it.
    """
    found = throughput(source, scope)
    if all(one.cause != "unknown" for one in found):
        return found
    onsets = [(one.attempt, one.first_step or 0) for one in stragglers(source, scope) if one.status == "fired"]
    reach = ThroughputPolicy().block
    return [one for one in found if one.cause != "unknown"
            or all(one.attempt != attempt or abs(step - (one.first_step or 0)) > reach for attempt, step in onsets)
            ]  # fmt: skip


def slow_ranks(
    source: Source, timings: Timings, policy: StragglerPolicy, links: Sequence[SlowLink] = ()
) -> tuple[list[Finding], list[Suspect]]:
    """Return findings and suspects for the slow ranks in the steps of `timings`, which may be a part of an attempt.
    `links`: the slow links of these steps, whose ranks may only look slow."""
    slow = [*find_stragglers(timings, policy), *find_slower_than_before(timings, policy)]
    if timings.is_on_device:
        slow = [one for one in slow if not _is_host_as_peers(source, timings, one)]
    if DEVICE in timings.own:
        slow = without_late_by_others(source, timings.attempt, _without_ends_of_links(slow, links))
    found = _suspects(source, timings, without_side_effects(slow), policy)
    more_work = find_more_work(source, timings, policy)
    found = [one for one in found if not any(_is_part_of(one, work) for work in more_work)]
    known = {rank for suspect in found for rank in suspect.ranks}
    found += _suspects(source, timings, [one for one in more_work if one.rank not in known], policy)
    return [_finding(source, timings, suspect) for suspect in found], found


def _is_part_of(suspect: Suspect, work: Straggler) -> bool:
    """Return True if a suspect is the rank of `work`, slow because of its work or its waits for a core, in only a part
    of the steps of `work`. On a busy machine a rank that computes more also waits longer for a core, but its wall time
    may show this later, or in fewer steps, than its CPU time.
    """
    slow = suspect.worst
    is_work = suspect.cause == "compute" or (suspect.cause == "host" and suspect.reason == "core")
    is_longer = max(slow.first_step - work.first_step, work.last_step - slow.last_step) >= SHARED.min_steps
    return is_work and suspect.ranks == (work.rank,) and is_longer


def _is_host_as_peers(source: Source, timings: Timings, slow: Straggler) -> bool:
    """Return True if a rank is slow because of its host, but the hosts of its peers are as slow."""
    if slow.cause != "compute" or not slow.has_peers:
        return False
    peers = _peers_of(timings, slow)
    side = late_side(source, timings, slow, peers)
    return side == "host" and is_late_as_peers(source, timings.attempt, slow, peers)


def _without_ends_of_links(slow: Sequence[Straggler], links: Sequence[SlowLink]) -> list[Straggler]:
    """Drop ranks that are slow only because of a slow link. On a GPU, time in which a rank waited for a transfer does
    not count as waiting for others, so it looks like own work."""
    clear = [link for link in links if link.has_peers and link.factor >= SHARED.clear_factor]

    def is_end(one: Straggler, link: SlowLink) -> bool:
        overlaps = one.first_step <= link.last_step and link.first_step <= one.last_step
        return one.rank in link.ranks and overlaps and one.excess_ms <= link.excess_ms

    return [one for one in slow if one.cause == "data" or not any(is_end(one, link) for link in clear)]


def _suspects(source: Source, timings: Timings, slow: Sequence[Straggler], policy: StragglerPolicy) -> list[Suspect]:
    if not slow:
        return []
    counters: dict[tuple[int, str], Counters] = {(one.rank, one.cause): _counters(source, timings, one) for one in slow}
    dated = [
        with_onset(
            source,
            timings,
            one,
            _peers_of(timings, one) if one.has_peers else [],
            counters[one.rank, one.cause],
            policy,
        )
        for one in slow
    ]
    nodes = _nodes(source, timings.attempt)
    found = suspects(dated, counters, nodes, int(timings.steps.min()), policy)
    return [_with_device(source, timings, suspect) for suspect in found]


def _counters(source: Source, timings: Timings, slow: Straggler) -> Counters:
    peers = _peers_of(timings, slow) if slow.has_peers else timings.ranks.tolist()
    spans = [(int(timings.steps[part.begin]), int(timings.steps[part.end - 1])) for part in slow.segments]
    judged = (int(timings.steps.min()), int(timings.steps.max()))
    counters = load_counters(
        source,
        timings.attempt,
        (slow.rank, spans),
        peers,
        judged=judged,
        means=slow.paused_ratio > 0,
    )
    if timings.is_on_device:
        return replace(counters, cpu_ms=None, cpu_ratio=None)
    if slow.has_peers:
        return counters
    # Other stages do different work, but their waits for a core, paging and garbage collections show what is usual.
    return replace(counters, cpu_ms=None, cpu_ratio=None, tokens_ratio=None)


def _with_device(source: Source, timings: Timings, suspect: Suspect) -> Suspect:
    worst = suspect.worst
    peers = [rank for rank in _peers_of(timings, worst) if rank not in suspect.ranks]
    span = (worst.rank, worst.first_step, worst.last_step)
    return with_device(suspect, load_device(source, timings.attempt, span, peers))


def _peers_of(timings: Timings, straggler: Straggler) -> list[int]:
    """Ranks with the same work, including the rank itself."""
    groups = timings.data_peers if straggler.cause == "data" else timings.peers
    return next([int(r) for r in timings.ranks[rows]] for rows in groups if straggler.rank in timings.ranks[rows])


def _nodes(source: Source, attempt: int) -> dict[int, str]:
    """Name of each rank's node; empty if not recorded."""
    if not source.has("ranks"):
        return {}
    rows = source.rows(
        "SELECT rank, arg_max(node_rank, wall_ns), arg_max(host, wall_ns) FROM ranks "
        "WHERE attempt = ? AND rank >= 0 GROUP BY rank",
        [attempt],
    )
    return {rank: f"node {node} ({host})" if host else f"node {node}" for rank, node, host in rows if node is not None}


# ---- findings ----


def _finding(source: Source, timings: Timings, suspect: Suspect) -> Finding:
    worst = suspect.worst
    is_lower_bound, side, by_host = DEVICE in timings.own, "", ""
    peers = _peers_of(timings, worst) if worst.has_peers else []
    place = worst.place
    place = "" if place in (WHOLE_STEP, DEVICE) else place
    if worst.cause == "compute" and timings.is_on_device:
        side = late_side(source, timings, worst, peers)
    # Own work shows no place if only collectives were recorded, nor if a host is late: once a host is no longer ahead
    # of its device, time that it spends in one phase makes it late in all phases. Then look at the host's times.
    if not place and (side == "host" or (is_lower_bound and not side)):
        found, _ = host_place(source, timings.attempt, worst, peers)
        if side or found in GAPS:
            place, by_host, side = found, found, "host"
    host_ms = 0.0
    if side == "host":
        _, host_ms = host_place(source, timings.attempt, worst, peers, place=place)
        worst = within_step_growth(timings, with_host_onset(source, timings, worst, place, peers))
        suspect = replace(suspect, members=(worst, *suspect.members[1:]))
    cost = cost_of(source, timings, suspect)
    counters = suspect.counters if worst.by_cpu else suspect.counters.within(worst.excess_ms)
    places = sorted(worst.phase_factors, key=lambda name: (name == "data") != (worst.cause == "data"))  # its own first
    evidence: dict[str, Any] = {
        "pattern": suspect.pattern,
        "factor_ratio": round(worst.factor, 3),
        "excess_ms": round(worst.excess_ms, 3),
        **(counters.evidence() if suspect.why else {}),  # if these values decided on the cause, they come first
        "phase_factors_ratio": {p: _json_number(worst.phase_factors[p]) for p in places},
        "phase_excess_ms": {p: round(worst.phase_excess_ms[p], 3) for p in places},
        **({"peers_wait_more_ms": round(worst.peers_wait_more_ms, 3)} if worst.peers_wait_more_ms > 0 else {}),
        **cost.evidence(),
        "steps_slow": worst.num_steps,
        "agreeing_steps_ratio": round(min(segment.agreement for segment in worst.segments), 3),
        "noise_ratio": round(max(segment.noise for segment in worst.segments), 4),
        "episodes": sum(len(member.segments) for member in suspect.members),
        "ongoing": suspect.ongoing,
    }
    if is_lower_bound:
        evidence["measured_by"] = "durations of calls over their members"
    if (1 - SHARED.equal_ratio) * host_ms > worst.excess_ms:
        evidence["host_excess_ms"] = round(host_ms, 3)
    if by_host:
        evidence["place_measured_by"] = "the host's spans"
    if worst.by_cpu:
        evidence["measured_by"] = "CPU time"
    if side:
        evidence["late_side"] = side
    if place:
        evidence["place"] = place
    phase = named_phase(source, timings.attempt, worst, peers) if not place or place in GAPS else ""
    if phase:
        evidence["named_phase"] = phase
    if not worst.has_peers:
        evidence["compared_with"] = "its own past"
    if suspect.node:
        evidence["node"] = suspect.node
    if suspect.why:
        evidence["reason"] = suspect.why
    if len(suspect.ranks) == 1:
        log = EventLog.load(source, (event_kinds.SLOW_LINE, *PROFILE_EVENTS))
        evidence |= slow_line(log, timings.attempt, suspect.ranks[0])
        evidence |= against_peer(log, timings.attempt, suspect.ranks[0])
    evidence |= counters.evidence() | (suspect.device.evidence() if suspect.device else {})
    if worst.has_peers:  # a rank alone in its stage is left out: other stages always wait for it
        arrivals = load_arrivals(source, timings.attempt, worst.rank, worst.first_step, worst.last_step)
        evidence |= arrivals.evidence()
    has_data_spans = bool((timings.own["data"] > 0).any())
    is_a_duty = is_duty(suspect, place, has_data_spans=has_data_spans)
    return Finding(
        analyzer="straggler",
        kind="straggler",
        severity="info" if is_a_duty else cost.severity(),
        status="advice" if is_a_duty else "fired",
        summary=straggler_summary(
            suspect,
            place,
            phase,
            first_compared=int(timings.steps.min()),
            side=side,
            is_lower_bound=is_lower_bound,
            has_data_spans=has_data_spans,
        ),
        ranks=suspect.ranks,
        first_step=suspect.first_step,
        last_step=suspect.last_step,
        cause=suspect.cause,
        evidence=evidence,
        advice=f"straggler-{suspect.cause.replace('_', '-')}",
        attempt=timings.attempt,
        cost_s=round(cost.saved_s, 3),
    )


def _json_number(value: float) -> float | None:
    return round(value, 3) if np.isfinite(value) else None


_insufficient = partial(Finding.not_judged, "straggler", "straggler", "Ranks were not compared")


OF_FILES = ("files.traces", "files.inspector")
ANALYSES = (
    Analysis(kinds=("straggler",), run=stragglers, records="compared", live="periodic"),
    Analysis(kinds=("throughput",), run=_slower_steps, records="compared"),
)
