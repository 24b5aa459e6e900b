"""Thresholds of stragglers and of drops of the throughput.

Ratios are parts of the peers' own time, observations are steps. Source of all numbers unless a field names another:
measured on the simulator, drills and healthy runs on quiet, busy and crowded machines (`benchmarks.diagnosis`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from analyzers.communication.policy import SlowLinkPolicy

__all__ = [
    "ChangePolicy",
    "CorroborationPolicy",
    "DevicePolicy",
    "InspectorPolicy",
    "PausePolicy",
    "PeriodicPolicy",
    "PersistencePolicy",
    "StragglerPolicy",
    "SuspectPolicy",
    "ThroughputPolicy",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistencePolicy:
    """When a rank is persistently behind its peers (`persistence`)."""

    min_effect_ratio: float = 0.035
    """Smallest slowdown of interest: a rank that is 5 % slow is measured at 4 to 6 %."""
    weak_effect_ratio: float = 0.015
    """The same over a hundred steps and more among at least `weak_peers` ranks, whose spread is known well."""
    weak_peers: int = 8
    """Ranks in a group for that."""
    pair_effect_ratio: float = 0.10
    """The same with one peer only, where no spread of peers is known."""
    block: int = 5
    """Observations whose median is compared: single jitters vanish, and two blocks are ten steps to detection."""
    scales: tuple[int, ...] = (1, 5, 20)
    """Blocks taken together."""
    candidate_ratio: float = 0.7
    """Part of the smallest slowdown from which a block is a candidate."""
    max_gap_blocks: int = 1
    """Blocks below that which do not end a run of candidates."""
    candidate_sigmas: float = 2.0
    """The same in units of the noise."""
    min_noise_ratio: float = 0.004
    """Least noise of a block: four blocks that are quiet by accident prove nothing."""
    min_sigmas: float = 4.0
    """Least k; it is 1 + sqrt(2 ln(places)) where more places are tried. Source: bound for the largest of normal
    variables."""
    peer_factor: float = 2.5
    """Excess / largest deviation of a peer, in groups of fewer than `small_group` peers."""
    small_group: int = 6
    """Peers from which their spread is a robust estimate and no longer their largest deviation."""
    agreement_ratio: float = 0.7
    """Share of single observations above half the effect."""
    clear_excess_ratio: float = 1.0
    """Excess from which a single observation counts as one of these, however large the effect: the peers' own work,
    over which it is taken, varies several-fold on a busy machine."""
    min_length: int = 10
    """Observations of a slowdown that is still there at the end, where the noise allows."""
    quiet_ratio: float = 9.0
    """Effect / noise of a block from which `min_length` is enough; below, proportionally more observations are needed.
    A burst of another job on a crowded machine is 3 to 6 times the noise and lasts 10 to 20 steps."""
    min_length_ended: int = 20
    """Observations of a slowdown that is over: a burst of another job on a shared machine is shorter."""
    ended_effect_ratio: float = 0.10
    """Smallest slowdown of interest once it is over."""
    precedent_factor: float = 1.4
    """Excess / the largest one that any rank shows elsewhere over as long."""
    precedent_factor_ended: float = 2.0
    """The same once it is over."""
    max_precedent: int = 100
    """Longest window searched for a precedent (observations): what lasts longer is no noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePolicy:
    """When a rank became slower than it was (`change_point`)."""

    min_effect_ratio: float = 0.012
    """Smallest slowdown of interest: one of 2 % is measured at 1.6 % and more."""
    min_length: int = 10
    """Observations after the onset."""
    calm_noise_ratio: float = 0.025
    """Noise of one observation of all own work up to which `min_length` is enough; in more noise, proportionally more
    observations are needed: another job on a crowded machine stays for 10 to 20 steps."""
    clear_ratio: float = 10.0
    """Change / noise from which that noise asks for no further observations. Bursts of another job are 3 to 6 times the
    noise."""
    newest: int = 500
    """Newest observations from which that noise is measured."""
    lasting_noise: float = 1.8
    """Noise of windows / that of white noise from which disturbances last as long as the window."""
    lasting_window: int = 10
    """Shortest window (observations) whose noise is judged so."""
    lasting_factor: int = 4
    """Observations that are then needed / the length of the window."""
    noise_windows: tuple[int, ...] = (5, 10, 20, 50)
    """Lengths over which noise is measured."""
    min_window_differences: int = 16
    """Differences between windows from which their noise is known well enough."""
    min_before: int = 15
    """Observations before the onset: fewer are no history."""
    min_sigmas: float = 5.0
    """Least test statistic; it is 1.5 + sqrt(2 ln(ranks x onsets)) where more places are tried. White noise passes
    once in some ten thousand calls."""
    min_sigmas_few: float = 6.5
    """The same in groups of up to `few_peers`, where few others show what noise can do."""
    few_peers: int = 4
    """Ranks in a group up to which one that changes moves the excess of all others."""
    clip_sigmas: float = 4.0
    """An observation counts for at most this many times the noise."""
    agreement_ratio: float = 0.75
    """Share of blocks after the onset above half the change."""
    agreement_block: int = 5
    """Observations of such a block."""
    peer_factor: float = 2.0
    """Change / the largest one of another rank in the same observations."""
    peer_factor_many: float = 1.4
    """The same in groups of `many_peers` and more: the largest of many is larger."""
    many_peers: int = 8
    """Ranks in a group for that."""
    precedent_factor: float = 1.5
    """Change / largest deviation of any rank from its own mean, in any window as long before the onset."""
    min_precedents: int = 12
    """Windows before the onset, over all ranks, from which that is reliable."""
    few_precedents_factor: float = 1.5
    """With fewer, `precedent_factor` is this many times larger."""
    own_growth_ratio: float = 0.4
    """Part of the change by which the rank's own time must have grown."""
    min_noise_ratio: float = 0.0015
    """Least noise of one observation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PausePolicy:
    """When a rank pauses again and again (`pauses`)."""

    min_excess_ratio: float = 2.0
    """Excess of a pause / the whole own work of the peers."""
    min_sigmas: float = 8.0
    """The same / the noise of one observation."""
    min_pauses: int = 10
    """Pauses from which they are no accident."""
    min_share_ratio: float = 0.15
    """Their share of the observations from the first to the last."""
    max_gap_ratio: float = 1 / 3
    """Longest time without one / all of that time."""
    peer_factor: float = 5.0
    """Pauses of the rank / those of any other in the same time."""
    min_length_ended: int = 50
    """Observations from the first to the last once it is over: a burst of another job is shorter."""
    newest_gaps: float = 5.0
    """Observations without a pause, in mean distances of two, from which it is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorroborationPolicy:
    """When CPU time and kernel counters change the cause. Parts of the excess in wall time."""

    explained_ratio: float = 0.5
    """Excess in waiting for a core, in the collector or in tokens from which it is the cause."""
    own_core_ratio: float = 1 / 3
    """Excess in waiting for a core / the whole wait from which a rank's core is taken. Below, its peers wait for nearly
    as long, or all do at other times: the machine is crowded, and no rank is to blame."""
    crowded_ratio: float = 0.5
    """Usual wait of all ranks for a core / their CPU time from which the machine is crowded."""
    crowded_s: float = 10.0
    """Seconds for which a rank must wait for a core there: on clean loops with ten jobs a core one of two ranks had a
    core of its own for up to 4 s."""
    crowded_cpu_ratio: float = 0.15
    """CPU time over the peers', less one, up to which a rank of a crowded machine need not work more. In 354 stretches
    of 20 steps of healthy ranks (the demo on two cores with a load of 12 to 18) it was up to 0.11, with an excess of up
    to 14 % of the work (10 to 39 ms)."""
    min_usual_steps: int = 10
    """Steps outside of the slow ones (count) from which it is known what is usual. Source: convention."""
    worked_ratio: float = 0.5
    """Excess in CPU time from which the rank does more work. Another job on half of the core also takes a part of the
    caches, so CPU time grows as well, by less."""
    more_work_ratio: float = 1.0
    """CPU time over the peers', less one, from which a rank does more work whatever it waits for a core besides: what
    other jobs take of the caches does not double it. Source: convention."""
    same_factor_ratio: float = 0.5
    """Growth of CPU time / growth of wall time, both over the peers, from which the rank computes more."""
    paging_faults: float = 1.0
    """Pages read from a disk per step, over the peers, from which a rank that does not run is paging."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePolicy:
    """When a device's clock is the cause."""

    explained_ratio: float = 0.5
    """Part of a slowdown that a lower clock must account for: memory-bound work does not scale with the clock."""
    loaded_ratio: float = 0.2
    """GPU utilisation from which a reading counts as under load. Source: convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectPolicy:
    """When slow ranks are one suspect, and how its pattern in time is named. Source: convention."""

    node_share_ratio: float = 0.6
    """Share of a node's ranks that must be slow for the node to be the suspect."""
    together_ratio: float = 0.5
    """Share of the longest one's time for which they must overlap."""
    min_in_turn: int = 3
    """Ranks from which slowness that moves is called rotating."""
    min_episodes: int = 3
    """Episodes of one rank from which it is called intermittent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerPolicy:
    """When a slow rank is reported."""

    persistence: PersistencePolicy = field(default_factory=PersistencePolicy)
    change: ChangePolicy = field(default_factory=ChangePolicy)
    pauses: PausePolicy = field(default_factory=PausePolicy)
    corroboration: CorroborationPolicy = field(default_factory=CorroborationPolicy)
    device: DevicePolicy = field(default_factory=DevicePolicy)
    suspects: SuspectPolicy = field(default_factory=SuspectPolicy)
    slow_link: SlowLinkPolicy = field(default_factory=SlowLinkPolicy)
    warm_up_steps: int = 5
    """First observations of an attempt that are left out: compilation, allocators, caches, autotuning."""
    node_lag_s: float = 120.0
    """Seconds by which the records of one rank may end before those of the others because its node's arrive later: the
    steps after them are judged once they are there. A rank whose records end earlier has left. Source: bound, a round
    of `watch` on a crowded machine and of publishing is some 30 s."""
    burst_step_s: float = 0.05
    """Length of the steps (s) for which the least numbers of observations were measured. A burst of another job lasts
    for a time and not for a number of steps: where steps are shorter, a slowdown must last as long in seconds."""
    min_excess_ms: float = 0.3
    """Smallest excess per step (ms): below, the grain of the timer and the scheduler is measured."""
    min_step_share_ratio: float = 0.005
    """Smallest excess as a share of the whole step: a slow rank in a run that only communicates costs nothing."""
    second_cause_ratio: float = 0.3
    """Excess / that of the rank's first cause from which a second cause is reported (two faults at once); below it is a
    side effect: a rank short of CPU is slow in everything."""
    pause_share_ratio: float = 0.7
    """Share of what a rank loses by pauses from which it lost it waiting for data, or while it was slow anyway."""
    place_effect_ratio: float = 0.035
    """Smallest growth, part of the peers' whole work, of a rank that is slow in one phase or gap only."""
    small_place_ratio: float = 0.15
    """Usual part of all work up to which a phase or gap is compared by itself. Other jobs slow a rank in proportion to
    its work, so a larger place has as much noise as the whole."""
    place_total_ratio: float = 0.5
    """What its other work takes less / excess in the place from which the work has only moved there."""
    moved_sigmas: float = 2.0
    """Standard errors by which its other work must take less than that. Source: convention, 95 %."""
    place_ratio: float = 0.75
    """Part of a rank's excess that one phase or gap must hold to be named: a rank that is slow in all its computing has
    some 60 % of it in backward."""
    host_gap_of_peers_ratio: float = 0.25
    """Gap between phases on the hosts of peers / excess of a rank on a GPU in it, up to which it names the place. Where
    a loop reads a value back hosts wait for their devices, those of peers for the whole work before it: a device must
    be 5 times as slow as theirs to pass. Source: bound."""
    host_late_ratio: float = 0.9
    """Moment at which a host handed a late call over / time since the call before, from which the host was late
    (ratio). Source: a kernel starts some 20 us after its launch on an idle device, less than a tenth of any delay that
    is reported."""
    device_other_wait_ratio: float = 0.4
    """Part of the waiting in its groups that another member causes beyond what a rank on a GPU causes, from which it is
    that one's doing. Source: simulated runs; up to 0.2 for slow ranks and those of a slow node, 0.5 and more for ranks
    beside a slow link."""
    critical_slowdown_ratio: float = 2.0
    """Step time with / without the rank from which the finding is critical."""
    min_warning_slowdown_ratio: float = 1.01
    """The same from which it is a warning; below, a known cost is too small to act on (ratio). Source: convention, the
    gain from which the verdict mentions balanced ranks."""
    past_effect_ratio: float = 0.10
    """Smallest growth over its own past of a rank without peers: no spread is known, as with one peer only."""
    onset_reach: int = 10
    """Observations by which the CPU time may move an onset that the wall clock shows: on two cores with a load of 12
    to 18 it was up to 8 off in five runs of the demo, the CPU time never by one."""
    onset_sigmas: float = 3.0
    """Rise of the CPU time / noise of one step's from which it dates the onset: half a rise is then 1.5 sigmas, and two
    steps that are disturbed one after the other are rare. In those runs it was 4 to 6."""
    past_others_factor: float = 2.0
    """Its growth / the largest of another rank in the same observations, which do other work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputPolicy:
    """When all ranks became slower and stayed so, or one run is slower than another."""

    min_rise_ratio: float = 0.15
    """Least rise of the step's time. Placement and temperature cause smaller ones."""
    between_rise_ratio: float = 0.05
    """The same between two runs, whose whole interval must lie above it."""
    block: int = 10
    """Steps whose median is compared."""
    min_blocks: int = 10
    """Blocks before and after: 100 steps. Another job on a shared machine is mostly shorter."""
    min_sigmas: float = 6.0
    """Rise / noise of a block."""
    agreement_ratio: float = 0.9
    """Share of the blocks on their side of the middle between the levels."""
    skip_first: int = 10
    """Steps of the start, which are slow by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodicPolicy:
    """When steps at regular distances are slow. Source: convention, and that a healthy job's evaluations and "
     "saves, which
    stand outside its steps, do not count."""

    min_factor: float = 1.5
    """Duration / that of the median step from which a step is slow."""
    min_times: int = 5
    """Slow steps from which their distances are regular."""
    min_steps: int = 30
    """Steps that are needed."""
    min_cost_ratio: float = 0.04
    """Share of the time that is lost: one step in 25 twice as long."""
    regular_ratio: float = 0.8
    """Share of the distances that must be equal."""
    tolerance_ratio: float = 0.1
    """Difference of equal distances, as a share of them; one line at least."""
    skip_first: int = 5
    """Steps of the start, which are slow by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectorPolicy:
    """When a rank is suspected to be late."""

    min_calls: int = 50
    """Collectives that all ranks of a communicator completed. Source: convention, as for a percentage."""
    min_last_ratio: float = 0.5
    """Share of them in which it came last; by chance it is one of the number of ranks. Source: convention."""
    min_wait_ratio: float = 0.3
    """Share of the others' time in them that is waiting for it. Source: as `exposed_ratio`, convention."""
