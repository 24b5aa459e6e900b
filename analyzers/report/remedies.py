"""What to do about a kind of finding, in one line: the runbook behind the anchor says more.

REMEDIES["exposed_communication"]
"""

from __future__ import annotations

__all__ = ["REMEDIES"]

REMEDIES = {
    "exposed_communication": "larger buckets or prefetch, more work a rank, fewer ranks in a group",
    "low_bandwidth": "lay the dimension with the most traffic over the fastest link",
    "small_buckets": "make the gradient buckets larger",
}
