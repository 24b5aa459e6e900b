"""Judge bandwidth and latency between nodes: an end whose links are all slow, else the link.

1. The best link of an end, in each direction, is what the end itself can do. An end whose best is below its peers' is
   reported, and its links are explained by it.
2. Of the remaining links each is compared with all of them.

Two ends have only one link, whose directions are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from analyzers.policy import SHARED
from analyzers.robust import median
from analyzers.wording import number, percent, sentence
from trainer.preflight.verdict.peers import high_among, slow_among
from trainer.preflight.verdict.policy import PreflightPolicy
from trainer.preflight.verdict.readings import LinkReading, Readings
from trainer.preflight.verdict.report import Line, Status

__all__ = ["link_lines", "rate_text", "seconds_text", "slow_pairs"]

Direction = Literal["sends", "receives"]
_LEAST_ENDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _SlowEnd:
    rank: int
    direction: Direction
    ratio: float


def link_lines(readings: Readings, policy: PreflightPolicy) -> Iterator[Line]:
    """Lines of links: slow ends, slow links, slow answers; one line that all is well otherwise."""
    links = readings.links
    if not links:
        return
    node_of = {reading.rank: reading.node for reading in readings.ranks}
    ends = _slow_ends(links, policy)
    lines = [*_end_lines(ends, links, node_of, policy)]
    lines += _single_lines(_unexplained(links, ends), node_of, policy)
    lines += _latency_lines(links, node_of, policy)
    yield from lines
    if not lines:
        rate = rate_text(median([link.bytes_per_s for link in links]))
        delay = seconds_text(median([link.latency_s for link in links]))
        what = f"{len({frozenset((link.source, link.target)) for link in links})} links"
        compared = "" if len(links) > 1 else " There was nothing to compare it with."
        yield Line(check="links", status="pass", text=f"{what} in {readings.num_rounds} rounds: {rate} and {delay} in "
                   f"the median, none slower than its peers.{compared}")  # fmt: skip


def slow_pairs(links: Sequence[LinkReading], policy: PreflightPolicy) -> set[tuple[int, int]]:
    """Pairs whose link is to be measured again, before anything is said about it."""
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


def _slow_ends(links: Sequence[LinkReading], policy: PreflightPolicy) -> list[_SlowEnd]:
    found: list[_SlowEnd] = []
    for direction in ("sends", "receives"):
        best = _best(links, direction)
        if len(best) >= _LEAST_ENDS:
            slow = slow_among(best, slow_ratio=policy.slow_link_ratio, policy=policy)
            found += [_SlowEnd(rank=rank, direction=direction, ratio=ratio) for rank, ratio in slow.items()]
    return found


def _unexplained(links: Sequence[LinkReading], ends: Sequence[_SlowEnd]) -> list[LinkReading]:
    sources = {end.rank for end in ends if end.direction == "sends"}
    targets = {end.rank for end in ends if end.direction == "receives"}
    return [link for link in links if link.source not in sources and link.target not in targets]


def _end_lines(
    ends: Sequence[_SlowEnd], links: Sequence[LinkReading], node_of: Mapping[int, str], policy: PreflightPolicy
) -> Iterator[Line]:
    for direction in ("sends", "receives"):
        best = _best(links, direction)
        usual = median(list(best.values()))
        for end in ends:
            if end.direction != direction:
                continue
            num_partners = sum((link.source if direction == "sends" else link.target) == end.rank for link in links)
            text = sentence(
                f"{_named(end.rank, node_of)} {direction} at most {rate_text(best[end.rank])} with {num_partners} "
                f"partners, {percent(end.ratio)} of its peers ({rate_text(usual)})"
            )
            status = _status(end.ratio, policy)
            yield Line(check="links", status=status, text=text, nodes=(node_of[end.rank],), ranks=(end.rank,))


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
    """Latencies, as bandwidths: ends first, then single links."""
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
    """The node; with the rank where a node has several."""
    node = node_of.get(rank, "?")
    return f"node {node}" if [*node_of.values()].count(node) == 1 else f"rank {rank} on {node}"


def rate_text(bytes_per_s: float) -> str:
    """Bandwidth in decimal units, as links are sold."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= size:
            return f"{number(bytes_per_s / size)} {unit}"
    return f"{number(bytes_per_s)} B/s"


def seconds_text(seconds: float) -> str:
    """A duration in the unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{number(seconds / size)} {unit}"
    return f"{number(seconds * 1e6)} us"
