"""Decide whether another device would be faster than a straggler's.

    reason_to_stay(finding)                 # "" if it would, else the reason why not

A rank can be replaced for what its device does to it, never for what the run gives it to do: a slow rank on another
device would be as slow.
"""

from __future__ import annotations

from analyzers.finding import Finding
from probes.step_clock import GAPS

__all__ = ["reason_to_stay"]

_OF_DEVICE = ("compute", "gpu_clock")
"""Causes that lie in the device."""
_OTHERS = {
    "data": "it waits for its data, which is read from outside of the device",
    "host": "its host keeps it from running (another process, a collection, a lock or the disk), not its device",
    "sequence_length": "it has longer sequences than its peers, so any device would be as slow",
    "communication": "a link has two ends, and which of them is slow is not known",
}
_LASTING = ("chronic", "since")
"""Patterns of a rank that is slow all the time."""


def reason_to_stay(finding: Finding, *, has_experts: bool = False) -> str:
    """Why another device would not help; empty if it would. Pure.

    `has_experts`: ranks hold different experts, so that what they compute depends on the routing of tokens.
    """
    of = finding.evidence
    if finding.cause not in _OF_DEVICE:
        return _OTHERS.get(finding.cause, f"the cause {finding.cause or 'is unknown and'} does not act")
    if finding.cause == "compute" and of.get("place") in GAPS:
        return "it loses the time between phases, where the training code and not the device is at work"
    if finding.cause == "compute" and has_experts:
        return "ranks hold different experts, so more tokens for its experts slow it down as well"
    if of.get("compared_with"):
        return "no other rank has the same work, so its own may have grown"
    if of.get("pattern") not in _LASTING:
        return f"it is not slow all the time (pattern: {of.get('pattern')})"
    return ""
