"""A slow link, and the ranks that several slow groups or pairs have in common.

    link.ranks, link.groups, link.factor, link.excess_ms, link.first_step

1. If groups of several mesh dimensions are slow, the ranks that they share are named (`join_groups`).
2. If a single group is slow, all its members are named. If a group of another dimension shares exactly one member
   with it and is also slow at the same time, even if less so, only that member is named (`narrow_to_member`).
3. If all links of a rank with several neighbours are slow, that rank is named (`join_pairs`).
4. If a group and pairs of one of its members are slow, that member is named (`join_with_pairs`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from analyzers.communication.network_links import NetworkLink
from analyzers.communication.policy import SlowLinkPolicy
from analyzers.communication.transfers import Classes, Groups, Window
from analyzers.policy import SHARED
from analyzers.robust import others_median
from analyzers.wording import ranks_text

__all__ = ["SlowLink", "join_groups", "join_pairs", "join_with_pairs", "narrow_to_member"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """Ranks between which transfers are slow. `excess_ms` is per step, the other times are of one transfer."""

    ranks: tuple[int, ...]
    groups: tuple[str, ...]
    op: str
    num_bytes: int
    factor: float
    excess_ms: float
    transfer_ms: float
    others_ms: float
    """Transfer time of comparable groups or pairs, or of the link itself before the onset if `has_peers` is False."""
    first_step: int
    last_step: int
    is_ongoing: bool
    has_peers: bool = True
    """True if the link was compared with others; otherwise it was compared with its own past."""
    route: NetworkLink | None = None
    """The slow link between two nodes, if proxy threads were recorded."""

    def is_significant(self, step_ms: float) -> bool:
        """Return True if the link costs enough of the step. A clearer slowdown needs less cost."""
        is_clear = self.has_peers and self.factor >= SHARED.clear_factor
        return self.excess_ms >= (SHARED.min_share_ratio if is_clear else SHARED.saving_ratio) * step_ms

    @property
    def is_pair(self) -> bool:
        """True if the link was measured on point-to-point messages; `groups` are then names of pairs."""
        return " -> " in self.groups[0]

    @property
    def name(self) -> str:
        """Subject of a sentence: a rank or a link."""
        if len(self.ranks) == 1:
            return f"rank {self.ranks[0]}"
        if self.is_pair:
            pair = " <-> ".join(f"rank {rank}" for rank in self.ranks)
            return f"the link {self.groups[0] if len(self.groups) == 1 else pair}"
        return f"{'the' if self.has_peers else 'a'} link of {ranks_text(self.ranks)}"


def join_groups(found: Sequence[SlowLink]) -> list[SlowLink]:
    """Keep each group's link with the largest excess, and join links of different dimensions that share ranks."""
    largest: dict[str, SlowLink] = {}
    for link in found:
        (group,) = link.groups
        if group not in largest or link.excess_ms > largest[group].excess_ms:
            largest[group] = link
    joined: list[SlowLink] = []
    for link in sorted(largest.values(), key=lambda link: -link.excess_ms):
        dimension = link.groups[0].partition(":")[0]
        for i, other in enumerate(joined):
            common = tuple(sorted(set(link.ranks) & set(other.ranks)))
            if common and dimension not in {group.partition(":")[0] for group in other.groups}:
                joined[i] = replace(other, ranks=common, groups=(*other.groups, *link.groups))
                break
        else:
            joined.append(link)
    return joined


def narrow_to_member(
    link: SlowLink, classes: Classes, members: Mapping[str, tuple[int, ...]], policy: SlowLinkPolicy
) -> SlowLink:
    """If exactly one member also has a slow group in another dimension, name that member. Otherwise return the link
    unchanged. A fault does not slow crossing groups equally: it may make one group 4x slower, and the other, which
    sends smaller messages, only 1.5x slower. On its own, such a small slowdown takes more steps to prove.
    """
    if len(link.ranks) < 2:
        return link
    known = {group.partition(":")[0] for group in link.groups}
    found: list[tuple[str, int]] = []
    for dimension in {dimension for dimension, _, _ in classes} - known:
        # Of the classes of calls in a dimension, the one that moves most bytes says most about the links.
        moved = {key: key[2] * _num_calls(groups) for key, groups in classes.items() if key[0] == dimension}
        groups = classes[max(moved, key=lambda key: moved[key])]
        for name in _slower_groups(groups, link, policy):
            common = set(link.ranks) & set(members.get(name, ()))
            if len(common) == 1:
                found.append((name, common.pop()))
    if len({rank for _, rank in found}) != 1:
        return link
    return replace(link, ranks=(found[0][1],), groups=(*link.groups, *(name for name, _ in found)))


