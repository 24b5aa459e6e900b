"""Suggest changes if no layout fits: more devices, the host's memory, larger devices, 4-bit weights.

    for line in what_would_fit(config, hardware, num_gpus=8): print(line)

Each line is the result of another plan, with its figures; plans that do not fit either are omitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainer.config.config import Config
from trainer.config.load import ConfigError, changed_config
from trainer.layout.resolve import resolve
from trainer.model.size import num_parameters
from trainer.plan.expected import HEADROOM, Expected, expect
from trainer.plan.hardware import Hardware

__all__ = ["what_would_fit"]

_MAX_DEVICES = 2**17
_NF4_BYTES = (4 + 0.127) / 8
"""Bytes of a 4-bit weight with its double-quantized scale: Dettmers et al. 2023 (QLoRA), section 3."""
_TIGHTEST = ("parallel.dp_replicate=1", "parallel.dp_shard=-1", "parallel.tp=1", "parallel.pp=1", "parallel.cp=1",
             "parallel.ep=1", "parallel.zero1=false", "parallel.gradient_compression=none",
             "train.activation_checkpointing=full", "train.micro_batch_size=1")  # fmt: skip


def what_would_fit(config: Config, hardware: Hardware, num_gpus: int) -> list[str]:
    found = [*_more_devices(config, hardware, num_gpus), *_host_memory(config, hardware, num_gpus)]
    return [*found, *_larger_devices(config, hardware, num_gpus), *_four_bits(config, hardware)]


def _more_devices(config: Config, hardware: Hardware, num_gpus: int) -> Iterator[str]:
    number = 2 * num_gpus
    while number <= _MAX_DEVICES:
        expected = _tightest(config, hardware, number)
        if expected is not None and expected.fits:
            yield f"{number} devices: {_gb(expected.memory.peak)} on each (FSDP + recompute, one sequence a pass)"
            return
        number *= 2


def _host_memory(config: Config, hardware: Hardware, num_gpus: int) -> Iterator[str]:
    expected = _tightest(config, hardware, num_gpus, "parallel.cpu_offload=all", "optim.name=adamw")
    if expected is None or expected.memory.peak > HEADROOM * hardware.memory_bytes:
        return
    need = expected.memory.host * min(num_gpus, hardware.gpus_per_node)
    have = hardware.host_memory_bytes
    yield (
        f"the host's memory (parallel.cpu_offload = 'all'): {_gb(expected.memory.peak)} on each device and "
        f"{_gb(need / HEADROOM)} in each node{'' if have is None else f', which has {_gb(have)}'}"
    )


def _larger_devices(config: Config, hardware: Hardware, num_gpus: int) -> Iterator[str]:
    expected = _tightest(config, hardware, num_gpus)
    if expected is not None and not expected.fits:
        need = math.ceil(expected.memory.peak / HEADROOM / 1e9)
        yield f"devices of {need:,} GB (FSDP + recompute, one sequence a pass)"


def _four_bits(config: Config, hardware: Hardware) -> Iterator[str]:
    """Suggest 4-bit weights for fine-tuning, which PEFT offers but the trainer does not."""
    expected = _tightest(config, hardware, 1)
    if expected is None:
        return
    memory = expected.memory
    need = _NF4_BYTES * num_parameters(config.model) + memory.activations + memory.working + memory.context
    if need <= HEADROOM * hardware.memory_bytes:
        yield (
            f"to fine-tune only, adapters on weights in 4 bits (QLoRA, for example by PEFT): {_gb(need)} on each "
            "device and the adapters'"
        )


def _tightest(config: Config, hardware: Hardware, num_gpus: int, *more: str) -> Expected | None:
    """The data-parallel layout that needs the least memory; None if no data-parallel layout is possible."""
    batch = num_gpus * math.ceil(config.train.global_batch_size / num_gpus)
    options = [*_TIGHTEST, f"train.global_batch_size={batch}"]
    by_fsdp = num_gpus > 1 or "parallel.cpu_offload=all" in more
    options += ["parallel.reduce_every_microbatch=true"] if by_fsdp and batch > num_gpus else []
    options += ["parallel.float8_all_gather=false"] if config.parallel.float8_all_gather else []
    try:
        changed = changed_config(config.model_dump(mode="json"), [*options, *more])
        return expect(changed, resolve(changed, num_gpus), hardware)
    except ConfigError:
        return None


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
