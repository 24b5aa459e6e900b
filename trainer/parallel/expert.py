"""Expert parallelism: each rank of a group has some experts of every layer. All other parameters are on all ranks.

The group spans `ep` and `tp`. Tensor-parallel ranks have the same sequences: each takes one piece of them, and sends
its tokens to the experts like a rank with other sequences. So no expert's matrices are split, and no token goes to an
expert twice. With context parallelism, a rank sends the tokens of its pieces. Ranks with other pieces have copies of
the experts, and FSDP reduces the copies' gradients.

The experts' stacked weights are split by expert, as DTensors, so that initial values, norms, checkpoints and
fingerprints know which part a rank holds. Tokens go to their experts and back by all-to-all
(`trainer.model.exchange`).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from trainer.layout.plan import Plan
from trainer.model.experts import MixtureOfExperts
from trainer.model.transformer import Transformer
from trainer.parallel.mesh import joined_mesh, submesh

__all__ = ["apply_expert_parallel"]


def apply_expert_parallel(model: Transformer, mesh: DeviceMesh, plan: Plan) -> None:
    """Divide experts and tokens of `model` as `plan` says, in place and without communication. A model without experts
    is left unchanged."""
    layers = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    if not layers:
        return
    holders, pieces, tp_mesh = joined_mesh(mesh, "ep", "tp"), joined_mesh(mesh, "cp", "tp"), submesh(mesh, "tp")
    for layer in layers:
        if pieces is not None:
            layer.pieces, layer.loss_share = pieces.get_group(), 1.0 / plan.tp
        if holders is not None:
            layer.group, layer.gradient_scale = holders.get_group(), 1.0 / plan.ep
            for name, weight in list(layer.experts.named_parameters()):
                _distribute(layer.experts, name, weight, holders, Shard(0))
        if tp_mesh is not None:
            _distribute(layer.router, "weight", layer.router.weight, tp_mesh, Replicate())


def _distribute(module: nn.Module, name: str, weight: Tensor, mesh: DeviceMesh, place: Shard | Replicate) -> None:
    split = distribute_tensor(weight.detach(), mesh, [place], src_data_rank=None)
    setattr(module, name, nn.Parameter(split))
