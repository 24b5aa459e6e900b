"""Slow links by name: two ranks between which messages take longer than between other pairs, or than before.

    slow_pairs(source, attempt=0)       # [SlowLink(ranks=(2, 3), groups=("rank 2 -> rank 3",), ...)]

Sends and receives (a pipeline's stages, a ring of one's own) say which link is slow, as no collective does: both ends
of each message are known.

1. A message's transfer begins when the later of both ends has made its call, and ends with the receive. Between ranks
   of one host that is read off their clock; between hosts, whose clocks differ, it is the shorter of both durations:
   that of the end that came last.
2. In windows of steps a pair and direction is compared with the median of the others of the same message size, on one
   host or between hosts alike; and with its own past, where nothing is beside it or both its directions are all that
   there is. If most pairs are slower than before it is no link (`throughput` tells that).
3. Slow pairs that all have one rank in common, and lead to several others, are that rank's own network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from analyzers.communication.transfer_history import find_slower
from analyzers.source import Source

if TYPE_CHECKING:
    from analyzers.communication.slow_link import SlowGroupPolicy, SlowLink

__all__ = ["join_pairs", "pair_windows", "slow_before"]

Windows = dict[str, dict[int, tuple[float, int, int, int]]]
"""By pair and window: transfer (ms), calls, first and last step."""


def pair_windows(
    source: Source, attempt: int, window_steps: int, since_step: int
) -> tuple[dict[tuple[int, bool], Windows], dict[str, tuple[int, ...]]]:
    """Transfers by (bytes, between hosts) and pair, and each pair's ranks."""
    host = "SELECT rank, arg_max(host, wall_ns) AS host FROM ranks WHERE attempt = ? AND rank >= 0 GROUP BY rank"
    if not source.has("ranks"):
        host = "SELECT 0 AS rank, NULL AS host WHERE ? < 0"
    rows = source.rows(
        f"""
        WITH host AS ({host}), message AS (
            SELECT CASE WHEN op = 'send' THEN rank ELSE peer END AS sender,
                   CASE WHEN op = 'send' THEN peer ELSE rank END AS receiver,
                   max(bytes) AS bytes, min(step) AS step, min(end_ns - issue_ns) AS shorter,
                   max(CASE WHEN op = 'recv' THEN end_ns END) - max(issue_ns) AS by_clock
            FROM collectives
            WHERE attempt = ? AND step >= ? AND op IN ('send', 'recv') AND end_ns >= issue_ns AND peer IS NOT NULL
            GROUP BY process_group, sender, receiver, seq HAVING count(*) = 2 AND count(DISTINCT op) = 2
        )
        SELECT sender, receiver, m.bytes, coalesce(a.host = b.host, false) AS same, step // ? AS part,
               median(CASE WHEN coalesce(a.host = b.host, false) THEN least(shorter, greatest(0, by_clock))
                      ELSE shorter END) / 1e6, count(*), min(step), max(step)
        FROM message m LEFT JOIN host a ON a.rank = sender LEFT JOIN host b ON b.rank = receiver
        GROUP BY ALL ORDER BY ALL
        """,
        [attempt, attempt, since_step, window_steps],
    )
    classes: dict[tuple[int, bool], Windows] = {}
    members: dict[str, tuple[int, ...]] = {}
    for sender, receiver, num_bytes, same, part, transfer_ms, count, first, last in rows:
        name = f"rank {sender} -> rank {receiver}"
        members[name] = (int(sender), int(receiver))
        windows = classes.setdefault((int(num_bytes or 0), not same), {}).setdefault(name, {})
        windows[int(part)] = (float(transfer_ms), int(count), int(first), int(last))
    return classes, members


def slow_before(windows: Windows, policy: SlowGroupPolicy) -> dict[str, tuple[int, float, float, float]]:
    """Pairs that became slower than they were: (first slow window, factor, before, after); none if most of them did,
    unless there is only one link, or all that are slow are links of one rank and it has not all there are."""
    found = {}
    for name, parts in windows.items():
        order = sorted(parts)
        slower = find_slower(np.array([parts[part][0] for part in order]), policy.history)
        if slower is not None:
            found[name] = (order[slower.begin], slower.factor, slower.before_ms, slower.after_ms)
    links = {frozenset(name.split(" -> ")) for name in windows}
    slow = {frozenset(name.split(" -> ")) for name in found}
    one_rank = len(slow) < len(links) and bool(frozenset.intersection(*slow)) if slow else False
    return found if len(links) == 1 or 2 * len(slow) < len(links) or one_rank else {}


def join_pairs(found: Sequence[SlowLink], num_neighbours: Mapping[int, int]) -> list[SlowLink]:
    """Both directions of a link are one; all links of a rank, if it has several, are that rank. The costliest first."""
    by_link: dict[frozenset[int], list[SlowLink]] = {}
    for link in found:
        by_link.setdefault(frozenset(link.ranks), []).append(link)
    joined = [_joined(links, tuple(sorted(ranks))) for ranks, links in by_link.items()]
    counts = Counter(rank for link in joined for rank in link.ranks)
    for rank, count in counts.most_common():
        own = [link for link in joined if rank in link.ranks]
        if count > 1 and count == num_neighbours.get(rank, 0) and len(own) == count:
            joined = [link for link in joined if link not in own]
            joined.append(_joined(own, (rank,)))
    return sorted(joined, key=lambda link: -link.excess_ms)


def _joined(links: Sequence[SlowLink], ranks: tuple[int, ...]) -> SlowLink:
    worst = max(links, key=lambda link: link.excess_ms)
    groups: list[Any] = sorted({group for link in links for group in link.groups})
    return replace(worst, ranks=ranks, groups=tuple(groups), first_step=min(link.first_step for link in links))
