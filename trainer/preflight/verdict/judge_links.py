"""Judge bandwidth and latency between nodes: report an endpoint if all of its links are slow, otherwise the link.

1. An endpoint's fastest link in each direction shows what the endpoint can do. If that link is slower than the fastest
   links of its peers, the endpoint is reported, and its links are not reported separately.
2. Each remaining link is compared with all other remaining links.

With two endpoints there is only one link, and its directions are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from analyzers.policy import SHARED
from analyzers.robust import median_or_nan
from analyzers.wording import number, percent, sentence
from trainer.preflight.verdict.peers import high_among, slow_among
from trainer.preflight.verdict.policy import PreflightPolicy
from trainer.preflight.verdict.readings import LinkReading, Readings
from trainer.preflight.verdict.report import Line, Status

__all__ = ["link_lines", "rate_text", "seconds_text", "slow_pairs"]

Direction = Literal["sends", "receives"]
_MIN_ENDPOINTS = 3  # with two endpoints, a slow link would be blamed on both


@dataclass(frozen=True, slots=True, kw_only=True)
class _SlowEndpoint:
    rank: int
    direction: Direction
    ratio: float


def link_lines(readings: Readings, policy: PreflightPolicy) -> Iterator[Line]:
    """One line per slow endpoint, slow link and high latency, or one line which says that all links are fine."""
    links = readings.links
    if not links:
        return
    node_of = {reading.rank: reading.node for reading in readings.ranks}
    endpoints = _slow_endpoints(links, policy)
    lines = [*_endpoint_lines(endpoints, links, node_of, policy)]
    lines += _single_lines(_unexplained(links, endpoints), node_of, policy)
    lines += _latency_lines(links, node_of, policy)
    yield from lines
    if not lines:
        rate = rate_text(median_or_nan([link.bytes_per_s for link in links]))
        delay = seconds_text(median_or_nan([link.latency_s for link in links]))
        what = f"{len({frozenset((link.source, link.target)) for link in links})} links"
        compared = "" if len(links) > 1 else " There was nothing to compare it with."
        yield Line(check="links", status="pass", text=f"{what} in {readings.num_rounds} rounds: median {rate} and "
                   f"{delay}, none slower than its peers.{compared}")  # fmt: skip


def slow_pairs(links: Sequence[LinkReading], policy: PreflightPolicy) -> set[tuple[int, int]]:
    """Pairs with a link that must be measured again before it is reported as slow."""
    rates = {(link.source, link.target): link.bytes_per_s for link in links}
    delays = {(link.source, link.target): link.latency_s for link in links}
    slow = slow_among(rates, slow_ratio=policy.slow_link_ratio, policy=policy)
    late = high_among(delays, high_ratio=SHARED.clear_factor, least_excess=policy.least_latency_s, policy=policy)
    return {(min(pair), max(pair)) for pair in (*slow, *late)}


def _best(links: Sequence[LinkReading], direction: Direction) -> dict[int, float]:
    best: dict[int, float] = {}
    for link in links:
        rank = link.source if direction == "sends" else link.target
        best[rank] = max(best.get(rank, 0.0), link.bytes_per_s)
    return best


def _slow_endpoints(links: Sequence[LinkReading], policy: PreflightPolicy) -> list[_SlowEndpoint]:
    found: list[_SlowEndpoint] = []
    for direction in ("sends", "receives"):
        best = _best(links, direction)
        if len(best) >= _MIN_ENDPOINTS:
            slow = slow_among(best, slow_ratio=policy.slow_link_ratio, policy=policy)
            found += [_SlowEndpoint(rank=rank, direction=direction, ratio=ratio) for rank, ratio in slow.items()]
    return found


def _unexplained(links: Sequence[LinkReading], slow: Sequence[_SlowEndpoint]) -> list[LinkReading]:
    """Links that do not start or end at a slow endpoint."""
    sources = {endpoint.rank for endpoint in slow if endpoint.direction == "sends"}
    targets = {endpoint.rank for endpoint in slow if endpoint.direction == "receives"}
    return [link for link in links if link.source not in sources and link.target not in targets]


def _endpoint_lines(
    slow: Sequence[_SlowEndpoint], links: Sequence[LinkReading], node_of: Mapping[int, str], policy: PreflightPolicy
) -> Iterator[Line]:
    for direction in ("sends", "receives"):
        best = _best(links, direction)
        usual = median_or_nan(list(best.values()))
        for endpoint in slow:
            if endpoint.direction != direction:
                continue
            rank, ratio = endpoint.rank, endpoint.ratio
            num_partners = sum((link.source if direction == "sends" else link.target) == rank for link in links)
            text = sentence(
                f"{_named(rank, node_of)} {direction} at most {rate_text(best[rank])} with {num_partners} "
                f"partners, {percent(ratio)} of its peers ({rate_text(usual)})"
            )
            status = _status(ratio, policy)
            yield Line(check="links", status=status, text=text, nodes=(node_of[rank],), ranks=(rank,))


def _single_lines(links: Sequence[LinkReading], node_of: Mapping[int, str], policy: PreflightPolicy) -> Iterator[Line]:
    rates = {(link.source, link.target): link.bytes_per_s for link in links}
    for (source, target), ratio in slow_among(rates, slow_ratio=policy.slow_link_ratio, policy=policy).items():
        text = (
            f"The link from {_named(source, node_of)} to {_named(target, node_of)} has "
            f"{rate_text(rates[source, target])}, {percent(ratio)} of the others."
        )
        nodes = (node_of[source], node_of[target])
        yield Line(check="links", status=_status(ratio, policy), text=text, nodes=nodes, ranks=(source, target))


def _latency_lines(links: Sequence[LinkReading], node_of: Mapping[int, str], policy: PreflightPolicy) -> Iterator[Line]:
    """Lines on high latencies, which are judged like bandwidths: endpoints first, then single links."""
    best: dict[int, float] = {}
    for link in links:
        for rank in (link.source, link.target):
            best[rank] = min(best.get(rank, link.latency_s), link.latency_s)
    late = high_among(best, high_ratio=SHARED.clear_factor, least_excess=policy.least_latency_s, policy=policy)
    for rank, ratio in late.items():
        delay = f"{seconds_text(best[rank])}, {number(ratio, 2)} times its peers"
        text = sentence(f"{_named(rank, node_of)} answers after {delay}")
        yield Line(check="latency", status="warn", text=text, nodes=(node_of[rank],), ranks=(rank,))
    pairs = {
        (link.source, link.target): link.latency_s
        for link in links
        if link.source < link.target and not {link.source, link.target} & set(late)
    }
    slow = high_among(pairs, high_ratio=SHARED.clear_factor, least_excess=policy.least_latency_s, policy=policy)
    for (source, target), ratio in slow.items():
        text = (
            f"Between {_named(source, node_of)} and {_named(target, node_of)} a message takes "
            f"{seconds_text(pairs[source, target])}, {number(ratio, 2)} times the others."
        )
        nodes = (node_of[source], node_of[target])
        yield Line(check="latency", status="warn", text=text, nodes=nodes, ranks=(source, target))


def _status(ratio: float, policy: PreflightPolicy) -> Status:
    return "fail" if ratio < policy.half_speed_ratio else "warn"


def _named(rank: int, node_of: Mapping[int, str]) -> str:
    """`node a`, or `rank 3 on a` if several ranks were measured there."""
    node = node_of.get(rank, "?")
    return f"node {node}" if [*node_of.values()].count(node) == 1 else f"rank {rank} on {node}"


def rate_text(bytes_per_s: float) -> str:
    """Bandwidth as text in decimal units, as links are rated."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= size:
            return f"{number(bytes_per_s / size)} {unit}"
    return f"{number(bytes_per_s)} B/s"


def seconds_text(seconds: float) -> str:
    """A duration in s, ms or us, depending on its size."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{number(seconds / size)} {unit}"
    return f"{number(seconds * 1e6)} us"
