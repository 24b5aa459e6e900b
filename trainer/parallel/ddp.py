"""Replicas with torch's DistributedDataParallel: every rank has all parameters, gradients are averaged in buckets."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from trainer.config.config import ParallelConfig

__all__ = ["apply_ddp"]


def apply_ddp(
    model: nn.Module, mesh: DeviceMesh, config: ParallelConfig, device: torch.device
) -> DistributedDataParallel:
    """Wrap `model`, already on `device`; `mesh` is the one-dimensional mesh of the replicas.

    The wrapper is what forward must go through; parameters keep their names in `model` itself.
    """
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=mesh.get_group(),
        bucket_cap_mb=config.ddp_bucket_mb,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        **_without_buffer_broadcasts(),
    )


def _without_buffer_broadcasts() -> dict[str, Any]:
    """The rotary tables are the same everywhere and never change. torch 2.13 has a new name for saying so."""
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
