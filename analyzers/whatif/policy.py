"""Thresholds of what-if analyses."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WhatIfPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfPolicy:
    """Steps that a graph takes, when it is trusted, and which ranks count as the worst."""

    worst_share_ratio: float = 0.03
    """Share of the ranks that are balanced for M_W. Source: Lin et al., OSDI 2025."""
