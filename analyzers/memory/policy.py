"""Thresholds of memory: growth, imbalance between ranks, and limits of hosts and devices."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MIB", "MemoryPolicy"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPolicy:
    """When memory is reported."""

    skip_ratio: float = 0.2
    """First share of the run, in which caches and allocators fill up. Source: convention."""
    min_growth_bytes: int = 32 * MIB
    """The same in bytes. Source: measured; below, the arenas of an allocator are seen."""
    min_rises: int = 4
    """Rises between the six parts of the samples, of five. Source: convention; one part may fall."""
    imbalance_bytes: int = 1 << 30
    """Least difference for that (bytes). Source: convention."""
