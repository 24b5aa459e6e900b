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
    "excluded": {
        "device": "test the device (XIDs, ECC errors, dcgmi diag -r 3) before it is used again",
        "node": "look at the node's kernel log and drain it; it comes back when the launcher's file is deleted",
    },
    "gpu_memory_errors": {
        "corrected": "nothing at once; look whether it comes more often, and reset the device at the next opportunity",
        "remap_failed": "take the device out of the next run and have it replaced",
        "remapped": "reset the device at the next opportunity, so that the spare rows take effect",
        "uncorrected": "do not trust what this device computed; take it out of the next run, reset and test it",
    },
    "gpu_throttled": {
        "hardware": "look at the power supply and the cooling of the device named",
        "power": "look at the power supply of the host named: its brake was pulled",
        "thermal": "look at fans, air flow and inlet temperature of the host named",
    },
    "host_pressure": {
        "disk": "make room on that disk, keep fewer checkpoints, or write the run elsewhere",
        "run_queue": "fewer loader workers, OMP_NUM_THREADS=1, or no other jobs on that host",
    },
    "link_errors": {
        "nvlink": "look at nvidia-smi nvlink -s and -e; check bridges and seating, then reset the device",
        "pcie": "look at lspci -vv and dmesg for that device; seat it anew, or try another slot or riser",
    },
    "memory_limit": {
        "allocator": "a smaller microbatch or activation checkpointing; against fragments "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "device": "nothing, unless it runs out: then a smaller microbatch or activation checkpointing",
        "host": "fewer processes, loader workers or checkpoint copies in /dev/shm on that host",
    },
    "node_silent": {
        "heard_again": "look at the load of that node and at the network between the two",
        "silent": "ping it, and look at its watch's log and kernel log; the ranks there may still train",
    },
}
REMEDIES = {
    "checkpoint_age": "find out why nothing was saved since, before the next failure",
    "checkpoint_cost": "save in the background, less often, or to a faster disk",
    "checkpoint_failed": "make room on the disk or repair the file system that the reason names",
    "configuration": "change the setting, and compare the two runs with `rankscope compare`",
    "data_bound": "more loader workers or prefetch; look at the disk, the network and the cost of a sample",
    "exposed_communication": "larger buckets or prefetch, more work a rank, fewer ranks in a group",
    "gpu_memory_errors": "take the device out of the next run, reset and test it",
    "gpu_throttled": "look at the cooling and the power of the device named",
    "host_pressure": "give the host room, or take load off it",
    "link_errors": "look at the device's links: cables, bridges, seating",
    "low_bandwidth": "lay the dimension with the most traffic over the fastest link",
    "memory_growth": "look for what is kept from step to step: losses with their graph, lists, caches, the data loader",
    "memory_imbalance": "look for what this rank holds alone: logging, evaluation, uneven layers or batches",
    "memory_limit": "a smaller microbatch, activation checkpointing, or fewer processes on the host",
    "slow_startup": "look at what this piece of the start reads, compiles or waits for",
    "small_buckets": "make the gradient buckets larger",
}


def remedy(finding: Finding) -> str:
    """By cause where causes differ; of an XID what the table says about its code."""
    if finding.kind == "xid" and finding.evidence.get("action"):
        return str(finding.evidence["action"])
    general = REMEDIES.get(finding.kind, "see the runbook")
    return _BY_CAUSE.get(finding.kind, {}).get(finding.cause, general)
