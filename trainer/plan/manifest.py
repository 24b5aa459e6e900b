"""The plan in a run's manifest, for `rankscope analyze` to compare with the measurement.

run.json: "planned": planned(config, plan, rank=0, device="cuda", device_name="NVIDIA H100 80GB HBM3")
"""

from __future__ import annotations

from typing import Any

from trainer.config.config import Config
from trainer.layout.plan import Plan
from trainer.plan.expected import expect
from trainer.plan.footprint.activations import Device
from trainer.plan.footprint.memory import rank_memory
from trainer.plan.hardware import named_hardware
from trainer.plan.traffic import rank_traffic

__all__ = ["planned"]


def planned(config: Config, plan: Plan, *, rank: int, device: Device, device_name: str = "") -> dict[str, Any]:
    """One rank's expected memory and bytes per step by operation. For a known device also the expected step time, and
    the share of exposed communication in it."""
    pp_rank = plan.coordinates(rank)["pp"]
    num_bytes: dict[str, int] = {}
    for call in rank_traffic(config, plan, pp_rank=pp_rank):
        if call.op == "copy":  # copies to the host are not collectives
            continue
        num_bytes[call.op] = num_bytes.get(call.op, 0) + call.num_bytes
    hardware = named_hardware(device_name) if device == "cuda" else None
    expected = None if hardware is None else expect(config, plan, hardware)
    memory = rank_memory(config, plan, pp_rank=pp_rank, device=device)
    return {
        "rank": rank,
        "device": device,
        "world_size": plan.world_size,
        "memory_bytes": memory.peak,
        "allocated_bytes": memory.allocated,
        "bytes_per_step": num_bytes,
        "step_s": None if expected is None else expected.step_s,
        "communication_ratio": None if expected is None else expected.communication_share,
    }
