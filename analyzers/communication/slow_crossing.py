"""Which member of a slow group it is: the one whose group in another dimension of the mesh became slower with it.

link = narrowed(link, classes, members, policy)     # SlowLink(ranks=(3,), ...), or the same as before
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from analyzers.communication.slow_link import Classes, Groups, SlowGroupPolicy, SlowLink, Window, shared_parts

__all__ = ["narrowed"]


def narrowed(
    link: SlowLink, classes: Classes, members: Mapping[str, tuple[int, ...]], policy: SlowGroupPolicy
) -> SlowLink:
    """The link of the one member whose other group is slower, too, since then; the link as it is, if that is not one.

    Two groups of two that cross are not slow in the same measure: what costs the one 4 times costs the other, with
    smaller messages, 1.5 times, which takes longer to be sure of by itself.
    """
    if len(link.ranks) < 2:
        return link
    told = {group.partition(":")[0] for group in link.groups}
    found: list[tuple[str, int]] = []
    for dimension in {dimension for dimension, _, _ in classes} - told:
        # Of what a dimension does, that which moves most says most about its links.
        moved = {key: key[2] * _calls(groups) for key, groups in classes.items() if key[0] == dimension}
        groups = classes[max(moved, key=lambda key: moved[key])]
        # A newest window that is not half full says little.
        windows = next(iter(groups.values()))
        usual = np.median([calls for _, calls, _, _ in windows.values()])
        parts = [p for p in shared_parts(groups) if _overlaps(windows[p], link) and 2 * windows[p][1] >= usual]
        parts = parts[-max(policy.min_windows_crossing, len(parts) // 2) :]
        if len(groups) < 2 or len(parts) < policy.min_windows:
            continue
        transfers = np.array([[windows[part][0] for part in parts] for windows in groups.values()])
        for row, name in enumerate(groups):
            factors = transfers[row] / np.maximum(np.median(np.delete(transfers, row, axis=0), axis=0), 1e-6)
            agreement = np.mean(factors >= (1 + policy.crossing_factor) / 2)
            is_slower = agreement >= policy.agreement_ratio and np.median(factors) >= policy.crossing_factor
            common = set(link.ranks) & set(members.get(name, ()))
            if is_slower and len(common) == 1:
                found.append((name, common.pop()))
    if len({rank for _, rank in found}) != 1:
        return link
    return replace(link, ranks=(found[0][1],), groups=(*link.groups, *(name for name, _ in found)))


def _calls(groups: Groups) -> int:
    return sum(calls for windows in groups.values() for _, calls, _, _ in windows.values())


def _overlaps(window: Window, link: SlowLink) -> bool:
    _, _, first, last = window
    return last >= link.first_step and first <= link.last_step
