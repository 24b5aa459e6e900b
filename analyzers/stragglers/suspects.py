"""Slow ranks as people speak of them: one rank or a whole node, for good, for a while or in turn, and for what reason.

    for suspect in suspects(stragglers, witnesses, nodes):
        suspect.ranks, suspect.cause, suspect.reason, suspect.pattern, suspect.node

1. The second witness is heard for each slow rank (`witness`): a rank whose core was taken does not compute more.
2. A rank that is slow in several phases because of its host is one suspect, not several.
3. Most ranks of one node, slow at the same time for the same cause, are the node; with one node only there is nothing
   to tell it from.
4. Ranks that are slow one after the other and never together are slow *in turn*: what goes round is no bad machine but
   a job that moves, or uneven data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from analyzers.stragglers.corroboration import REASONS, Verdict, Witness, judge
from analyzers.stragglers.device_comparison import DeviceBeside
from analyzers.stragglers.slow_rank import Straggler

__all__ = ["GPU_CLOCK", "Pattern", "Suspect", "pattern_of", "suspects", "with_device"]

Pattern = Literal["chronic", "since", "transient", "intermittent", "pauses", "rotating"]
GPU_CLOCK = "gpu_clock"
"""Cause of a rank that computes slowly because its device's clock is low."""
NODE_SHARE = 0.6
"""Slow ranks of a node from which it is the node."""
MIN_IN_TURN = 3
"""Ranks from which slowness that moves is called rotating."""
NUM_EPISODES = 3
"""Episodes of one rank from which it is called intermittent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """One rank, node or set of ranks with one cause. `members` are the slow ranks, the slowest first."""

    members: tuple[Straggler, ...]
    cause: str
    reason: str
    pattern: Pattern
    confirmed: bool = False
    """Whether CPU time or the kernel's count of waits for a core agrees."""
    witness: Witness = field(default_factory=Witness)
    node: str = ""
    device: DeviceBeside | None = None
    """The worst rank's device beside those of its peers, where health was sampled."""

    @property
    def why(self) -> str:
        """The reason, as people say it; empty if none is known."""
        if self.cause == GPU_CLOCK and self.device is not None:
            return self.device.explains(self.worst.factor)
        return REASONS.get(self.reason, "")

    @property
    def worst(self) -> Straggler:
        """The slowest of them."""
        return self.members[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All of them, in order."""
        return tuple(sorted({member.rank for member in self.members}))

    @property
    def first_step(self) -> int:
        """The earliest onset."""
        return min(member.first_step for member in self.members)

    @property
    def last_step(self) -> int:
        """The latest end, or the newest step."""
        return max(member.last_step for member in self.members)

    @property
    def ongoing(self) -> bool:
        """Whether any of them is slow at the newest step."""
        return any(member.ongoing for member in self.members)


def suspects(
    stragglers: Sequence[Straggler],
    witnesses: Mapping[tuple[int, str], Witness],
    nodes: Mapping[int, str],
    first_step: int,
) -> list[Suspect]:
    """Slow ranks joined, the worst first. `witnesses` by (rank, cause); `nodes`: each rank's; `first_step`: of all that
    were judged. Pure."""
    heard: dict[tuple[int, str], list[tuple[Straggler, Verdict]]] = {}
    for straggler in stragglers:
        witness = witnesses.get((straggler.rank, straggler.cause), Witness())
        verdict = judge(witness, cause=straggler.cause, excess_ms=straggler.excess_ms, factor=straggler.factor)
        heard.setdefault((straggler.rank, verdict.cause), []).append((straggler, verdict))
    single: list[Suspect] = []
    for (rank, cause), found in heard.items():
        straggler, verdict = max(found, key=lambda pair: pair[0].excess_ms)
        single.append(
            Suspect(
                members=(straggler,),
                cause=cause,
                reason=verdict.reason,
                pattern=pattern_of(straggler, first_step),
                confirmed=verdict.confirmed,
                witness=witnesses.get((rank, straggler.cause), Witness()),
            )
        )
    joined = _in_turn(_nodes(single, nodes))
    return sorted(joined, key=lambda suspect: -suspect.worst.excess_ms)


def with_device(suspect: Suspect, device: DeviceBeside | None) -> Suspect:
    """The suspect with its device's readings: a clock that accounts for slow computing is the cause."""
    if device is None:
        return suspect
    slowed = suspect.cause == "compute" and device.explains(suspect.worst.factor)
    return replace(suspect, device=device, cause=GPU_CLOCK if slowed else suspect.cause)


def pattern_of(straggler: Straggler, first_step: int) -> Pattern:
    """How one rank's slowness lies in time; `first_step`: the first that was judged."""
    if straggler.paused_ratio:
        return "pauses"
    if len(straggler.segments) >= NUM_EPISODES:
        return "intermittent"
    if not straggler.ongoing:
        return "transient"
    return "chronic" if straggler.segments[0].begin == 0 or straggler.first_step <= first_step else "since"


def _nodes(single: Sequence[Suspect], nodes: Mapping[int, str]) -> list[Suspect]:
    """Suspects of one node and cause, slow at the same time, as one."""
    sizes: dict[str, int] = {}
    for node in nodes.values():
        sizes[node] = sizes.get(node, 0) + 1
    groups: dict[tuple[str, str], list[Suspect]] = {}
    for suspect in single:
        groups.setdefault((nodes.get(suspect.worst.rank, ""), suspect.cause), []).append(suspect)
    found: list[Suspect] = []
    for (node, _), own in groups.items():
        together = _at_the_same_time(own)
        if len(sizes) < 2 or len(together) < max(2, NODE_SHARE * sizes.get(node, 0)):
            found += own
            continue
        found += [suspect for suspect in own if suspect not in together]
        members = sorted((suspect.worst for suspect in together), key=lambda member: -member.excess_ms)
        worst = next(suspect for suspect in together if suspect.worst is members[0])
        found.append(
            Suspect(
                members=tuple(members),
                cause=worst.cause,
                reason=worst.reason,
                pattern=worst.pattern,
                confirmed=worst.confirmed,
                witness=worst.witness,
                node=node,
            )
        )
    return found


def _at_the_same_time(own: Sequence[Suspect]) -> list[Suspect]:
    """Those whose time overlaps for the most part with that of the one that is slow the longest."""
    if not own:
        return []
    longest = max(own, key=lambda suspect: suspect.last_step - suspect.first_step)
    length = longest.last_step - longest.first_step + 1
    return [
        suspect
        for suspect in own
        if min(suspect.last_step, longest.last_step) - max(suspect.first_step, longest.first_step) + 1 >= length / 2
    ]


def _in_turn(found: Sequence[Suspect]) -> list[Suspect]:
    """Suspects of one cause that are slow one after the other, as one."""
    result: list[Suspect] = []
    for cause in dict.fromkeys(suspect.cause for suspect in found):
        own = sorted((suspect for suspect in found if suspect.cause == cause), key=lambda s: s.first_step)
        episodes = sorted(
            (segment.begin, segment.end, suspect.worst.rank)
            for suspect in own
            for member in suspect.members
            for segment in member.segments
        )
        apart = all(after[0] >= before[1] - 2 for before, after in pairwise(episodes))
        if len(own) < MIN_IN_TURN or not apart or any(suspect.node for suspect in own):
            result += own
            continue
        members = sorted((suspect.worst for suspect in own), key=lambda member: -member.excess_ms)
        worst = next(suspect for suspect in own if suspect.worst is members[0])
        result.append(
            Suspect(
                members=tuple(members),
                cause=cause,
                reason=worst.reason,
                pattern="rotating",
                confirmed=worst.confirmed,
                witness=worst.witness,
            )
        )
    return result
