"""Expert parallelism: each rank of an `ep` group has some of the experts of every layer, and all of them the rest.

The experts' stacked weights are split by expert, as DTensors, so that initial values, norms, checkpoints and
fingerprints know which part a rank holds. Tokens go to their experts and back by all-to-all
(`trainer.model.exchange`); each rank reads sequences of its own.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainer.model.experts import MixtureOfExperts
from trainer.model.transformer import Transformer

__all__ = ["apply_expert_parallel"]


def apply_expert_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    """Split the experts of `model` over the one-dimensional `mesh`, in place and without communication."""
    for layer in model.modules():
        if not isinstance(layer, MixtureOfExperts):
            continue
        layer.group = mesh.get_group()
        for name, weight in list(layer.experts.named_parameters()):
            split = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(layer.experts, name, nn.Parameter(split))
