"""When to exclude slow ranks or a broken device: the run's settings, and the minimum cost of a slow rank.

policy = exclusion_policy(run.manifest())
reason_to_keep(finding, policy)              # "" if the finding asks for an exclusion, else the reason against it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from analyzers.finding import Finding
from analyzers.wording import is_number
from probes.settings.section import read
from probes.settings.sections import DeviceResponse, RecoverySettings
from probes.step_clock import GAPS

__all__ = ["ExclusionPolicy", "exclusion_policy", "reason_to_keep"]

_DEFAULT = RecoverySettings()
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExclusionPolicy:
    """Settings `recovery.*` of the run; defaults if it has none, like an attached run."""

    on_straggler: DeviceResponse = "report"
    on_xid: DeviceResponse = "report"
    straggler_after_s: float = _DEFAULT.straggler_after_s
    """For how long a rank must have been reported as slow (seconds). Source: convention, a minute."""
    straggler_speedup: float = _DEFAULT.straggler_speedup
    """Step time / step time without it from which it is worth a restart (ratio). Source: convention."""
    cooldown_s: float = _DEFAULT.exclusion_cooldown_s
    """Between two requests (seconds). Source: convention; a restart costs up to minutes on a large job."""
    dry_run: bool = False


def exclusion_policy(manifest: Mapping[str, Any]) -> ExclusionPolicy:
    """The settings that a run was configured with. Acts on nothing where recovery is turned off, or not configured."""
    given = read(RecoverySettings, manifest)
    if not given.enabled:
        return ExclusionPolicy()
    return ExclusionPolicy(
        on_straggler=given.on_straggler,
        on_xid=given.on_xid,
        straggler_after_s=given.straggler_after_s,
        straggler_speedup=given.straggler_speedup,
        cooldown_s=given.exclusion_cooldown_s,
        dry_run=given.exclusion_dry_run,
    )


def reason_to_keep(finding: Finding, policy: ExclusionPolicy, *, has_experts: bool = False) -> str:
    """The reason why a straggler stays in the run; empty if it may be left out. Pure."""
    if reason := reason_to_stay(finding, has_experts=has_experts):
        return reason
    of = finding.evidence
    speedup: Any = of.get("speedup_without_it_ratio")
    if of.get("whatif_withheld") or not is_number(speedup):
        return "what the run would gain is not known"
    if speedup < policy.straggler_speedup:
        return f"the run would be {speedup:.2f}x as fast without it, below {policy.straggler_speedup:g}x"
    return ""


def reason_to_stay(finding: Finding, *, has_experts: bool = False) -> str:
    """Why another device would not help; empty if it would. Pure.

    `has_experts`: ranks hold different experts, so that what they compute depends on the routing of tokens.

    Replacing a device only helps if the device makes the rank slow; a rank that the run gives more work would be as
    slow on another device.
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
