"""Rules for judging a step in a layout: whether its numbers are read one step late, and which ranks compare gradients.

compared_over(config, plan, on_host=True)       # "dp_shard": the dimension whose ranks compare gradients, or ""
reason_to_read_at_once(config, plan, on_host=False)     # "" if the numbers of a step may be read late
"""

from __future__ import annotations

from trainer.config.config import Config
from trainer.layout.plan import Plan

__all__ = ["compared_over", "reason_to_read_at_once"]

MAX_RANKS = 1024
"""World size above which gradients are not compared: the peaks of all ranks would make the step's reduction slow."""


def compared_over(config: Config, plan: Plan, *, on_host: bool) -> str:
    """Mesh dimension, or `world`, over which ranks compare their largest gradients before an update; "" if they do not
    compare them.

    On a device, this would cost another pass over all gradients, and a synchronisation.
    """
    probed = config.probes.enabled and config.probes.collectives and config.probes.nonfinite_flags
    if not (probed and on_host and config.recovery.enabled and plan.world_size <= MAX_RANKS):
        return ""
    # Gradients are first reduced over the shards. What is then reduced over the replicas is no longer local.
    dimension = "dp_shard" if plan.dp_shard > 1 else "dp_replicate" if plan.dp_replicate > 1 else ""
    return "world" if plan.world_size in (plan.dp_shard, plan.dp_replicate) else dimension


def reason_to_read_at_once(config: Config, plan: Plan, *, on_host: bool) -> str:
    """Reason why each step's numbers must be read immediately; empty if they may be read one step late."""
    compresses = config.parallel.gradient_compression != "none" and plan.data_parallel_kind == "ddp"
    reasons = {
        "supported with data parallelism only": plan.data_size < plan.world_size or plan.pp > 1,
        "the fp16 loss scale is kept on the host": config.train.precision == "fp16",
        "only the fused optimizer can skip an update": not config.optim.fused or plan.zero1,
        "with offloaded state the host waits anyway": config.parallel.cpu_offload != "none",
        "gradient compression keeps error feedback, which a repeated step would lose": compresses,
        "the load of experts is counted in forward": config.model.num_experts > 0,
        "gradients are compared over ranks before the update": bool(compared_over(config, plan, on_host=on_host)),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
