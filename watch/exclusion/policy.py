"""When slow ranks or a broken device are to be left out: the run's settings, and which causes may act.

policy = exclusion_policy(run.manifest())
reason_to_keep(finding, policy)              # "" if the finding asks for an exclusion, else the reason against it

A rank is left out for what its device or host does to it, never for what the run gives it to do: a slow rank of another
device in its place would be as slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from analyzers.finding import Finding
from analyzers.health.xids import xid_table
from analyzers.run.setting import number, setting
from analyzers.wording import is_number

__all__ = ["ExclusionPolicy", "Mode", "exclusion_policy", "is_replace_xid", "reason_to_keep"]

Mode = Literal["report", "exclude", "replace"]
"""`exclude`: also where the run gets smaller. `replace`: only where a spare device or node takes the place."""
ACTING_CAUSES = ("compute", "gpu_clock")
_OTHER_CAUSES = {
    "data": "it waits for its data, which is read from outside of the device",
    "host": "its host keeps it from running (another process, a collection, a lock or the disk), not its device",
    "sequence_length": "it has longer sequences than its peers, so any device would be as slow",
    "communication": "a link has two ends, and which of them is slow is not known",
}
_LASTING = ("chronic", "since")
"""Patterns of a rank that is slow all the time."""
_GAPS = ("before_forward", "forward_to_backward", "backward_to_optimizer", "after_optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExclusionPolicy:
    """Settings `recovery.*` of the run; those of the defaults where it has none, as an attached run."""

    on_straggler: Mode = "report"
    on_xid: Mode = "report"
    straggler_after_s: float = 60.0
    """For how long a rank must have been reported as slow (seconds). Source: convention, a minute."""
    straggler_speedup: float = 1.2
    """Step time / step time without it from which it is worth a restart (ratio). Source: convention."""
    cooldown_s: float = 600.0
    """Between two requests (seconds). Source: convention; a restart costs up to minutes on a large job."""
    dry_run: bool = False


def exclusion_policy(manifest: Mapping[str, Any]) -> ExclusionPolicy:
    """The settings that a run was configured with. Acts on nothing where recovery is turned off."""
    default = ExclusionPolicy()
    if setting(manifest, "recovery.enabled") is not True:
        return default

    def mode(name: str) -> Mode:
        given = setting(manifest, f"recovery.{name}")
        return given if given in ("exclude", "replace") else "report"

    def amount(name: str, otherwise: float) -> float:
        given = number(manifest, f"recovery.{name}")
        return given if given is not None and 0 <= given < 1e9 else otherwise

    return ExclusionPolicy(
        on_straggler=mode("on_straggler"),
        on_xid=mode("on_xid"),
        straggler_after_s=amount("straggler_after_s", default.straggler_after_s),
        straggler_speedup=amount("straggler_speedup", default.straggler_speedup),
        cooldown_s=amount("exclusion_cooldown_s", default.cooldown_s),
        dry_run=setting(manifest, "recovery.exclusion_dry_run") is True,
    )


def is_replace_xid(finding: Finding) -> bool:
    """Return True for an XID after which NVIDIA's catalogue asks for another device."""
    known = xid_table()["xid"].get(str(finding.evidence.get("xid")), {})
    return finding.kind == "xid" and known.get("action") == "replace"


def reason_to_keep(finding: Finding, policy: ExclusionPolicy, *, has_experts: bool = False) -> str:
    """The reason why a straggler stays in the run; empty if it may be left out. Pure.

    `has_experts`: ranks hold different experts, so that what they compute depends on the routing of tokens.
    """
    of = finding.evidence
    if finding.cause not in ACTING_CAUSES:
        return _OTHER_CAUSES.get(finding.cause, f"the cause {finding.cause or 'is unknown and'} does not act")
    if finding.cause == "compute" and of.get("place") in _GAPS:
        return "it loses the time between phases, where the training code and not the device is at work"
    if finding.cause == "compute" and has_experts:
        return "ranks hold different experts, so more tokens for its experts slow it down as well"
    if of.get("compared_with"):
        return "no other rank has the same work, so its own may have grown"
    if of.get("pattern") not in _LASTING:
        return f"it is not slow all the time (pattern: {of.get('pattern')})"
    speedup: Any = of.get("speedup_without_it_ratio")
    if of.get("whatif_withheld") or not is_number(speedup):
        return "what the run would gain is not known"
    if speedup < policy.straggler_speedup:
        return f"the run would be {speedup:.2f}x as fast without it, below {policy.straggler_speedup:g}x"
    return ""
