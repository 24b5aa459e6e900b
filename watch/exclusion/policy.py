"""Decide whether a slow rank stays in the run: another device would not help, or the slowdown costs too little.

reason_to_keep(finding, read(RecoverySettings, run.manifest()))     # "" if the finding asks for an exclusion
"""

from __future__ import annotations

from typing import Any

from analyzers.finding import Finding
from analyzers.wording import is_number
from probes.settings.sections import RecoverySettings
from probes.step_clock import GAPS

__all__ = ["reason_to_keep"]

_DEVICE_CAUSES = ("compute", "gpu_clock")
"""Causes that are located in the device."""
_REASONS = {
    "data": "it waits for data, which another device would also have to wait for",
    "host": "its host delays it (another process, garbage collection, a lock, the disk), not its device",
    "sequence_length": "it has longer sequences than its peers, so any device would be as slow",
    "communication": "a link has two ends, and it is unknown which end is slow",
}
_LASTING = ("chronic", "since")
"""Patterns of a rank that is slow all the time."""


def reason_to_keep(finding: Finding, settings: RecoverySettings, *, has_experts: bool = False) -> str:
    """Return why a straggler stays in the run; empty if it may be excluded.

    `has_experts`: True if ranks hold different experts. The routing of tokens then decides how much each rank computes.

    Replacing a device helps only if the device is the cause: a rank that has more work would be as slow on another
    device.
    """
    evidence = finding.evidence
    if finding.cause not in _DEVICE_CAUSES:
        return _REASONS.get(
            finding.cause,
            f"the cause {finding.cause} does not lead to an exclusion" if finding.cause else "its cause is unknown",
        )
    if finding.cause == "compute" and evidence.get("place") in GAPS:
        return "it loses the time between phases, in the training code and not on the device"
    if finding.cause == "compute" and has_experts:
        return "ranks hold different experts, so more tokens for its experts would slow it down, too"
    if evidence.get("compared_with"):
        return "no other rank has the same work, so its work may have grown"
    if evidence.get("pattern") not in _LASTING:
        return f"it is not slow all the time (pattern: {evidence.get('pattern')})"
    speedup: Any = evidence.get("speedup_without_it_ratio")
    if evidence.get("whatif_withheld") or not is_number(speedup):
        return "the gain is unknown"
    if speedup < settings.straggler_speedup:
        return f"the run would be {speedup:.2f}x as fast without it, below {settings.straggler_speedup:g}x"
    return ""
