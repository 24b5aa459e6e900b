"""Thresholds of memory: growth, imbalance between ranks, and limits of hosts and devices."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MIB", "MemoryPolicy"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPolicy:
    """When memory is reported."""

    skip_ratio: float = 0.2
    """Share of the run, at its start, that is not judged: caches and allocators fill up in it. Source: convention."""
    min_growth_bytes: int = 32 * MIB
    """Smallest growth in bytes. Source: measured; smaller growth comes from an allocator's arenas."""
    min_rises: int = 4
    """Minimum number of rises, of five, between six parts of the samples. Source: convention; one part may fall."""
    imbalance_bytes: int = 1 << 30
    """Smallest difference from the peers for an imbalance (bytes). Source: convention."""
