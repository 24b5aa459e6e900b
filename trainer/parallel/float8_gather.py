"""FSDP's gathers in fp8: a rank rounds its shard of a matrix, and the others receive a byte per number.

    gathers = Float8Gathers(model)      # sharded and materialised, before its first forward
    gathers.rescale()                   # collective: before the first forward after parameters have changed

FSDP looks for two methods on the local tensor of a sharded parameter: one returns what to gather, the other builds the
whole parameter from the result. torchao has both methods on a parameter class, but our copies and fingerprints cannot
read the memory of that class. So parameters keep their class, and torchao's methods are set on their local tensors.

Each matrix has one scale, computed from its largest absolute value over all ranks. So rounding before the gather gives
the same bits as rounding the whole matrix after a gather in float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.config.load import ConfigError
from trainer.model.float8 import is_converted
from trainer.torch_compat import foreach_norm

__all__ = ["Float8Gathers"]


class Float8Gathers:
    """fp8 gathers for those matrices of a model part that are multiplied in fp8 and have equal shards on all ranks."""

    def __init__(self, model: nn.Module) -> None:
        """Raises ConfigError if there is no such matrix."""
        from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

        layers: list[Any] = [layer for layer in model.modules() if is_converted(layer) and _is_even(layer.weight)]
        if not layers:
            raise ConfigError(
                "parallel.float8_all_gather = true: no matrix has rows for equal shards; change parallel.dp_shard"
            )
        self._dtype: torch.dtype = layers[0].config.cast_config_weight.target_dtype
        self._casts: list[Any] = []
        for layer in layers:
            local = layer.weight._local_tensor
            cast = WeightWithDynamicFloat8CastTensor(local, layer.linear_mm_config, self._dtype)
            local.fsdp_pre_all_gather = cast.fsdp_pre_all_gather
            local.fsdp_post_all_gather = cast.fsdp_post_all_gather
            self._casts.append(cast)
        # The groups of the first matrix are those of all: tensor parallelism splits either all matrices or none, even
        # if along different dimensions.
        weight: DTensor = layers[0].weight
        mesh = weight.device_mesh
        self._groups = [mesh.get_group(dim) for dim, place in enumerate(weight.placements) if not place.is_replicate()]

    @torch.no_grad()
    def rescale(self) -> None:
        """Compute the scale of each matrix from its current values. Collective: one reduction per mesh dimension, of
        one number per matrix."""
        from torchao.float8.float8_utils import amax_to_scale

        largest = torch.stack(foreach_norm([cast._tensor for cast in self._casts], math.inf))
        for group in self._groups:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        for cast, scale in zip(self._casts, amax_to_scale(largest, self._dtype).unbind(), strict=True):
            cast._precomputed_scale = scale


def _is_even(weight: Any) -> bool:
    """Return True if all ranks have equally many rows. FSDP would gather unequal shards from a padded copy, which lacks
    the methods set here."""
    sizes = zip(weight.device_mesh.shape, weight.placements, strict=True)
    ranks = math.prod(size for size, place in sizes if not place.is_replicate() and place.dim == 0)
    return bool(weight.shape[0] % ranks == 0)
