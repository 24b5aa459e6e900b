"""Async tensor parallelism: torch's compiler splits matmuls and their collectives into chunks that overlap.

    check_async_tp(device, tp_mesh)          # ConfigError if this machine does not support it
    enable_async_tp(tp_mesh)                # before the first compiled step

An all-gather and the matmul that consumes it, or a matmul and the reduce-scatter that follows, become one operation. It
sends one chunk over NVLink while it computes another (Wang et al. 2023, ASPLOS). For this, ranks read each other's
memory.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainer.config.load import ConfigError
from trainer.torch_compat import enable_micro_pipeline_tp

__all__ = ["check_async_tp", "enable_async_tp"]


def check_async_tp(device: torch.device, tp_mesh: DeviceMesh) -> None:
    """Raise ConfigError, one line, if ranks of a tensor-parallel group cannot read each other's memory."""
    setting = "parallel.async_tp = true"
    if device.type != "cuda":
        raise ConfigError(f"{setting}: needs train.device = 'cuda', whose memory ranks can share")
    if torch.cuda.get_device_capability(device) < (9, 0):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"{setting}: needs compute capability 9.0, {name} has less; turn it off")
    if dist.get_backend(tp_mesh.get_group()) != "nccl":
        raise ConfigError(f"{setting}: needs train.backend = 'nccl'")
    if tp_mesh.size() > torch.cuda.device_count():
        raise ConfigError(
            f"{setting}: the {tp_mesh.size()} tensor-parallel ranks are on several hosts; at most one host's"
        )


def enable_async_tp(tp_mesh: DeviceMesh) -> None:
    """Let the compiler fuse matmuls with the collectives of `tp_mesh`."""
    enable_micro_pipeline_tp(tp_mesh.get_group().group_name)
