"""What to do about a kind of finding, in one line: the runbook behind the anchor says more.

remedy(finding)         # "find out what fills the disk, or move the run to a larger one"
"""

from __future__ import annotations

from analyzers.finding import Finding

__all__ = ["REMEDIES", "remedy"]

_BY_CAUSE = {}
REMEDIES = {
    "checkpoint_age": "find out why nothing was saved since, before the next failure",
    "checkpoint_cost": "save in the background, less often, or to a faster disk",
    "checkpoint_failed": "make room on the disk or repair the file system that the reason names",
    "configuration": "change the setting, and compare the two runs with `rankscope compare`",
    "slow_startup": "look at what this piece of the start reads, compiles or waits for",
}


def remedy(finding: Finding) -> str:
    """By cause where causes differ."""
    general = REMEDIES.get(finding.kind, "see the runbook")
    return _BY_CAUSE.get(finding.kind, {}).get(finding.cause, general)
