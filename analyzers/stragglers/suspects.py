"""Suspects: a slow rank, a slow node or ranks slow in turn, with a cause and a pattern in time.

    for suspect in suspects(stragglers, counters, nodes, first_step=6):
        suspect.ranks, suspect.cause, suspect.reason, suspect.pattern, suspect.node

1. Counters corroborate or change the cause of each slow rank (`corroboration`). A rank is not a suspect if it waits for
   a core hardly longer than its peers, or than all ranks at other times. Nor is it a suspect if its excess is small
   compared with the waits on a crowded machine, because healthy ranks differ as much there.
2. A rank that is slow in several phases because of its host is one suspect, not several.
3. If most ranks of a node are slow at the same time for the same cause, the node is the suspect; a single node cannot
   be compared with others.
4. Ranks that are slow one after the other and never together are slow *in turn*: not a bad machine, but another job
   that moves, or uneven data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from analyzers.policy import SHARED
from analyzers.stragglers.comparison.corroboration import REASONS, Attribution, Counters, attribute
from analyzers.stragglers.comparison.device_comparison import DeviceComparison
from analyzers.stragglers.comparison.peer_comparison import Straggler
from analyzers.stragglers.policy import StragglerPolicy

__all__ = ["GPU_CLOCK", "Pattern", "Suspect", "is_duty", "pattern_of", "suspects", "with_device"]

Pattern = Literal["chronic", "since", "transient", "intermittent", "pauses", "rotating"]
GPU_CLOCK = "gpu_clock"
"""Cause of a rank that computes slowly because its device's clock is low."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """One rank, node or set of ranks with one cause. `members` are the slow ranks, the slowest first."""

    members: tuple[Straggler, ...]
    cause: str
    reason: str
    pattern: Pattern
    confirmed: bool = False
    """True if CPU time or the kernel's waits for a core support the cause."""
    counters: Counters = field(default_factory=Counters)
    node: str = ""
    device: DeviceComparison | None = None
    """The worst rank's device compared with its peers' devices, if health was sampled."""

    @property
    def why(self) -> str:
        """The reason as a sentence; empty if none is known."""
        if self.cause == GPU_CLOCK and self.device is not None:
            return self.device.explains(self.worst.factor)
        return self.waits_for_core or REASONS.get(self.reason, "")

    @property
    def waits_for_core(self) -> str:
        """Describe CPU time and waits for a core if most of a compute excess is waiting; otherwise empty."""
        if self.cause != "compute" or self.worst.by_cpu:
            return ""
        return self.counters.waiting_part(self.worst.excess_ms)

    @property
    def worst(self) -> Straggler:
        """The slowest member."""
        return self.members[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All members in order."""
        return tuple(sorted({member.rank for member in self.members}))

    @property
    def first_step(self) -> int:
        """The earliest onset of the members."""
        return min(member.first_step for member in self.members)

    @property
    def last_step(self) -> int:
        """The latest end of the members, or the newest step."""
        return max(member.last_step for member in self.members)

    @property
    def ongoing(self) -> bool:
        """True if any member is slow at the newest step."""
        return any(member.ongoing for member in self.members)


def suspects(
    stragglers: Sequence[Straggler],
    counters: Mapping[tuple[int, str], Counters],
    nodes: Mapping[int, str],
    first_step: int,
    policy: StragglerPolicy | None = None,
) -> list[Suspect]:
    """Join slow ranks into suspects, the worst first. Pure.

    `counters`: by (rank, cause). `nodes`: {rank: node}. `first_step`: the first step that was judged.
    """
    policy = policy or StragglerPolicy()
    attributed: dict[tuple[int, str], list[tuple[Straggler, Attribution]]] = {}
    for straggler in stragglers:
        rank_counters = counters.get((straggler.rank, straggler.cause), Counters())
        attribution = attribute(
            rank_counters, cause=straggler.cause, excess_ms=straggler.excess_ms, factor=straggler.factor,
            policy=policy.corroboration,
        )  # fmt: skip
        if attribution.is_waiting and not rank_counters.has_own_core(policy.corroboration):
            continue
        if attribution.cause in ("compute", "host") and rank_counters.is_share_of_waits(
            straggler.excess_ms, policy.corroboration
        ):
            continue
        if straggler.factor <= 1 and rank_counters.is_crowded:
            continue  # the host is overloaded, and the rank's peers lose as much time in another phase
        attributed.setdefault((straggler.rank, attribution.cause), []).append((straggler, attribution))
    single: list[Suspect] = []
    for (rank, cause), found in attributed.items():
        straggler, attribution = max(found, key=lambda pair: pair[0].excess_ms)
        single.append(
            Suspect(
                members=(straggler,),
                cause=cause,
                reason=attribution.reason,
                pattern=pattern_of(straggler, first_step),
                confirmed=attribution.confirmed,
                counters=counters.get((rank, straggler.cause), Counters()),
            )
        )
    joined = _join_in_turn(_join_nodes(single, nodes))
    return sorted(joined, key=lambda suspect: -suspect.worst.excess_ms)


def with_device(suspect: Suspect, device: DeviceComparison | None) -> Suspect:
    """Add the device's readings: a clock that accounts for slow computing is the cause."""
    if device is None:
        return suspect
    slowed = suspect.cause == "compute" and device.explains(suspect.worst.factor)
    return replace(suspect, device=device, cause=GPU_CLOCK if slowed else suspect.cause)


def pattern_of(straggler: Straggler, first_step: int) -> Pattern:
    """Pattern in time of one rank's slowness; `first_step`: the first step that was judged."""
    if straggler.paused_ratio:
        return "pauses"
    parts = straggler.segments
    # Noise may split one slowdown in two, but not by this many steps.
    is_apart = any(after.begin - before.end >= SHARED.min_steps for before, after in pairwise(parts))
    if is_apart or len(parts) >= SHARED.min_times:
        return "intermittent"
    if not straggler.ongoing:
        return "transient"
    return "chronic" if straggler.segments[0].begin == 0 or straggler.first_step <= first_step else "since"


def _join_nodes(single: Sequence[Suspect], nodes: Mapping[int, str]) -> list[Suspect]:
    """Join suspects of one node and cause that are slow at the same time."""
    sizes: dict[str, int] = {}
    for node in nodes.values():
        sizes[node] = sizes.get(node, 0) + 1
    groups: dict[tuple[str, str], list[Suspect]] = {}
    for suspect in single:
        groups.setdefault((nodes.get(suspect.worst.rank, ""), suspect.cause), []).append(suspect)
    found: list[Suspect] = []
    for (node, _), on_node in groups.items():
        together = _at_the_same_time(on_node)
        if len(sizes) < 2 or len(together) < 2 or len(together) <= SHARED.explained_ratio * sizes.get(node, 0):
            found += on_node
        else:
            found += [suspect for suspect in on_node if suspect not in together]
            found.append(replace(_join(together), node=node))
    return found


def _join_in_turn(found: Sequence[Suspect]) -> list[Suspect]:
    """Join suspects of one cause that are slow one after the other."""
    result: list[Suspect] = []
    for cause in dict.fromkeys(suspect.cause for suspect in found):
        same_cause = sorted((suspect for suspect in found if suspect.cause == cause), key=lambda s: s.first_step)
        members = [member for suspect in same_cause for member in suspect.members]
        episodes = sorted((segment.begin, segment.end) for member in members for segment in member.segments)
        is_apart = all(after[0] >= before[1] - 2 for before, after in pairwise(episodes))
        if len(same_cause) < SHARED.min_times or not is_apart or any(suspect.node for suspect in same_cause):
            result += same_cause
        else:
            result.append(replace(_join(same_cause), pattern="rotating"))
    return result


def _join(single: Sequence[Suspect]) -> Suspect:
    """Join all members in one suspect, with cause, reason and counters of the slowest."""
    members = sorted((suspect.worst for suspect in single), key=lambda member: -member.excess_ms)
    worst = next(suspect for suspect in single if suspect.worst is members[0])
    return replace(worst, members=tuple(members))


def _at_the_same_time(single: Sequence[Suspect]) -> list[Suspect]:
    """Return the suspects that were slow mostly at the same time as the longest-lasting suspect."""
    if not single:
        return []
    longest = max(single, key=lambda suspect: suspect.last_step - suspect.first_step)
    least = SHARED.explained_ratio * (longest.last_step - longest.first_step + 1)
    return [
        suspect
        for suspect in single
        if min(suspect.last_step, longest.last_step) - max(suspect.first_step, longest.first_step) + 1 >= least
    ]


def is_duty(suspect: Suspect, place: str, *, has_data_spans: bool) -> bool:
    """Return True if the others may wait for a task that only this rank has. For example, rank 0 may log, evaluate and
    plot for all after the optimizer. Effects of its host or its device's clock are excluded. Without data spans
    it returns False, because the time may also be batch loading.
    """
    is_own = suspect.cause == "compute" or suspect.reason == "blocked"
    return suspect.ranks == (0,) and place == "after_optimizer" and has_data_spans and is_own
