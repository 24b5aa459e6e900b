"""Replicas with torch's DistributedDataParallel: every rank has all parameters, gradients are averaged in buckets.

ddp = apply_ddp(model, mesh, config, device)
inputs = watch_buckets(ddp)  # says if this rank's gradient was finite (`probes.collectives.gradients.reduction_inputs`)
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from probes.collectives.gradients.reduction_inputs import ReductionInputs
from probes.fail_open import record_error
from trainer.config.config import ParallelConfig
from trainer.torch_compat import GradBucket

__all__ = ["apply_ddp", "watch_buckets"]


def apply_ddp(
    model: nn.Module, mesh: DeviceMesh, config: ParallelConfig, device: torch.device
) -> DistributedDataParallel:
    """Wrap `model`, already on `device`; `mesh` is the one-dimensional mesh of the replicas.

    Call forward on the wrapper. Parameters keep the names that they have in `model`.
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
    """Turn off DDP's buffer broadcasts, because the rotary tables are equal on all ranks and never change. The option
    has a new name in torch 2.13."""
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if renamed else "broadcast_buffers": False}


def watch_buckets(ddp: DistributedDataParallel) -> ReductionInputs:
    """Record the norm of each bucket before it is reduced. DDP allows one communication hook, and this uses it."""
    inputs = ReductionInputs()
    ddp.register_comm_hook((inputs, ddp.process_group), _reduce)
    return inputs


def _reduce(state: tuple[ReductionInputs, dist.ProcessGroup], bucket: GradBucket) -> Future[Tensor]:
    inputs, group = state
    try:
        inputs.add([bucket.buffer()])
    except Exception as error:
        record_error("collectives.reduction_inputs", error)
    return allreduce_hook(group, bucket)


# DDP checks the annotations, and needs types instead of strings.
_reduce.__annotations__ = {"bucket": GradBucket, "return": Future[Tensor]}
