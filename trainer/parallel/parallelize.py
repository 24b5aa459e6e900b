"""Apply a plan to a model: tensor, context and expert parallelism, then FSDP or DDP around them.

with torch.device("meta"):
    module = Transformer(config.model)           # shapes without memory
model = parallelize(module, config, plan, mesh, device)
model.forward_module(tokens)     # what to call: DDP's wrapper, or the model itself
model.module                     # the Transformer; parameters by their own names
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from trainer.config.config import Config
from trainer.layout.plan import Plan
from trainer.model.transformer import Transformer
from trainer.parallel.compression import GradientCompression
from trainer.parallel.context import apply_context_parallel
from trainer.parallel.ddp import apply_ddp
from trainer.parallel.expert import apply_expert_parallel
from trainer.parallel.float8_gather import Float8Gathers
from trainer.parallel.fsdp import apply_fsdp
from trainer.parallel.mesh import dense_mesh, expert_mesh, submesh
from trainer.parallel.tensor import apply_tensor_parallel

__all__ = ["COMPUTE_DTYPES", "ParallelModel", "parallelize"]

COMPUTE_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(slots=True, kw_only=True)
class ParallelModel:
    """A model part with its parallelism applied."""

    module: Transformer
    forward_module: nn.Module
    compression: GradientCompression | None = None
    """Compression of DDP's gradients."""
    float8_gathers: Float8Gathers | None = None
    reduces_every_microbatch: bool = False
    _synchronises: bool = True

    def synchronise_gradients(self, wanted: bool) -> None:
        """Switch the gradient reduction over the data ranks for the next backward. It is on for the last microbatch.

        DDP has an attribute for this, which `no_sync` sets. FSDP2 has a method. Between microbatches FSDP keeps
        unreduced gradients unsharded, which is the price of one reduction instead of many. `reduces_every_microbatch`
        chooses many reductions; then only the reduction over HSDP's replicas waits for the last microbatch.
        """
        if wanted == self._synchronises:
            return  # FSDP2's methods walk through every module
        self._synchronises = wanted
        if isinstance(self.forward_module, DistributedDataParallel):
            self.forward_module.require_backward_grad_sync = wanted
        elif isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(wanted or self.reduces_every_microbatch)
            self.module.set_requires_all_reduce(wanted)
            self.module.set_is_last_backward(wanted)

    def rescale(self) -> None:
        """Compute the scales of parameters that are gathered in fp8. Call it after the parameters have changed, before
        the next forward."""
        if self.float8_gathers is not None:
            self.float8_gathers.rescale()

    def reshard(self) -> None:
        """Free gathered parameters. After a forward without a backward, FSDP would keep and reuse old values."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def parallelize(
    model: Transformer, config: Config, plan: Plan, mesh: DeviceMesh | None, device: torch.device
) -> ParallelModel:
    """Shard or replicate `model`, which is on the meta device, as `plan` says; then allocate its memory.

    In this order a rank allocates only its own shards, never the whole model. The parameters have no values until
    `Training.fill_weights` or a checkpoint sets them.
    """
    tp_mesh = submesh(mesh, "tp")
    if tp_mesh is not None:
        apply_tensor_parallel(model, tp_mesh, config.parallel)
    cp_mesh = submesh(mesh, "cp")
    if cp_mesh is not None:
        chunks, count = plan.chunks(dist.get_rank(), config.parallel.cp_exchange)
        apply_context_parallel(model, cp_mesh, chunks, count, is_ring=config.parallel.cp_exchange == "ring")
    if mesh is not None:
        apply_expert_parallel(model, mesh, plan)
    kind = plan.data_parallel_kind
    if kind in ("fsdp", "hsdp"):
        apply_fsdp(
            model,
            dense_mesh(mesh, plan),
            config.parallel,
            compute_dtype=COMPUTE_DTYPES[config.train.precision],
            pipelined=plan.pp > 1,
            expert_mesh=expert_mesh(mesh, plan) if config.model.num_experts else None,
        )
    model.to_empty(device="cpu" if plan.offloads_parameters else device)
    if plan.offloads_parameters:  # only parameters are offloaded, not buffers
        model.cos, model.sin = model.cos.to(device), model.sin.to(device)
    model.tie()  # `to_empty` has made the tied parameter into two
    model.fill_buffers()
    forward_module: nn.Module = model
    compression = None
    if kind == "ddp":
        dp_mesh = submesh(mesh, "dp_replicate")
        assert dp_mesh is not None
        forward_module = apply_ddp(model, dp_mesh, config.parallel, device)
        if config.parallel.gradient_compression != "none":
            group, rank = dp_mesh.get_group(), dist.get_rank()
            compression = GradientCompression(model, config.parallel, group, rank=rank, seed=config.run.seed)
            compression.attach(forward_module)
    return ParallelModel(
        module=model,
        forward_module=forward_module,
        compression=compression,
        float8_gathers=Float8Gathers(model) if config.parallel.float8_all_gather and len(model.blocks) else None,
        reduces_every_microbatch=config.parallel.reduce_every_microbatch,
    )
