"""Thresholds of verdicts on text logs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LogPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPolicy:
    """When a line is not part of how the job ended."""

    kernel_slack_s: float = 900.0
    """Seconds before the first and after the last line of the job within which a kernel's line certainly belongs to it.
    Source: torch's default timeout of 600 s, plus clock differences.
    """
    kernel_other_s: float = 93_600.0
    """Seconds beyond which a kernel's line belongs to another time: 26 hours, the largest difference between two time
    zones. Source: ISO 8601 offsets."""
    poll_s: float = 6.0
    """Seconds within which a launcher may report ends in the wrong order. Source: torchrun's monitor interval of 5 s
    until torch 2.3, and a second of its table."""
    same_second_s: float = 1.0
    """Seconds within which ends that a launcher reports count as simultaneous. Source: resolution of torchrun's
    table."""
    usual_ranks_of_a_node: int = 8
    """Ranks on a node of most jobs: this rank and later ones are probably not on the first node. Source: most servers
    have 8 devices. A few have 16, so it is only certain for ranks from `MAX_RANKS_OF_A_NODE`
    (`store.readers.logs.identities`) on.
    """
