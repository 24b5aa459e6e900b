"""Slow links: a process group whose transfers take longer than those of the groups beside it.

    slow_groups(source, attempt=0)        # [SlowLink(ranks=(3,), groups=("dp:1-3/2", "tp:2-3"), ...)]

1. All members leave a collective together, so the shortest time among them is the transfer without waiting: that of
   the member that arrived last. A slow rank doesn't lengthen it; a slow link does.
2. Groups beside one another are those of the same mesh dimension doing the same operation with the same size. In each
   window of steps a group is slow if its median transfer is well above the median of the others.
3. Groups that are slow in most windows from an onset on are slow links. Ranks that all slow groups of several
   dimensions share are named; else the members of the slow group: its link. A group of another dimension that became
   slower with it, if by less than it takes to be told of, is enough to say which member it is.

Messages between two ranks say which link it is (`slow_pair`). Where ranks wait for cores, transfers differ without any
link being slow; then only what is clear is told.

One group alone in its dimension has nothing beside it: it is compared with itself before (`transfer_history`), and the
ranks named are all of its members.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from analyzers.communication.bandwidth import SIZE_OF_CALL
from analyzers.communication.slow_crossing import narrowed
from analyzers.communication.slow_link import Classes, Groups, SlowGroupPolicy, SlowLink, shared_parts
from analyzers.communication.slow_pair import Windows, join_pairs, pair_windows, slow_before
from analyzers.communication.transfer_history import core_wait, core_wait_rise, find_slower
from analyzers.source import Floats, Source

__all__ = ["find_slow", "slow_groups"]


def slow_groups(
    source: Source, attempt: int, policy: SlowGroupPolicy | None = None, *, since_step: int = 0
) -> list[SlowLink]:
    """Slow links of one attempt."""
    policy = policy or SlowGroupPolicy()
    members = _members(source, attempt)
    rows = source.rows(
        f"""
        SELECT process_group, op, bytes, step // ? AS part, median(transfer_ns) / 1e6, count(*), min(step), max(step)
        FROM (
            SELECT process_group, min(op) AS op, {SIZE_OF_CALL} AS bytes, min(step) AS step,
                   min(end_ns - issue_ns) AS transfer_ns
            FROM collectives
            WHERE attempt = ? AND step >= ? AND end_ns >= issue_ns AND op NOT IN ('send', 'recv')
            GROUP BY process_group, seq HAVING count(*) > 1
        ) GROUP BY ALL ORDER BY ALL
        """,
        [policy.window_steps, attempt, since_step],
    )
    classes: Classes = {}
    for group, op, num_bytes, part, transfer_ms, count, first, last in rows:
        key = ((group or "").partition(":")[0], op or "", num_bytes or 0)
        classes.setdefault(key, {}).setdefault(group or "", {})[part] = (transfer_ms, count, first, last)
    found: list[SlowLink] = []
    alone: list[SlowLink] = []
    for (_, op, num_bytes), groups in classes.items():
        if len(groups) > 1:
            found += _find(op, num_bytes, groups, members, policy)
        else:
            alone += _find_alone(op, num_bytes, groups, members, policy)
    pairs = _pairs(source, attempt, policy, since_step)
    pairs = [pair for pair in pairs if not _is_host(source, attempt, pair, since_step, policy)]
    # A link that slows one group beside others slows the groups of everybody, too.
    links = [narrowed(link, classes, members, policy) for link in _joined(found)] or _joined(alone)[:1]
    links = _with_pairs(links, pairs)
    return [link for link in links if not _is_host(source, attempt, link, since_step, policy)]


def _pairs(source: Source, attempt: int, policy: SlowGroupPolicy, since_step: int) -> list[SlowLink]:
    """Slow links between two ranks, from their messages."""
    classes, members = pair_windows(source, attempt, policy.window_steps, since_step)
    found: dict[str, SlowLink] = {}
    for (num_bytes, _), windows in classes.items():
        beside = _find("send", num_bytes, dict(windows), members, policy) if len(windows) > 2 else []
        for link in beside or _slower_pairs(num_bytes, windows, members, policy):
            (name,) = link.groups
            if name not in found or link.excess_ms > found[name].excess_ms:
                found[name] = link
    neighbours: dict[int, set[int]] = {}
    for one, other in members.values():
        neighbours.setdefault(one, set()).add(other)
        neighbours.setdefault(other, set()).add(one)
    return join_pairs(list(found.values()), {rank: len(others) for rank, others in neighbours.items()})


def _slower_pairs(
    num_bytes: int, windows: Windows, members: dict[str, tuple[int, ...]], policy: SlowGroupPolicy
) -> list[SlowLink]:
    """Pairs against their own past."""
    found = []
    for name, (part, factor, before_ms, after_ms) in slow_before(windows, policy).items():
        after = [window for number, window in sorted(windows[name].items()) if number >= part]
        per_step = float(np.median([count for _, count, _, _ in after])) / policy.window_steps
        excess = (after_ms - before_ms) * max(1.0, per_step)
        if excess >= policy.min_excess_ms:
            found.append(
                SlowLink(
                    ranks=members[name],
                    groups=(name,),
                    op="send",
                    num_bytes=num_bytes,
                    factor=factor,
                    excess_ms=excess,
                    transfer_ms=after_ms,
                    others_ms=before_ms,
                    first_step=after[0][2],
                    last_step=after[-1][3],
                    ongoing=True,
                    alone=True,
                )
            )
    return found


def _with_pairs(links: list[SlowLink], pairs: list[SlowLink]) -> list[SlowLink]:
    """A group that is slow together with links of one of its members is slow because of that rank; what costs more
    tells of it."""
    kept, told = [], set()
    for link in links:
        common = {rank for pair in pairs for rank in pair.ranks if rank in link.ranks}
        if len(common) != 1:
            kept.append(link)
            continue
        beside = [pair for pair in pairs if common <= set(pair.ranks)]
        told |= set(beside)
        worst, *others = sorted([link, *beside], key=lambda one: -one.excess_ms)
        groups = [*worst.groups, *(group for other in others for group in other.groups)]
        kept.append(replace(worst, ranks=tuple(common), groups=tuple(groups)))
    return [*kept, *(pair for pair in pairs if pair not in told)]


def _find_alone(
    op: str,
    num_bytes: int,
    groups: Groups,
    members: dict[str, tuple[int, ...]],
    policy: SlowGroupPolicy,
) -> list[SlowLink]:
    """A group without others beside it, against its own past."""
    ((name, windows),) = groups.items()
    parts = sorted(windows)
    slower = find_slower(np.array([windows[part][0] for part in parts]), policy.history)
    if slower is None:
        return []
    after = [windows[part] for part in parts[slower.begin :]]
    per_step = float(np.median([count for _, count, _, _ in after])) / policy.window_steps
    excess = (slower.after_ms - slower.before_ms) * max(1.0, per_step)
    if excess < policy.min_excess_ms:
        return []
    return [
        SlowLink(
            ranks=members.get(name, ()),
            groups=(name,),
            op=op,
            num_bytes=num_bytes,
            factor=slower.factor,
            excess_ms=excess,
            transfer_ms=slower.after_ms,
            others_ms=slower.before_ms,
            first_step=after[0][2],
            last_step=after[-1][3],
            ongoing=True,
            alone=True,
        )
    ]


def _is_host(source: Source, attempt: int, link: SlowLink, since_step: int, policy: SlowGroupPolicy) -> bool:
    """Whether its ranks waiting for cores explains it: that slows transfers as well, and no link is bad."""
    if link.alone:
        rise = core_wait_rise(source, attempt, link.ranks, link.first_step, since_step)
        return rise is not None and rise >= policy.host_share_ratio * link.excess_ms
    waited = core_wait(source, attempt, link.ranks, link.first_step, link.last_step)
    if waited is None or waited < policy.host_share_ratio * link.excess_ms:
        return False
    num_windows = (link.last_step - link.first_step + 1) // policy.window_steps
    if link.excess_ms < policy.min_excess_crowded_ratio * waited:
        return True
    return link.factor < policy.clear_factor or num_windows < policy.min_windows_crowded


def find_slow(transfers_ms: Floats, policy: SlowGroupPolicy) -> list[tuple[int, int, int, float]]:
    """(row, first window, one after the last, factor) of slow rows of a matrix group x window. Pure."""
    num_groups = len(transfers_ms)
    slow = []
    least = policy.min_factor_pair if num_groups == 2 else policy.min_factor
    min_windows = policy.min_windows_pair if num_groups == 2 else policy.min_windows
    for row in range(num_groups):
        others = np.median(np.delete(transfers_ms, row, axis=0), axis=0)
        factor = transfers_ms[row] / np.maximum(others, 1e-6)
        gains = np.cumsum((factor - (1 + least) / 2)[::-1])[::-1]
        begin = int(np.argmax(gains))
        gains = np.cumsum(factor[begin:] - (1 + least) / 2)
        end = begin + int(np.argmax(gains)) + 1
        agreement = float(np.mean(factor[begin:end] >= least))
        if end - begin >= min_windows and agreement >= policy.agreement_ratio:
            slow.append((row, begin, end, float(np.median(factor[begin:end]))))
    return slow


def _find(
    op: str,
    num_bytes: int,
    groups: Groups,
    members: dict[str, tuple[int, ...]],
    policy: SlowGroupPolicy,
) -> list[SlowLink]:
    names = sorted(groups)
    parts = shared_parts(groups)
    if len(names) < 2 or len(parts) < policy.min_windows:
        return []
    transfers = np.array([[groups[name][part][0] for part in parts] for name in names])
    found = []
    for row, begin, end, factor in find_slow(transfers, policy):
        window = [groups[names[row]][part] for part in parts[begin:end]]
        if end < len(parts) and end - begin < policy.min_windows_ended:
            continue
        others = np.median(np.delete(transfers, row, axis=0)[:, begin:end])
        per_step = float(np.median([count for _, count, _, _ in window])) / policy.window_steps
        transfer = float(np.median(transfers[row, begin:end]))
        excess = (transfer - float(others)) * max(1.0, per_step)
        if excess < policy.min_excess_ms:
            continue
        found.append(
            SlowLink(
                ranks=members.get(names[row], ()),
                groups=(names[row],),
                op=op,
                num_bytes=num_bytes,
                factor=factor,
                excess_ms=excess,
                transfer_ms=transfer,
                others_ms=float(others),
                first_step=window[0][2],
                last_step=window[-1][3],
                ongoing=end == len(parts),
            )
        )
    return found


def _joined(found: list[SlowLink]) -> list[SlowLink]:
    """One link a group (its largest excess); groups of several dimensions with ranks in common name those ranks."""
    largest: dict[str, SlowLink] = {}
    for link in found:
        (group,) = link.groups
        if group not in largest or link.excess_ms > largest[group].excess_ms:
            largest[group] = link
    links = sorted(largest.values(), key=lambda link: -link.excess_ms)
    joined: list[SlowLink] = []
    for link in links:
        dimension = link.groups[0].partition(":")[0]
        for i, other in enumerate(joined):
            common = tuple(sorted(set(link.ranks) & set(other.ranks)))
            if common and dimension not in {group.partition(":")[0] for group in other.groups}:
                joined[i] = replace(other, ranks=common, groups=(*other.groups, *link.groups))
                break
        else:
            joined.append(link)
    return joined


def _members(source: Source, attempt: int) -> dict[str, tuple[int, ...]]:
    if not source.has("process_groups"):
        return {}
    sql = "SELECT DISTINCT process_group, members FROM process_groups WHERE attempt = ?"
    return {group or "": tuple(int(rank) for rank in ranks or ()) for group, ranks in source.rows(sql, [attempt])}
