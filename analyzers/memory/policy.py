"""Thresholds of memory: growth, imbalance between ranks, and limits of hosts and devices."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MemoryPolicy"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPolicy:
    """When memory is reported."""

    min_steps: int = 200
    """Steps from which a slope counts. Source: measured; a healthy run fills its allocators in the first hundred."""
    skip_ratio: float = 0.2
    """First share of the run, in which caches and allocators fill up. Source: convention."""
    min_growth_ratio: float = 0.05
    """Growth over the judged steps as a share of the level. Source: convention."""
    min_growth_bytes: int = 32 * MIB
    """The same in bytes. Source: measured; below, the arenas of an allocator are seen."""
    min_rises: int = 4
    """Rises between the six parts of the samples, of five. Source: convention; one part may fall."""
    imbalance_factor: float = 1.5
    """Memory of a rank over the median of its peers (ratio). Source: convention."""
    imbalance_bytes: int = 1 << 30
    """Least difference for that (bytes). Source: convention."""
    limit_ratio: float = 0.95
    """Use (ratio) from which a host or device is near its limit. Source: convention."""
    small_ratio: float = 0.2
    """Tensors of the ranks over the use of their device (ratio), below which others are named. Source: convention; a
    cache is rarely five times what it ever held."""
