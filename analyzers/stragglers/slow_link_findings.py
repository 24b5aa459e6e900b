"""Findings of slow links: kind `straggler`, cause `communication`.

These links are not reported:

* a link of a rank that is slow at the same time for a cause that also slows its transfers,
* a link that is only slower than before while its ranks wait for cores, because transfers through the host wait too,
* a link that was slow for no longer than a burst of another job lasts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from analyzers.account.timings import Timings
from analyzers.communication.network_links import slowest_link
from analyzers.communication.slow_link import SlowLink
from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.source import Source
from analyzers.stragglers.cost import cost_of_link
from analyzers.stragglers.policy import StragglerPolicy
from analyzers.stragglers.suspects import Suspect
from analyzers.wording import group_text, number, sentence

__all__ = ["slow_link_findings"]

MAX_RANKS = 32
"""Maximum number of a link's ranks for which waits are read."""
SLOWS_TRANSFERS = ("compute", "host")
"""Causes of a slow rank that also slow its transfers, while it computes or lacks a core. A rank that loads for long, or
has more tokens, is late, but its transfers are as fast as usual.
"""


def slow_link_findings(
    source: Source, timings: Timings, links: Sequence[SlowLink], policy: StragglerPolicy, found: Sequence[Suspect]
) -> list[Finding]:
    """Report the slow links of one attempt that no suspect in `found` explains."""
    if len(timings.steps) < SHARED.min_steps:
        return []
    step_ms = float(np.median(timings.duration))
    return [
        _finding(source, timings, _with_route(source, timings.attempt, link))
        for link in links
        if link.is_significant(step_ms)
        and _outlasts_bursts(timings, link, policy)
        and not any(_explains(suspect, link, timings) for suspect in found)
        and not (not link.has_peers and _is_crowded(source, timings.attempt, link))
    ]


def _outlasts_bursts(timings: Timings, link: SlowLink, policy: StragglerPolicy) -> bool:
    """Decide whether the slowdown lasted longer than a burst of another job, in seconds, because steps may be short."""
    limits = policy.slow_link
    if link.has_peers:
        least_s = SHARED.repeats * SHARED.block_steps * policy.burst_step_s
    else:
        least_s = limits.min_rise_s * (SHARED.agreement_ratio if timings.is_on_device else 1.0)
    during = (timings.steps >= link.first_step) & (timings.steps <= link.last_step)
    if not during.any():
        return False
    step_s = float(np.mean(np.median(timings.duration[:, during], axis=0))) / 1e3
    return (link.last_step - link.first_step + 1) * step_s >= least_s


def _is_crowded(source: Source, attempt: int, link: SlowLink) -> bool:
    """Return True if, while a link was slow, its ranks waited for cores for a good part of their CPU time."""
    ranks = ", ".join(map(str, link.ranks[:MAX_RANKS]))
    ((ratio,),) = source.rows(
        "SELECT sum(run_delay_ns) / nullif(sum(cpu_ns), 0) FROM steps WHERE attempt = ? AND step BETWEEN ? AND ? "
        f"AND rank IN ({ranks}) AND run_delay_ns IS NOT NULL AND cpu_ns IS NOT NULL",
        [attempt, link.first_step, link.last_step],
    )
    return ratio is not None and ratio >= SHARED.explained_ratio


def _with_route(source: Source, attempt: int, link: SlowLink) -> SlowLink:
    """Name the two ranks between which a group's link is slow, if a sender's waits for its network show them."""
    route = slowest_link(source, attempt, link.ranks)
    return link if route is None else replace(link, ranks=tuple(sorted((route.rank, route.peer))), route=route)


def _explains(suspect: Suspect, link: SlowLink, timings: Timings) -> bool:
    """Decide whether a slow rank explains why its transfers take longer."""
    if suspect.cause not in SLOWS_TRANSFERS:
        return False
    slow = np.zeros(len(timings.steps), dtype=bool)
    for member in suspect.members:
        for segment in member.segments if member.rank in link.ranks else ():
            slow[segment.begin : segment.end] = True
    of_link = (timings.steps >= link.first_step) & (timings.steps <= link.last_step)
    return bool(slow[of_link].sum() >= max(1.0, SHARED.explained_ratio * of_link.sum()))


def _finding(source: Source, timings: Timings, link: SlowLink) -> Finding:
    cost = None if link.is_pair else cost_of_link(source, timings, link)
    saved_s = cost.saved_s if cost else link.excess_ms * (link.last_step - link.first_step + 1) / 1e3
    return Finding(
        analyzer="straggler",
        kind="straggler",
        severity="info" if cost is not None and cost.severity() == "info" else "warning",
        status="fired",
        summary=_summary(link),
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
            "transfer_of_others_ms" if link.has_peers else "transfer_before_ms": round(link.others_ms, 3),
            **(cost.evidence() if cost else {}),
            **_route_evidence(link),
        },
        advice="straggler-communication",
        attempt=timings.attempt,
        cost_s=round(saved_s, 3),
    )


def _route_evidence(link: SlowLink) -> dict[str, object]:
    route = link.route
    if route is None:
        return {}
    ends = {"link_rank": route.rank, "link_peer": route.peer, "link_channel": route.channel}
    return {**ends, "network_wait_factor_ratio": round(route.factor, 3)}


def _summary(link: SlowLink) -> str:
    others = "before" if not link.has_peers else "on other links" if link.is_pair else "in other groups"
    when = f"has been slow in communication since step {link.first_step}"
    if not link.is_ongoing:
        when = f"was slow in communication from step {link.first_step} to {link.last_step}"
    # Groups along several dimensions of the mesh make other calls: the operation is that of the slowest one.
    op = link.op if len({group.partition(":")[0] for group in link.groups}) == 1 else "a call"
    what = f"{op} in {' and '.join(map(group_text, link.groups))}"
    if link.is_pair:
        what = f"a message of {link.num_bytes / 2**10:,.0f} KiB"
    name = link.name if link.route is None else f"the link from {link.route.text},"
    return sentence(
        f"{name} {when}: {what} takes {link.factor:.1f}x as long as {others} (+{number(link.excess_ms)} ms per step)"
    )
