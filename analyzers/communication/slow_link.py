"""What a slow link is, and from when on something is called one.

    link.ranks, link.groups, link.factor, link.excess_ms, link.first_step
    link.is_worth_telling(step_ms, policy)

`slow_group` and `slow_pair` find them, `slow_crossing` says which member of a group it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from analyzers.communication.transfer_history import HistoryPolicy

SHOWN_RANKS = 8
Window = tuple[float, int, int, int]
"""Transfer (ms), calls, first and last step."""
Groups = dict[str, dict[int, Window]]
"""By group and number of the window."""
Classes = dict[tuple[str, str, int], Groups]
"""By dimension, operation and bytes."""

__all__ = ["Classes", "Groups", "SlowGroupPolicy", "SlowLink", "Window", "shared_parts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowGroupPolicy:
    """Thresholds of a slow link."""

    window_steps: int = 5
    """Steps whose median transfer is compared."""
    min_factor: float = 1.5
    """Transfer / median transfer of at least two groups beside it; ring collectives vary by 10 to 20 %."""
    min_factor_pair: float = 2.0
    """The same with a single group beside it."""
    min_excess_ms: float = 0.5
    """Smallest excess of interest (ms per step)."""
    min_step_share_ratio: float = 0.05
    """Smallest excess as a share of the step: ranks that share cores are late for each other by a few percent."""
    clear_factor: float = 3.0
    """Transfer / that of the groups or pairs beside it from which no lateness explains it: a link at a third of its
    speed is told of although it costs little yet."""
    min_clear_share_ratio: float = 0.005
    """Smallest excess of such a one as a share of the step."""
    min_windows: int = 2
    """Slow windows in a row: the 10 steps to detection."""
    min_windows_pair: int = 4
    """The same with a single group beside it: which of the two is the unusual one shows only in time."""
    min_windows_ended: int = 6
    """Slow windows of what is over again: a neighbour's burst on a shared machine is shorter."""
    min_windows_crowded: int = 4
    """Slow windows where ranks wait for a core for so long that this alone may slow their transfers; the factor must
    then be `clear_factor`."""
    host_share_ratio: float = 0.5
    """Waiting for cores as a share of the excess from which it explains it."""
    min_excess_crowded_ratio: float = 0.5
    """Excess as a share of the waiting for cores from which a clear factor is not explained by it: small messages take
    several times as long where whoever is to receive them waits for a core."""
    explained_share_ratio: float = 0.5
    """Share of a slow link's steps in which one of its ranks is slow from which that explains it."""
    agreement_ratio: float = 0.8
    """Share of slow windows from the onset to the end."""
    crossing_factor: float = 1.3
    """Transfer / that of the groups beside it of a group that crosses a slow one: which of its members is slow is then
    asked, no longer whether one is."""
    min_windows_crossing: int = 3
    """Newest windows of a crossing group that are looked at, or the newer half: the onset is uncertain by some."""
    history: HistoryPolicy = field(default_factory=HistoryPolicy)
    """Of a group with nothing beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """Ranks between which transfers are slow; ms per step."""

    ranks: tuple[int, ...]
    groups: tuple[str, ...]
    op: str
    num_bytes: int
    factor: float
    excess_ms: float
    transfer_ms: float
    others_ms: float
    first_step: int
    last_step: int
    ongoing: bool
    alone: bool = False
    """Compared with its own past, since no group is beside it; then `others_ms` is what it took before."""

    def is_worth_telling(self, step_ms: float, policy: SlowGroupPolicy) -> bool:
        """Whether it costs enough of the step, for how clear it is."""
        is_clear = not self.alone and self.factor >= policy.clear_factor
        least = policy.min_clear_share_ratio if is_clear else policy.min_step_share_ratio
        return self.excess_ms >= least * step_ms

    @property
    def is_pair(self) -> bool:
        """Whether it was seen in messages from rank to rank: `groups` are pairs then."""
        return " -> " in self.groups[0]

    @property
    def text(self) -> str:
        """Who is meant, as people say it."""
        if len(self.ranks) == 1:
            return f"rank {self.ranks[0]}"
        if self.is_pair:
            return (
                f"the link {self.groups[0] if len(self.groups) == 1 else ' <-> '.join(f'rank {r}' for r in self.ranks)}"
            )
        listed = ", ".join(map(str, self.ranks[:SHOWN_RANKS])) + ("..." if len(self.ranks) > SHOWN_RANKS else "")
        return f"{'a' if self.alone else 'the'} link of ranks {listed}"


def shared_parts(groups: Groups) -> list[int]:
    """The windows that all groups have."""
    return sorted(set.intersection(*(set(windows) for windows in groups.values())))
