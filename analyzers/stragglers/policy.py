"""Thresholds of stragglers and of drops in throughput.

Ratios are parts of the peers' own time, observations are steps. A number without a named source was measured on the
simulator, in drills and in healthy runs on quiet, busy and overloaded machines (`benchmarks.accuracy.diagnosis`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from analyzers.communication.policy import SlowLinkPolicy

__all__ = [
    "ChangePolicy",
    "CorroborationPolicy",
    "InspectorPolicy",
    "PausePolicy",
    "PeriodicPolicy",
    "PersistencePolicy",
    "StragglerPolicy",
    "ThroughputPolicy",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistencePolicy:
    """When a rank is persistently behind its peers (`persistence`)."""

    min_effect_ratio: float = 0.035
    """Smallest slowdown of interest: a rank that is 5 % slow is measured at 4 to 6 %. The same number is the smallest
    growth, as a part of the peers' whole work, of a rank that is slow in only one phase or gap."""
    weak_effect_ratio: float = 0.015
    """Smallest slowdown over at least a hundred steps among many peers, because their spread is well known."""
    lone_effect_ratio: float = 0.10
    """Smallest slowdown if the peers' spread is unknown: with one peer, against the rank's own past, and once it is
    over.
    """
    scales: tuple[int, ...] = (1, 5, 20)
    """Numbers of blocks that are averaged. A disturbance that lasts longer than the longest is not noise."""
    min_noise_ratio: float = 0.004
    """Smallest noise assumed for a block: four blocks that are quiet by accident prove nothing."""
    clear_excess_ratio: float = 1.0
    """Excess at which a single observation supports a slowdown of any size: the peers' own work, which the excess is
    relative to, varies several-fold on a busy machine."""
    min_length_ended: int = 20
    """Minimum number of observations of a slowdown that is over: a burst of another job on a shared machine is shorter.
    It also applies to a slowdown that lasts if the noise of all own work is twice `calm_noise_ratio`: there the bursts
    of two neighbours may join.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePolicy:
    """When a rank counts as slower than it was (`change_point`)."""

    min_effect_ratio: float = 0.012
    """Smallest slowdown of interest: one of 2 % is measured at 1.6 % and more."""
    calm_noise_ratio: float = 0.025
    """Noise of one observation of a rank's whole own work above which more observations than the minimum are needed:
    proportionally more, because on a busy machine the burst of another job lasts for 10 to 20 steps."""
    lasting_noise: float = 1.8
    """Noise of a window's mean / its value for white noise, at which disturbances last for whole windows."""
    lasting_factor: int = 4
    """Number of windows that are then needed."""
    min_sigmas_few: float = 6.5
    """Smallest test statistic in small groups, in which few other ranks show how large noise can be; it is 1.5 + sqrt(2
    ln(ranks x onsets)) in others, and if more places are tried.
    """
    min_noise_ratio: float = 0.0015
    """Smallest noise assumed for one observation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PausePolicy:
    """When a rank pauses again and again (`pauses`)."""

    min_share_ratio: float = 0.15
    """Minimum share of pauses among the observations from the first to the last."""
    peer_factor: float = 5.0
    """Pauses of the rank / pauses of any other rank in the same time."""
    min_length_ended: int = 50
    """Minimum number of observations from the first pause to the last, once pausing is over: a burst of another job is
    shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorroborationPolicy:
    """When CPU time and kernel counters change the cause."""

    crowded_s: float = 10.0
    """Seconds for which a rank must be slow on a busy machine. In clean loops with ten jobs per core, one of two
    ranks had a core to itself for up to 4 s.
    """
    crowded_cpu_ratio: float = 0.15
    """Largest excess of CPU time (ratio over the peers') that a rank on a busy machine may have without doing more
    work. In 354 stretches of 20 steps of healthy ranks (the demo on two cores with a load of 12 to 18) it was up to
    0.11, with an excess of up to 14 % of the work (10 to 39 ms).
    """
    crowded_cpu_ms: float = 5.0
    """Largest excess of CPU time on a busy machine at which no rank is called slow, however short its steps: caches
    that other processes empty, and a core's other thread. Two loops of 5 to 9 ms had up to 3.7 ms, at a load of 25 on
    two cores (`python -m benchmarks.strangers --faults none`)."""
    paging_faults: float = 1.0
    """Pages read from disk per step, in excess of the peers, at which a rank that does not run is paging."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerPolicy:
    """When a slow rank is reported at all."""

    persistence: PersistencePolicy = field(default_factory=PersistencePolicy)
    change: ChangePolicy = field(default_factory=ChangePolicy)
    pauses: PausePolicy = field(default_factory=PausePolicy)
    corroboration: CorroborationPolicy = field(default_factory=CorroborationPolicy)
    slow_link: SlowLinkPolicy = field(default_factory=SlowLinkPolicy)
    node_lag_s: float = 120.0
    """Seconds by which the records of one node may lag behind other nodes' records: the steps after them are judged
    once they are there. A rank whose records end earlier has left. Source: bound, a round of `watch` on a busy machine
    and of publishing is some 30 s."""
    burst_step_s: float = 0.05
    """Step length (s) below which more than the minimum number of observations is needed, so that they last as long. A
    burst of another job lasts for a certain time, not for a number of steps: if steps are shorter, a slowdown must last
    as long in seconds."""
    small_place_ratio: float = 0.15
    """Share of all work up to which a phase or gap is compared separately. Other jobs slow a rank in proportion to its
    work, so a larger place has as much noise as the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputPolicy:
    """When all ranks count as lastingly slower, or one run as slower than another."""

    min_rise_ratio: float = 0.15
    """Smallest rise of the step time. Placement and temperature cause smaller ones."""
    block: int = 10
    """Number of steps in a block that is compared by its median."""
    min_blocks: int = 10
    """Minimum number of blocks before and after: 100 steps. Another job on a shared machine is mostly shorter."""
    agreement_ratio: float = 0.9
    """Minimum share of blocks, before and after, on the right side of the midpoint between both levels."""
    skip_first: int = 10
    """First steps, which are always slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodicPolicy:
    """When steps at regular intervals are slow. Source: convention, and that a healthy job's evaluations and saves,
    which are outside of its steps, do not count."""

    min_cost_ratio: float = 0.04
    """Smallest share of the time that is lost: one step in 25 takes twice as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectorPolicy:
    """When a rank is suspected to be late."""

    min_calls: int = 50
    """Minimum number of collectives that all ranks of a communicator completed. Source: convention, as for a
    percentage."""
