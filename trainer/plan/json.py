"""A plan as JSON: plain numbers with their units in the names.

as_json(expected, hardware, warnings, found)["memory_bytes"]["peak"]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.plan.expected import Expected
from trainer.plan.hardware import Hardware
from trainer.plan.strategies import Strategies

__all__ = ["as_json", "expected_json"]


def as_json(
    expected: Expected, hardware: Hardware, warnings: Sequence[str], found: Strategies | None
) -> dict[str, Any]:
    content: dict[str, Any] = {
        "hardware": {
            "gpu": hardware.gpu,
            "memory_bytes": hardware.memory_bytes,
            "gpus_per_node": hardware.gpus_per_node,
            "inside": hardware.inside,
            "between": hardware.between,
        },
        **expected_json(expected),
        "warnings": [*warnings],
    }
    if found is not None:
        content["layouts"] = [
            {"name": each.name, "set": [*each.overrides], **expected_json(each.expected)} for each in found.tried
        ]
        content["impossible"] = [{"name": name, "why": why} for name, why in found.impossible]
        content["would_fit"] = [*found.would_fit]
        content["simplest"] = found.simplest.name if found.simplest else None
        content["fastest"] = found.fastest.name if found.fastest else None
    return content


def expected_json(expected: Expected) -> dict[str, Any]:
    """The part of a plan that a run's manifest keeps, to compare it with the measurement."""
    memory = expected.memory
    parts = ("parameters", "gradients", "optimizer", "gathered", "activations", "working", "compression", "context",
             "host", "sum", "peak")  # fmt: skip
    return {
        "world_size": expected.plan.world_size,
        "mesh": expected.plan.sizes,
        "num_parameters": expected.num_parameters,
        "flops_per_token": expected.flops_per_token,
        "fits": expected.fits,
        "memory_bytes": {part: getattr(memory, part) for part in parts},
        "fullest_pp_rank": memory.pp_rank,
        "float8": _float8(expected),
        "step_s": expected.step_s,
        "compute_s": expected.compute_s,
        "tokens_per_s": expected.tokens_per_s,
        "mfu_ratio": expected.mfu,
        "communication_ratio": expected.communication_share,
        "bubble_ratio": expected.bubble_share,
        "tape_bytes_per_step": expected.records.tape_bytes,
        "store_bytes_per_step": expected.records.store_bytes,
        "record_bytes_per_hour": expected.records.per_hour(
            expected.step_s, on_tapes=expected.config.probes.retain == "all"
        ),
        "flops_per_memory_byte": expected.flops_per_memory_byte,
        "ridge_flops_per_byte": expected.ridge_flops_per_byte,
        "collectives": [
            {
                "dimension": group.call.dimension,
                "op": group.call.op,
                "what": group.call.what,
                "members": group.call.size,
                "calls_per_step": group.call.calls,
                "bytes_per_step": group.call.num_bytes,
                "bus_bytes_per_step": group.call.bus_bytes,
                "seconds": group.seconds,
                "exposed_s": group.exposed_s,
                "crosses_nodes": group.crosses_nodes,
            }
            for group in expected.groups
        ],
    }


def _float8(expected: Expected) -> dict[str, Any] | None:
    found = expected.float8
    if found is None:
        return None
    ratio = found.flops_per_token / expected.flops_per_token
    return {"flops_ratio": ratio, "peak_flops_per_s": found.flops_per_s, "others": [*found.others]}
