"""Thresholds of the numerics checks, each with its unit and source."""

from __future__ import annotations

from dataclasses import dataclass, field

from probes.guard.spike_detector import SpikePolicy

__all__ = [
    "DivergencePolicy",
    "ExpertLoadPolicy",
    "GradientFlowPolicy",
    "GradientNoisePolicy",
    "LossScalePolicy",
    "LossSpikePolicy",
    "NonFinitePolicy",
    "WhySpikePolicy",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinitePolicy:
    """Limits of the search. Any NaN or Inf counts: there is no threshold."""

    max_episodes: int = 50
    """Episodes that are explained one by one. Source: convention, a run with more has one cause that the first show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpikePolicy:
    """Grouping of the spike detector's verdicts into findings, and their cause."""

    detector: SpikePolicy = field(default_factory=SpikePolicy)
    join_steps: int = 3
    """Clean steps between two spikes of one finding. Source: convention."""
    divergence_steps: int = 8
    """Spike steps from which the loss has diverged. Source: a bad batch is felt for one to three steps."""
    rate_jump_ratio: float = 3.0
    """Learning rate over its median before that explains a spike. Source: warm-up grows by less per step once the
    detector is warm."""
    rate_history_steps: int = 16
    """Steps of that median. Source: the warm-up of the detector."""
    rate_reach_steps: int = 3
    """Steps after a jump of the rate within which a spike is its effect. Source: convention."""
    first_rows: int = 16
    """First rows of a run (count), of all its ranks, in which its loss is highest. Source: convention."""
    late_steps: int = 8
    """Newest steps (count) that are not judged before all ranks' records of them are there. Source: convention, beyond
    these a rank's record is lost rather than late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhySpikePolicy:
    """Baseline and outliers in the explanation of a spike."""

    history_steps: int = 16
    """Committed steps before the spike that give the usual loss and gradients. Source: convention."""
    outstanding_ratio: float = 2.0
    """Share of the rise over an even share from which one rank is named. Source: convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergencePolicy:
    """When a slow climb of the loss is divergence."""

    block_steps: int = 20
    """Steps of a block. Source: its median is four times quieter than a step, and five blocks show a rise within 100
    steps."""
    rising_blocks: int = 3
    """Blocks that rise one after the other, the newest included. Source: convention."""
    rise_ratio: float = 0.08
    """Smallest rise over the lowest block. Source: more than the order of the data does to a flat loss."""
    noise_z: float = 6.0
    """Smallest rise in standard errors of a difference of two blocks. Source: convention."""
    noise_steps: int = 256
    """Newest steps from which the noise is taken. Source: convention."""
    min_log_noise: float = 1e-4
    """Smallest standard error of a logarithm. Source: convention, a quiet run must not make 0.1 % a deviation."""
    min_signed_noise: float = 1e-9
    """Smallest standard error of a loss that has no logarithm. Source: convention, it has no typical size."""
    signed_rise_ratio: float = 2.0
    """Smallest rise of a loss that is not always positive, over the range of its block medians up to the lowest.
    Source: such objectives wander, but not beyond their whole past range by as much again."""
    signed_blocks: int = 8
    """Blocks from which that range means something. Source: convention."""
    single_block_ratio: float = 0.7
    """Share of the rise that one block may have. Source: a jump that stays is a loss spike, not a climb."""
    whole_ratio: float = 0.8
    """Share of its steps that a block must have to count. Source: convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverfittingPolicy:
    """When a validation loss that rises while the training loss falls is overfitting."""

    min_evaluations: int = 5
    """Evaluations of the run. Source: fewer do not show their noise."""
    rising: int = 3
    """Newest evaluations that all have to lie above the lowest. Source: convention, as a usual early stop waits."""
    rise_ratio: float = 0.005
    """Smallest rise over the lowest. Source: convention, below it an early stop gains nothing."""
    noise_z: float = 4.0
    """Smallest rise in standard deviations of an evaluation. Source: convention."""
    train_steps: int = 20
    """Steps before an evaluation over which the median of the training loss is taken. Source: as for divergence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScalePolicy:
    """When a falling fp16 loss scale is a collapse."""

    warm_up_steps: int = 50
    """Steps in which the scale is searched. Source: it starts high on purpose, 16 halvings are usual."""
    max_overflows: int = 4
    """Overflows within the window. Source: by the growth interval one in 2,000 steps is usual, and four cut the scale
    to a sixteenth."""
    window_steps: int = 200
    """Steps over which they are counted. Source: convention."""
    lowest_scale: float = 1.0
    """Scale that cannot be halved. Source: torch.amp.GradScaler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedValuePolicy:
    """When a logged value contradicts what the ranks recorded."""

    min_steps: int = 10
    """Steps that are compared at least (count). Source: convention; a factor of the job is there in every step."""
    spread_ratio: float = 0.01
    """Distance of a step's factor from the typical one, and of that from a factor of the job (ratio). Source: rounding
    of logged values to three digits."""
    same_steps_ratio: float = 0.95
    """Share of the steps that have it. Source: convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFlowPolicy:
    """When gradients vanish or explode. Source of the factors: measured, the blocks of healthy transformers of 4 to 64
    layers lie within a factor of 21 of each other, at the start of training too."""

    factor: float = 1e4
    """Distance of a single block from the median block."""
    trend_factor: float = 1e3
    """Change of the norm from the last block to the first where it changes from block to block. Less than `factor`: no
    accident of one layer does that."""
    own_factor: float = 1e3
    """Growth of all gradients over the largest of the run's first quarter. Source: warm-up, another batch size and a
    new data set stay far below."""
    own_samples: int = 5
    """Fewest samples of that first quarter. Source: convention."""
    min_samples: int = 3
    """Consecutive samples, the newest included. Source: convention, a single step may be odd."""
    min_blocks: int = 3
    """Blocks from which a median is that of the others, and a slope a trend. Source: convention."""
    window_samples: int = 20
    """Newest samples that are judged, and as many again, evenly spread, of those before. Source: convention."""
    max_blocks: int = 16
    """Blocks listed in the evidence. Source: convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoisePolicy:
    """When the noise scale is known well enough, and when the batch size is advised against."""

    window_samples: int = 200
    """Newest samples that are averaged, at most. Source: the scale grows tenfold in the first hundred steps."""
    min_samples: int = 20
    """Samples from which their average means something. Source: convention."""
    far_ratio: float = 10.0
    """Batch / noise scale, or the reverse, for advice. Source: McCandlish et al. (2018), equation 2.7: at 10 a step
    keeps 91 % of its progress, at 1/10 only 9 %."""
    sigmas: float = 2.0
    """Half width of the interval, standard errors. Source: convention, 95 %."""
    max_points: int = 10
    """Windows of its course over the run. Source: convention."""
    min_local_ratio: float = 0.99
    """Square of the local norms over that of the global one. Source: it is at least 1 unless gradients were scaled."""
    max_local_ratio_per_rank: float = 2.0
    """The same at most, per data rank. Source: pure noise gives 1 per data rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoadPolicy:
    """When experts are unbalanced. Source: convention; with a balancing loss that works, loads lie around 1."""

    hot_ratio: float = 3.0
    """Load of an expert over an even share."""
    highest_ratio: float = 0.85
    """The same over the highest possible load, at which all tokens choose the expert: with four experts and two choices
    a token that is 2, and `hot_ratio` would never be reached."""
    hot_samples_ratio: float = 0.5
    """Share of the window's samples in which it must be so."""
    dead_ratio: float = 0.05
    """Load over the whole window below which an expert is not used."""
    dropped_ratio: float = 0.1
    """Share of all choices that were dropped for lack of capacity."""
    window_samples: int = 20
    """Newest samples that are judged: the first steps of a run are not balanced."""
    min_samples: int = 3
    """Samples from which anything is reported."""
