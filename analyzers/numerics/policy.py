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
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpikePolicy:
    """Grouping of the spike detector's verdicts into findings, and their cause."""

    detector: SpikePolicy = field(default_factory=SpikePolicy)
    divergence_steps: int = 8
    """Number of spike steps that count as divergence. Source: a bad batch is felt for one to three steps."""
    late_steps: int = 8
    """Newest steps (count) that are judged only once all ranks' records of them have arrived. Source: convention; a
    record that is missing for longer is lost, not late."""
    stayed_ratio: float = 1.15
    """Loss at the end / loss before the spikes (ratio) above which the loss counts as diverged.
    Source: convention; a loss that recovers comes back to within a tenth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergencePolicy:
    """When a slow climb of the loss is divergence."""

    block_steps: int = 20
    """Steps of a block. Source: its median is four times quieter than a step, and five blocks show a rise within 100
    steps."""
    rise_ratio: float = 0.08
    """Smallest rise over the lowest block. Source: the order of the data changes a flat loss by less."""
    noise_steps: int = 256
    """Newest steps from which the noise is estimated. Source: convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScalePolicy:
    """When a falling fp16 loss scale is a collapse."""

    warm_up_steps: int = 50
    """Number of first steps in which the loss scale may still search for its level. Source: it starts high on purpose,
    16 halvings are usual.
    """
    max_overflows: int = 4
    """Overflows within the window that are a collapse. Source: by the growth interval one in 2,000 steps is usual, and
    four cut the scale to a sixteenth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFlowPolicy:
    """When gradients vanish or explode. Source of the factors: measured, the blocks of healthy transformers of 4 to 64
    layers lie within a factor of 21 of each other, at the start of training too."""

    factor: float = 1e4
    """Ratio of a single block's gradient norm to the median block's, or the reverse."""
    trend_factor: float = 1e3
    """Factor by which the norm changes steadily from the last block to the first. It is below `factor`, because a fault
    of one layer does not cause a steady change. The same factor holds for a rise of all gradients above their largest
    value in the first quarter of the run; warm-up, another batch size and a new data set stay far below it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoisePolicy:
    """When the noise scale is known well enough, and when the batch size is advised against."""

    far_ratio: float = 10.0
    """Batch size / noise scale, or the reverse, at which advice is given. Source: McCandlish et al. (2018), equation
    2.7: at 10 a step keeps 91 % of the progress, at 1/10 only 9 %."""
    min_local_ratio: float = 0.99
    """Smallest ratio of the mean squared local norm to the squared global norm that is believed. Source: it is at least
    1 unless gradients were scaled. The largest that is believed is `doubled_factor` times the ratio of pure noise,
    the number of data ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoadPolicy:
    """When experts are unbalanced. Source: convention; with a balancing loss that works, loads lie around 1."""

    highest_ratio: float = 0.85
    """Load of an expert that counts as too high, as a share of its load if every token chose it. It matters with few
    experts: with four experts and two choices a token, the highest possible load is twice the mean, which never reaches
    `SHARED.clear_factor`."""
