"""What to do about a kind of finding, in one line: the runbook behind the anchor says more.

remedy(finding)         # "find out what fills the disk, or move the run to a larger one"
"""

from __future__ import annotations

from analyzers.finding import Finding

__all__ = ["REMEDIES", "remedy"]

_BY_CAUSE = {
    "data_bound": {
        "steady": "more loader workers or prefetch; look at the disk, the network and the cost of a sample",
        "periodic": "more prefetch to bridge the pause; look at what the loader does that often (a shard, a cache)",
        "epoch_start": "keep the loader's workers between epochs (persistent_workers), or shuffle without reading anew",
    },
}
REMEDIES = {
    "checkpoint_age": "find out why nothing was saved since, before the next failure",
    "checkpoint_cost": "save in the background, less often, or to a faster disk",
    "checkpoint_failed": "make room on the disk or repair the file system that the reason names",
    "configuration": "change the setting, and compare the two runs with `rankscope compare`",
    "data_bound": "more loader workers or prefetch; look at the disk, the network and the cost of a sample",
    "exposed_communication": "larger buckets or prefetch, more work a rank, fewer ranks in a group",
    "low_bandwidth": "lay the dimension with the most traffic over the fastest link",
    "slow_startup": "look at what this piece of the start reads, compiles or waits for",
    "small_buckets": "make the gradient buckets larger",
}


def remedy(finding: Finding) -> str:
    """By cause where causes differ."""
    general = REMEDIES.get(finding.kind, "see the runbook")
    return _BY_CAUSE.get(finding.kind, {}).get(finding.cause, general)
