"""Search for slow links: groups and pairs of ranks with transfers that take longer than in comparable groups, or longer
than before.

    slow_links(source, attempt=0)        # [SlowLink(ranks=(3,), groups=("dp:1-3/2", "tp:2-3"), ...)]

1. Groups of the same mesh dimension, operation and size are compared with each other, window by window of steps
   (`transfers`). A group is slow if its median transfer is well above the median of the others. Pairs of ranks that
   exchange messages of the same size are compared in the same way, separately within hosts and between hosts.
2. A group alone in its dimension, and pairs with nothing to compare with, are compared with their own past. If most
   pairs became slower, the cause is not a link (`stragglers.throughput` reports that).
3. A group or pair that is slow in most windows of a stretch has a slow link; a stretch that is over must be longer.
   `slow_link` names the ranks. The onset of a group that became slower is found among single steps.
4. If the ranks of a link wait for cores, their transfers also differ without a slow link, so the link is kept only if
   it is clearly slower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from analyzers.communication.policy import SlowLinkPolicy
from analyzers.communication.slow_link import SlowLink, join_groups, join_pairs, join_with_pairs, narrow_to_member
from analyzers.communication.transfers import (
    Groups,
    Window,
    group_members,
    group_transfers,
    pair_transfers,
)
from analyzers.policy import SHARED
from analyzers.robust import others_median, sigma
from analyzers.source import Floats, Source, missing_tables

__all__ = ["Rise", "find_rise", "find_slow_rows", "slow_links"]

Members = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """A rise that lasts: all windows from index `begin` on are slow."""

    begin: int
    factor: float
    before_ms: float
    after_ms: float


def slow_links(
    source: Source, attempt: int, policy: SlowLinkPolicy | None = None, *, since_step: int = 0
) -> list[SlowLink]:
    """Slow links of one attempt."""
    policy = policy or SlowLinkPolicy()
    if missing_tables(source, "collectives"):
        return []
    members = group_members(source, attempt)
    classes = group_transfers(source, attempt, SHARED.block_steps, since_step)
    pair_classes, pair_members = pair_transfers(source, attempt, SHARED.block_steps, since_step)
    compared: list[SlowLink] = []
    risen: list[SlowLink] = []
    for (_, op, num_bytes), groups in classes.items():
        if len(groups) > 1:
            compared += _slower_than_others(op, num_bytes, groups, members, policy)
        else:
            risen += _slower_than_before(op, num_bytes, groups, members, policy)
    pairs = _slow_pairs(pair_classes, pair_members, policy)
    pairs = [pair for pair in pairs if not _is_core_wait(source, attempt, pair, since_step, policy)]
    # A slow link of one group also slows a group of all ranks. So groups that have no others to be compared with, such
    # as the group of all ranks, are judged only if no slow link was found elsewhere.
    links = [narrow_to_member(link, classes, members, policy) for link in join_groups(compared)]
    links = links or [_with_onset(source, attempt, link, since_step) for link in join_groups(risen)[:1]]
    links = join_with_pairs(links, pairs)
    return [link for link in links if not _is_core_wait(source, attempt, link, since_step, policy)]


def find_slow_rows(transfers_ms: Floats, policy: SlowLinkPolicy) -> list[tuple[int, int, int, float]]:
    """Return (row, first window, last window + 1, factor) of each slow row of a matrix [groups, windows]. Pure."""
    num_groups = len(transfers_ms)
    slow = []
    factors = transfers_ms / np.maximum(others_median(transfers_ms), 1e-6)
    least = SHARED.beyond_few_factor if num_groups == 2 else SHARED.slow_factor
    min_windows = policy.min_windows_unsure if num_groups == 2 else SHARED.repeats
    for row, factor in enumerate(factors):
        # The slow part is where the sum of (factor - 1 - half of the required excess) is largest.
        gains = np.cumsum((factor - (1 + least) / 2)[::-1])[::-1]
        begin = int(np.argmax(gains))
        gains = np.cumsum(factor[begin:] - (1 + least) / 2)
        end = begin + int(np.argmax(gains)) + 1
        agreement = float(np.mean(factor[begin:end] >= least))
        if end - begin >= min_windows and agreement >= SHARED.agreement_ratio:
            slow.append((row, begin, end, float(np.median(factor[begin:end]))))
    return slow


def find_rise(transfers_ms: Floats) -> Rise | None:
    """Find a rise in a row of windows that lasts until the newest window; None without one. Pure."""
    total = len(transfers_ms)
    logs = np.log(np.maximum(transfers_ms, 1e-6))
    best: tuple[float, int] | None = None
    for begin in range(SHARED.min_times, total - SHARED.min_times + 1):
        rise = float(logs[begin:].mean() - logs[:begin].mean())
        # The likelihood of a change grows with its size and with the number of windows on both sides.
        gain = rise * math.sqrt(begin * (total - begin) / total)
        if best is None or gain > best[0]:
            best = (gain, begin)
    if best is None:
        return None
    begin = best[1]
    before, after = transfers_ms[:begin], transfers_ms[begin:]
    middle, now = float(np.median(before)), float(np.median(after))
    factor = now / max(middle, 1e-6)
    steps = np.concatenate([np.diff(logs[:begin]), np.diff(logs[begin:])])
    noise = sigma(steps, center=0.0) / math.sqrt(2)
    slow = float(np.mean(after >= (1 + SHARED.beyond_few_factor) / 2 * middle))
    if factor < SHARED.beyond_few_factor or slow < SHARED.agreement_ratio:
        return None
    if math.log(factor) < SHARED.certain_sigmas * noise:
        return None
    if now < SHARED.beyond_factor * float(before.max()):
        return None
    return Rise(begin=begin, factor=factor, before_ms=middle, after_ms=now)


def _slower_than_others(
    op: str, num_bytes: int, groups: Groups, members: Members, policy: SlowLinkPolicy
) -> list[SlowLink]:
    names = sorted(groups)
    parts = sorted(set.intersection(*map(set, groups.values())))  # windows that all groups have
    if len(names) < 2 or len(parts) < SHARED.repeats:
        return []
    transfers = np.array([[groups[name][part].transfer_ms for part in parts] for name in names])
    found = []
    for row, begin, end, factor in find_slow_rows(transfers, policy):
        is_ongoing = end == len(parts)
        if not is_ongoing and end - begin < policy.min_windows_unsure:
            continue
        windows = [groups[names[row]][part] for part in parts[begin:end]]
        others_ms = float(np.median(np.delete(transfers, row, axis=0)[:, begin:end]))
        transfer_ms = float(np.median(transfers[row, begin:end]))
        excess_ms = (transfer_ms - others_ms) * _calls_per_step(windows)
        if excess_ms >= policy.min_excess_ms:
            found.append(
                SlowLink(
                    ranks=members.get(names[row], ()), groups=(names[row],), op=op, num_bytes=num_bytes, factor=factor,
                    excess_ms=excess_ms, transfer_ms=transfer_ms, others_ms=others_ms,
                    first_step=windows[0].first_step, last_step=windows[-1].last_step, is_ongoing=is_ongoing,
                )
            )  # fmt: skip
    return found


def _slower_than_before(
    op: str, num_bytes: int, groups: Groups, members: Members, policy: SlowLinkPolicy
) -> list[SlowLink]:
    """Groups or pairs in which transfers became slower and remained slower."""
    found = []
    for name, parts in groups.items():
        order = sorted(parts)
        rise = find_rise(np.array([parts[part].transfer_ms for part in order]))
        if rise is None:
            continue
        windows = [parts[part] for part in order[rise.begin :]]
        excess_ms = (rise.after_ms - rise.before_ms) * _calls_per_step(windows)
        found.append(
            SlowLink(
                ranks=members.get(name, ()), groups=(name,), op=op, num_bytes=num_bytes, factor=rise.factor,
                excess_ms=excess_ms, transfer_ms=rise.after_ms, others_ms=rise.before_ms,
                first_step=windows[0].first_step, last_step=windows[-1].last_step, is_ongoing=True, has_peers=False,
            )
        )  # fmt: skip
    return [link for link in _without_common_rise(found, groups) if link.excess_ms >= policy.min_excess_ms]


def _with_onset(source: Source, attempt: int, link: SlowLink, since_step: int) -> SlowLink:
    """Find the step at which a group's rise began: the first one from which transfers take nearly as long as after the
    rise. The network may already have been slightly slower some windows earlier.
    """
    dimension = link.groups[0].partition(":")[0]
    by_step = group_transfers(source, attempt, 1, since_step)[dimension, link.op, link.num_bytes][link.groups[0]]
    steps = [step for step in sorted(by_step) if step >= link.first_step - SHARED.block_steps]
    took_ms = np.clip([by_step[step].transfer_ms for step in steps], link.others_ms, link.transfer_ms)
    level_ms = link.others_ms + SHARED.agreement_ratio * (link.transfer_ms - link.others_ms)
    gains = np.cumsum((took_ms - level_ms)[::-1])[::-1]
    return replace(link, first_step=by_step[steps[int(np.argmax(gains[: len(gains) // 2 + 1]))]].first_step)


def _without_common_rise(found: list[SlowLink], groups: Groups) -> list[SlowLink]:
    """Drop all pairs if at least half of them became slower, unless there is only one link, or the slow links have a
    rank in common."""
    links = {frozenset(name.split(" -> ")) for name in groups}
    slow = {frozenset(link.groups[0].split(" -> ")) for link in found}
    is_one_rank = len(slow) < len(links) and bool(frozenset.intersection(*slow)) if slow else False
    return found if len(links) == 1 or 2 * len(slow) < len(links) or is_one_rank else []


def _slow_pairs(classes: Mapping[tuple[int, bool], Groups], members: Members, policy: SlowLinkPolicy) -> list[SlowLink]:
    """Slow links between two ranks, from their messages."""
    found: dict[str, SlowLink] = {}
    for (num_bytes, _), groups in classes.items():
        compared = _slower_than_others("send", num_bytes, groups, members, policy) if len(groups) > 2 else []
        for link in compared or _slower_than_before("send", num_bytes, groups, members, policy):
            (name,) = link.groups
            if name not in found or link.excess_ms > found[name].excess_ms:
                found[name] = link
    neighbours: dict[int, set[int]] = {}
    for one, other in members.values():
        neighbours.setdefault(one, set()).add(other)
        neighbours.setdefault(other, set()).add(one)
    return join_pairs(list(found.values()), {rank: len(others) for rank, others in neighbours.items()})


def _is_core_wait(source: Source, attempt: int, link: SlowLink, since_step: int, policy: SlowLinkPolicy) -> bool:
    """Return True if waits of the ranks for cores can explain the slow transfers."""
    waited = _core_wait_ms(source, attempt, link.ranks, link.first_step, link.last_step)
    if waited is None or waited < SHARED.explained_ratio * link.excess_ms:
        return False
    if not link.has_peers:
        before = _core_wait_ms(source, attempt, link.ranks, since_step, link.first_step - 1)
        return before is not None and waited - before >= SHARED.explained_ratio * link.excess_ms
    if link.excess_ms < SHARED.explained_ratio * waited:
        return True
    num_windows = (link.last_step - link.first_step + 1) // SHARED.block_steps
    return link.factor < SHARED.clear_factor or num_windows < policy.min_windows_unsure


def _core_wait_ms(source: Source, attempt: int, ranks: Sequence[int], first_step: int, last_step: int) -> float | None:
    """Median over the steps of the ranks' median wait for a core (ms); None if not recorded."""
    if not ranks:
        return None
    ((waited,),) = source.rows(
        "SELECT median(waited_ns) / 1e6 FROM (SELECT median(run_delay_ns) AS waited_ns FROM steps "
        "WHERE attempt = ? AND step BETWEEN ? AND ? AND run_delay_ns IS NOT NULL "
        f"AND rank IN ({', '.join(map(str, ranks))}) GROUP BY step)",
        [attempt, first_step, last_step],
    )
    return None if waited is None else float(waited)


def _calls_per_step(windows: Sequence[Window]) -> float:
    return max(1.0, float(np.median([window.num_calls for window in windows])) / SHARED.block_steps)