def join_pairs(found: Sequence[SlowLink], num_neighbours: Mapping[int, int]) -> list[SlowLink]:
    """Join both directions of a link, and the links of a rank if it has several and all are slow. Costliest first."""
    by_link: dict[frozenset[int], list[SlowLink]] = {}
    for link in found:
        by_link.setdefault(frozenset(link.ranks), []).append(link)
    joined = [_join(links, tuple(sorted(ranks))) for ranks, links in by_link.items()]
    for rank, count in Counter(rank for link in joined for rank in link.ranks).most_common():
        of_rank = [link for link in joined if rank in link.ranks]
        # Blame the rank if all its links are slow and none of them has been attributed to the rank at its other end.
        if count > 1 and count == num_neighbours.get(rank, 0) and len(of_rank) == count:
            joined = [link for link in joined if link not in of_rank]
            joined.append(_join(of_rank, (rank,)))
    return sorted(joined, key=lambda link: -link.excess_ms)


def join_with_pairs(links: Sequence[SlowLink], pairs: Sequence[SlowLink]) -> list[SlowLink]:
    """Name the member that is slow both in pairs and in its group. The numbers are of the link that costs more."""
    result: list[SlowLink] = []
    used: set[SlowLink] = set()
    for link in links:
        common = {rank for pair in pairs for rank in pair.ranks if rank in link.ranks}
        if len(common) != 1:
            result.append(link)
            continue
        of_member = [pair for pair in pairs if common <= set(pair.ranks)]
        used |= set(of_member)
        worst, *others = sorted([link, *of_member], key=lambda one: -one.excess_ms)
        groups = [*worst.groups, *(group for other in others for group in other.groups)]
        result.append(replace(worst, ranks=tuple(common), groups=tuple(groups)))
    return [*result, *(pair for pair in pairs if pair not in used)]


def _slower_groups(groups: Groups, link: SlowLink, policy: SlowLinkPolicy) -> list[str]:
    """Groups in which transfers are slower than in comparable groups while the link is slow."""
    windows = next(iter(groups.values()))
    usual = np.median([window.num_calls for window in windows.values()])
    # Leave out a window with fewer than half of the usual number of calls, as the newest window may be.
    shared = sorted(set.intersection(*map(set, groups.values())))
    parts = [p for p in shared if _overlaps(windows[p], link) and 2 * windows[p].num_calls >= usual]
    parts = parts[-max(SHARED.min_times, len(parts) // 2) :]
    if len(groups) < 2 or len(parts) < SHARED.repeats:
        return []
    transfers = np.array([[windows[part].transfer_ms for part in parts] for windows in groups.values()])
    slower = []
    for name, factors in zip(groups, transfers / np.maximum(others_median(transfers), 1e-6), strict=True):
        agreement = np.mean(factors >= (1 + policy.crossing_factor) / 2)
        if agreement >= SHARED.agreement_ratio and np.median(factors) >= policy.crossing_factor:
            slower.append(name)
    return slower


def _join(links: Sequence[SlowLink], ranks: tuple[int, ...]) -> SlowLink:
    worst = max(links, key=lambda link: link.excess_ms)
    groups = tuple(sorted({group for link in links for group in link.groups}))
    return replace(worst, ranks=ranks, groups=groups, first_step=min(link.first_step for link in links))


def _num_calls(groups: Groups) -> int:
    return sum(window.num_calls for windows in groups.values() for window in windows.values())


def _overlaps(window: Window, link: SlowLink) -> bool:
    return window.last_step >= link.first_step and window.first_step <= link.last_step
