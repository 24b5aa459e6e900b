"""What to do about a kind of finding, in one line: the runbook behind the anchor says more.

REMEDIES["exposed_communication"]
"""

from __future__ import annotations

__all__ = ["REMEDIES"]

REMEDIES = {
    "checkpoint_age": "find out why nothing was saved since, before the next failure",
    "checkpoint_cost": "save in the background, less often, or to a faster disk",
    "checkpoint_failed": "make room on the disk or repair the file system that the reason names",
    "configuration": "change the setting, and compare the two runs with `rankscope compare`",
    "data_bound": "more loader workers or prefetch; look at the disk, the network and the cost of a sample",
    "exposed_communication": "larger buckets or prefetch, more work a rank, fewer ranks in a group",
    "gpu_memory_errors": "take the device out of the next run, reset and test it",
    "gpu_throttled": "look at the cooling and the power of the device named",
    "gradient_noise": "try another batch size with the rate scaled to it, and compare loss by tokens",
    "host_pressure": "give the host room, or take load off it",
    "link_errors": "look at the device's links: cables, bridges, seating",
    "low_bandwidth": "lay the dimension with the most traffic over the fastest link",
    "memory_growth": "look for what is kept from step to step: losses with their graph, lists, caches, the data loader",
    "memory_imbalance": "look for what this rank holds alone: logging, evaluation, uneven layers or batches",
    "memory_limit": "a smaller microbatch, activation checkpointing, or fewer processes on the host",
    "slow_startup": "look at what this piece of the start reads, compiles or waits for",
    "xid": "do what the finding says about this code",
    "small_buckets": "make the gradient buckets larger",
}
