"""Thresholds of what-if analyses."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WhatIfPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfPolicy:
    """Size of a graph, conditions under which it is trusted, and the share of ranks that counts as the worst."""

    worst_share_ratio: float = 0.03
    """Share of the ranks that count as the worst, whose balancing removes the share M_W of the slowdown. Source: Lin et
    al., OSDI 2025."""
