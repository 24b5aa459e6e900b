"""Warnings about settings that are known to perform badly. Each is one line with the key to change.

for warning in anti_patterns(expected, hardware): print(warning)
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.load import ConfigError, changed_config
from trainer.layout.resolve import resolve
from trainer.plan.expected import HEADROOM, Expected
from trainer.plan.footprint.memory import worst_rank_memory
from trainer.plan.hardware import Hardware

__all__ = ["anti_patterns"]

# Share of the bubble (1f1b with 4 microbatches per stage, Huang et al. 2019), and of exposed communication.
_MAX_SHARE = 0.2
_MIN_TOKENS = 2048  # per rank and pass; with fewer tokens, the matmuls of a large model do not fill a device


def anti_patterns(expected: Expected, hardware: Hardware) -> list[str]:
    return [*_memory(expected, hardware), *_tensor_parallel(expected, hardware), *_pipeline(expected),
            *_communication(expected, hardware), *_batch(expected), *_accumulation(expected, hardware)]  # fmt: skip


def _memory(expected: Expected, hardware: Hardware) -> Iterator[str]:
    need, have = expected.memory.peak, hardware.memory_bytes
    if need > have:
        yield f"Needs {need / 1e9:.1f} GB on a device of {have / 1e9:.0f} GB. It will run out of memory."
    elif not expected.fits:
        yield (
            f"Needs {need / 1e9:.1f} of {have / 1e9:.0f} GB: more than {HEADROOM:.0%}. Fragmentation may use the rest. "
            "Set train.activation_checkpointing or lower train.micro_batch_size."
        )


def _tensor_parallel(expected: Expected, hardware: Hardware) -> Iterator[str]:
    tp = expected.plan.tp
    if hardware.spans_nodes(stride=1, size=tp):
        yield (
            f"parallel.tp = {tp} spans nodes of {hardware.gpus_per_node} devices: every layer waits for "
            f"{hardware.between}. Keep tp within a node and use dp_shard or pp across nodes."
        )
    if tp > 1 and expected.config.model.dim / tp < 512:
        columns = expected.config.model.dim // tp
        yield f"parallel.tp = {tp} leaves {columns} columns a rank: the matrix products are too small to fill a device."


def _pipeline(expected: Expected) -> Iterator[str]:
    plan = expected.plan
    if expected.bubble_share > _MAX_SHARE:
        other = " or set parallel.schedule = 'interleaved_1f1b'" if plan.schedule in ("gpipe", "1f1b") else ""
        yield (
            f"The bubble is {expected.bubble_share:.0%} of the pipeline's time with schedule {plan.schedule}: "
            f"{plan.num_microbatches} microbatches for {plan.pp} pipeline ranks. Raise train.global_batch_size, lower "
            f"train.micro_batch_size{other}."
        )


def _communication(expected: Expected, hardware: Hardware) -> Iterator[str]:
    if expected.communication_share <= _MAX_SHARE:
        return
    worst = max(expected.groups, key=lambda group: group.exposed_s)
    link = hardware.between if worst.crosses_nodes else hardware.inside
    dimension = worst.call.dimension
    advice = "Use a larger batch per rank, HSDP, or fewer ranks."
    if dimension in ("tp", "cp"):  # every layer calls these collectives, and a larger batch does not hide them
        size = expected.plan.sizes[dimension]
        advice = f"Lower parallel.{dimension} to {size // 2}{' or 1' if size > 2 else ''}, with more dp_shard instead."
    elif dimension == "pp":
        advice = "Use fewer stages (parallel.pp), so that fewer of them meet over this link."
    yield (
        f"Exposed communication is {expected.communication_share:.0%} of a step, most of it {worst.call.op} of "
        f"{worst.call.what} in {dimension} over {link}. {advice} Whether NCCL_ALGO, NCCL_PROTO or more channels make "
        "it faster: rankscope preflight --tune nccl, on the nodes."
    )


def _batch(expected: Expected) -> Iterator[str]:
    plan, config = expected.plan, expected.config
    seq = config.data.seq_len // plan.cp
    tokens = plan.micro_batch_size * seq
    if tokens < _MIN_TOKENS:
        yield (
            f"{tokens} tokens a pass on a rank ({plan.micro_batch_size} x {seq}): too few "
            "to fill a device. Raise train.micro_batch_size."
        )
    elif expected.flops_per_memory_byte < expected.ridge_flops_per_byte:
        has_experts = config.model.num_experts > 0
        moved, instead = ("that experts move", "parallel.ep") if has_experts else ("moved", "lower parallel.tp")
        yield (
            f"{expected.flops_per_memory_byte:.0f} operations for each byte {moved}, the device needs "
            f"{expected.ridge_flops_per_byte:.0f}: memory bandwidth is the limit. Raise train.micro_batch_size or "
            f"{instead}."
        )


def _accumulation(expected: Expected, hardware: Hardware) -> Iterator[str]:
    plan, config = expected.plan, expected.config
    if plan.num_microbatches == 1 or plan.pp > 1:
        return
    try:
        whole = changed_config(config.model_dump(mode="json"), ["train.micro_batch_size=0"])
        need = worst_rank_memory(whole, resolve(whole, plan.world_size), "cuda").peak
    except ConfigError:
        return
    if need <= HEADROOM * hardware.memory_bytes:
        yield (
            f"train.micro_batch_size = {plan.micro_batch_size} takes {plan.num_microbatches} passes a step, though all "
            f"{plan.local_batch_size} sequences of a rank fit at once ({need / 1e9:.1f} of "
            f"{hardware.memory_bytes / 1e9:.0f} GB). Raise it."
        )
