"""The norm of a rank's own gradient, taken from the reductions of DDP, FSDP2 and HSDP: that of the model by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from probes.collectives.gradients.local_gradient import UnreducedNorm
from probes.collectives.wrapped import unreduced_gradients
from tests.probes.recorded_world import recorded_world
from tests.processes import run_ranks

KINDS = ("ddp", "fsdp", "hsdp")
CPU = torch.device("cpu")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))


def batch(rank: int, half: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * rank + half)) * (1 + rank)


def wrapped(kind: str) -> nn.Module:
    net = model()
    if kind == "ddp":
        return DistributedDataParallel(net, bucket_cap_mb=0.002)
    sizes, names = ((2, 2), ("replicate", "shard")) if kind == "hsdp" else ((4,), ("shard",))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def accumulates(net: nn.Module, wait: bool) -> None:
    if isinstance(net, DistributedDataParallel):
        net.require_backward_grad_sync = not wait
    else:
        net.set_requires_gradient_sync(not wait)  # type: ignore[operator]


def _measured(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    alone = model()
    for half in range(2):
        alone(batch(rank, half)).square().mean().backward()
    found["alone"] = sum(float(p.grad.double().square().sum()) for p in alone.parameters() if p.grad is not None)
    for kind in KINDS:
        with recorded_world(rank, world_size, folder, f"{kind}-"):
            unreduced = unreduced_gradients()
            assert unreduced is not None
            net = wrapped(kind)
            found[kind] = []
            for _ in range(2):
                unreduced.begin(CPU)
                for half in range(2):
                    accumulates(net, wait=half == 0)
                    net(batch(rank, half)).square().mean().backward()
                found[kind].append(unreduced.end().item())
                net.zero_grad()
            dist.all_reduce(torch.ones(3))  # not asked for
            found[f"{kind} after"] = unreduced.end().item()
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_measured, world_size=4, args=(str(tmp_path_factory.mktemp("unreduced")),))


@pytest.mark.parametrize("kind", KINDS)
def test_the_local_norm_is_that_of_the_model_on_one_rank(measured: list[dict[str, Any]], kind: str) -> None:
    for values in measured:
        assert values[kind] == pytest.approx([values["alone"]] * 2, rel=1e-5)
        assert values[f"{kind} after"] == pytest.approx(values["alone"], rel=1e-5)
    assert len({round(values["alone"], 6) for values in measured}) == 4


def test_a_step_without_reductions_has_no_norm() -> None:
    unreduced = UnreducedNorm()
    unreduced.begin(CPU)
    assert unreduced.end().isnan().all()


def test_a_reduction_with_an_unknown_scale_has_no_norm() -> None:
    unreduced = UnreducedNorm()
    unreduced.begin(CPU)
    unreduced.add("all_reduce", [torch.ones(4)], dist.ReduceOp.MAX, 2)
    assert unreduced.end().isnan().all()
    unreduced.begin(CPU)
    unreduced.add("all_reduce", [torch.ones(4, dtype=torch.bfloat16)], dist.ReduceOp.SUM, 2)
    unreduced.add("broadcast", [torch.ones(4)], None, 2)
    assert unreduced.end().item() == 16.0
