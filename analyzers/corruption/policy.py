"""Thresholds of the corruption checks."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GradientOutlierPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientOutlierPolicy:
    """When a step is recomputed. A false alarm only costs one step, so occasional ones are accepted."""

    window_steps: int = 24
    """Steps of history. Source: convention."""
    min_ratio: float = 4.0
    """Smallest rise over the expected peak. Source: a bit flip below it does no harm."""
    min_sigmas: float = 8.0
    """Smallest rise in robust standard deviations: ranks' shares of a batch differ, the more the smaller they are.
    Source: measured; if the tails are as heavy as in Student's t distribution with 4 degrees of freedom, one step in
    1,000 is computed twice for nothing."""
    max_ratio: float = 100.0
    """Rise at which a step is always checked, however much the ranks differ. Source: measured; 8 sigmas are a rise of
    60 with four ranks of two sequences each, and of 10,000 with two such ranks."""
