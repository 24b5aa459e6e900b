"""Thresholds of what-if analyses."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WhatIfPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfPolicy:
    """Selection of the worst ranks."""

    worst_share_ratio: float = 0.03
    """Share of the ranks that counts as the worst. M_W is the share of the slowdown that would disappear if these ranks
    were as fast as the others. Source: Lin et al., OSDI 2025."""
