"""The gradient norm of models whose ranks hold a part each is that of the whole model, and no collective is added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grad_norm_

from probes.attach.attach import attach, detach
from probes.tape.rundir import RunDir
from store import Store
from tests.probes.small_models import WIDTH, Net
from tests.processes import run_ranks

STEPS = 4
BAD_STEP = 2
SKIPS = ("fsdp2 clipped", "fsdp1 clipped", "fsdp2 one weight")
"""Ways of clipping by a norm that shows all ranks a NaN of one; the last one's is a part on each rank."""
KINDS = ("whole", "fsdp2", "fsdp2 clipped", "fsdp1", "fsdp1 clipped", "tp", "tp clipped", "by hand", "by hand clipped")
OF_ORDER = [(kind, order) for kind in ("fsdp2", "tp") for order in ("inf", "1")]
"""Ways of clipping by another norm than the Euclidean one, each beside that of the whole model."""


class _Sum(torch.autograd.Function):
    """The sum over all ranks, whose gradient is handed on as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Copy(torch.autograd.Function):
    """The input as it is, whose gradient is summed over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


class _Half(nn.Module):
    """A block that was cut by hand: each rank has a half of the hidden units."""

    def __init__(self, block: Any, rank: int) -> None:
        super().__init__()
        cut = slice(rank * WIDTH, (rank + 1) * WIDTH)
        self.up = nn.Parameter(block.up.weight.data[cut].clone())
        self.bias = nn.Parameter(block.up.bias.data[cut].clone())
        self.down = nn.Parameter(block.down.weight.data[:, cut].clone())

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(nn.functional.linear(_Copy.apply(x), self.up, self.bias))
        return x + _Sum.apply(nn.functional.linear(hidden, self.down))  # type: ignore[no-any-return]


def _prepared(kind: str, rank: int) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    for block in net.blocks:
        block.down.register_parameter("bias", None)  # on the ranks of a cut model it would be there twice
    if kind.startswith("fsdp2"):
        mesh = init_device_mesh("cpu", (2,))
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(net, mesh=mesh)
    if kind.startswith("fsdp1"):
        policy = ModuleWrapPolicy({type(net.blocks[0])})
        return FullyShardedDataParallel(
            net, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    if kind.startswith("tp"):
        plan: dict[str, Any] = {}
        for number in range(len(net.blocks)):
            plan |= {f"blocks.{number}.up": ColwiseParallel(), f"blocks.{number}.down": RowwiseParallel()}
        return parallelize_module(net, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
    if kind.startswith("by hand"):
        return nn.Sequential(*(_Half(block, rank) for block in net.blocks))
    return net


def _train(rank: int, world_size: int, folder: str) -> None:
    for kind in (*KINDS, "whole inf", "whole 1", *(" ".join(one) for one in OF_ORDER)):
        model = _prepared(kind, rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attach(model, optimizer, run_dir=f"{folder}/{kind}", watch=False, gradient_interval=2)
        for step in range(STEPS):
            torch.manual_seed(step)
            model(torch.randn(8, WIDTH)).square().mean().backward()
            if kind == "fsdp1 clipped":
                model.clip_grad_norm_(1e9)  # type: ignore[operator]
            elif kind.endswith("clipped"):
                clip_grad_norm_(model.parameters(), 1e9)
            elif (order := kind.rpartition(" ")[2]) in ("inf", "1"):
                clip_grad_norm_(model.parameters(), 1e9, norm_type=float(order))
            optimizer.step()
            optimizer.zero_grad()
        detach()
        dist.barrier()


def _train_and_skip(rank: int, world_size: int, folder: str) -> None:
    for kind in SKIPS:
        model = _prepared(kind, rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        clipped = [next(model.parameters())] if kind == "fsdp2 one weight" else list(model.parameters())
        attach(model, optimizer, run_dir=f"{folder}/{kind}", watch=False)
        for step in range(1, STEPS + 1):
            loss = model(torch.ones(8, WIDTH)).square().mean()
            (loss * (torch.nan if step == BAD_STEP and rank == 1 else 1.0)).backward()
            norm = model.clip_grad_norm_(1.0) if kind == "fsdp1 clipped" else clip_grad_norm_(clipped, 1.0)  # type: ignore[operator]
            if bool(norm.isfinite()):
                optimizer.step()
            optimizer.zero_grad()
        detach()
        dist.barrier()


def test_a_step_that_all_ranks_skip_for_the_norm_of_their_shards_is_refused(tmp_path: Path) -> None:
    run_ranks(_train_and_skip, world_size=2, args=(str(tmp_path),))
    for kind in SKIPS:
        with Store.open(RunDir(tmp_path / kind)) as store:
            rows = store.rows("SELECT step, committed, isnan(grad_norm) FROM steps ORDER BY step, rank")
        expected = [(step, step != BAD_STEP, step == BAD_STEP) for step in range(1, STEPS + 1) for _ in range(2)]
        assert rows == expected, kind


def _norms(folder: Path) -> list[tuple[int, float]]:
    with Store.open(RunDir(folder)) as store:
        return store.rows("SELECT DISTINCT step, grad_norm FROM steps ORDER BY step")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("norms")
    run_ranks(_train, world_size=2, args=(str(folder),))
    return folder


@pytest.mark.parametrize("kind", KINDS[1:])
def test_the_norm_is_that_of_the_whole_model(runs: Path, kind: str) -> None:
    whole = dict(_norms(runs / "whole"))
    assert len(whole) == STEPS
    found = _norms(runs / kind)
    assert [step for step, _ in found] == list(whole), "one norm a step, the same for all ranks"
    for step, norm in found:
        assert norm == pytest.approx(whole[step], rel=1e-4)


@pytest.mark.parametrize(("kind", "order"), OF_ORDER)
def test_a_norm_of_another_order_is_that_of_the_whole_model(runs: Path, kind: str, order: str) -> None:
    whole = _norms(runs / f"whole {order}")
    assert len(whole) == STEPS
    assert _norms(runs / f"{kind} {order}") == [(step, pytest.approx(norm, rel=1e-4)) for step, norm in whole]
    assert whole[0][1] != pytest.approx(_norms(runs / "whole")[0][1], rel=0.1)
