"""The plan in a run's manifest, for `rankscope analyze` to compare with the measurement.

run.json: "planned": planned(config, plan, rank=0, device="cuda")
"""

from __future__ import annotations

from typing import Any

from trainer.config.config import Config
from trainer.layout.plan import Plan
from trainer.plan.activations import Device
from trainer.plan.memory import rank_memory
from trainer.plan.traffic import rank_traffic

__all__ = ["planned"]


def planned(config: Config, plan: Plan, *, rank: int, device: Device) -> dict[str, Any]:
    """Memory, and the bytes of a step by operation, of one rank."""
    pp_rank = plan.coordinates(rank)["pp"]
    num_bytes: dict[str, int] = {}
    for call in rank_traffic(config, plan, pp_rank=pp_rank):
        if call.op == "copy":  # no collective
            continue
        num_bytes[call.op] = num_bytes.get(call.op, 0) + call.num_bytes
    memory = rank_memory(config, plan, pp_rank=pp_rank, device=device)
    return {
        "rank": rank,
        "device": device,
        "world_size": plan.world_size,
        "memory_bytes": memory.peak,
        "bytes_per_step": num_bytes,
    }
