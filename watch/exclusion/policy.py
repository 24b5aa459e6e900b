"""When slow ranks or a broken device are to be left out: the run's settings, and what a slow rank must cost.

policy = exclusion_policy(run.manifest())
reason_to_keep(finding, policy)              # "" if the finding asks for an exclusion, else the reason against it

Which causes lie in the device is `analyzers.stragglers.replaceable`'s to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from analyzers.finding import Finding
from analyzers.run.setting import number, setting
from analyzers.stragglers.replaceable import reason_to_stay
from analyzers.wording import is_number

__all__ = ["ExclusionPolicy", "Mode", "exclusion_policy", "reason_to_keep"]

Mode = Literal["report", "exclude", "replace"]
"""`exclude`: also where the run gets smaller. `replace`: only where a spare device or node takes the place."""


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
