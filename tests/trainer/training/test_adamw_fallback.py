"""Muon and AdamW8bit alike: an update that is left out, and a state that copies, checkpoints and shards know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.processes import run_ranks
from tests.trainer.training.optimizer_runs import assert_same, bits, take, trained
from tests.trainer.training_runs import RunResult, run_loop, small
from trainer.checkpoint.disk_tier.loading import LoadError
from trainer.checkpoint.memory_tier.host_copy import HostCopy
from trainer.checkpoint.state import Position, Values
from trainer.config.config import Config
from trainer.training.adamw8bit import BLOCK, STATE_KEYS, AdamW8bit
from trainer.training.muon import MuonAdamW


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """An optimizer beside AdamW."""

    model: dict[str, Any]
    """Of a size whose matrices it has to do with."""
    columns: int
    """Of a matrix of its own."""
    state: tuple[str, ...]
    """Tensors of such a matrix."""
    make: Callable[[list[nn.Parameter], nn.Parameter], torch.optim.Optimizer]
    """From its own matrices, and one parameter that is AdamW's."""


def make_muon(own: list[nn.Parameter], rest: nn.Parameter) -> torch.optim.Optimizer:
    groups = [*({"params": [each], "muon": True} for each in own), {"params": [rest], "muon": False}]
    return MuonAdamW(groups, momentum=0.95, lr=0.1)


def make_adamw8bit(own: list[nn.Parameter], rest: nn.Parameter) -> torch.optim.Optimizer:
    groups = [*({"params": [each], "eight_bit": True} for each in own), {"params": [rest], "eight_bit": False}]
    return AdamW8bit(groups, lr=0.1)


KINDS = {
    "muon": Kind(model={}, columns=6, state=("momentum_buffer",), make=make_muon),
    "adamw8bit": Kind(
        model={"dim": 256, "hidden_dim": 256, "num_layers": 1},
        columns=2 * BLOCK,
        state=STATE_KEYS[:-1],  # without the number of steps
        make=make_adamw8bit,
    ),
}
each_kind = pytest.mark.parametrize("name", KINDS)


def configured(name: str, **sections: dict[str, Any]) -> Config:
    return small(model=KINDS[name].model, optim={"name": name}, **sections)


@each_kind
def test_an_update_that_is_left_out_changes_no_bit(name: str) -> None:
    one, other = trained(configured(name), 2), trained(configured(name), 2)
    before = bits(one)
    one.forward_backward(one.batch(2))
    for _, parameter in one.named_parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(torch.nan)
    one.step(2, leave_out=torch.ones(()))
    assert_same(bits(one), before)
    take(one, 2, leave_out=torch.zeros(()))
    take(other, 2)
    assert_same(bits(one), bits(other))


@each_kind
def test_a_rollback_from_memory_brings_every_bit_back(name: str) -> None:
    training = trained(configured(name), 2)
    kept = HostCopy()
    kept.fill(training, Values(position=Position(step=2, batch_index=2)))
    take(training, 2)
    after = bits(training)
    kept.restore(training)
    take(training, 2)
    assert_same(bits(training), after)


@each_kind
def test_a_run_goes_on_from_its_checkpoint_with_the_same_bits(name: str, tmp_path: Path) -> None:
    def run(folder: str, steps: int, attempt: int = 0, optimizer: str = name) -> RunResult:
        config = small(
            model=KINDS[name].model,
            optim={"name": optimizer},
            train={"steps": steps},
            checkpoint={"memory_survives": False, "memory_interval": 2},
        )
        return run_loop(config, tmp_path / folder, rank=0, world_size=1, attempt=attempt)

    straight = run("straight", 5)
    run("resumed", 3)
    assert_same(run("resumed", 5, attempt=1).tensors, straight.tensors)
    with pytest.raises(LoadError, match=r"optim\.name = 'adamw': the state was saved with another optimizer"):
        run("resumed", 6, attempt=2, optimizer="adamw")


def updated(rank: int, world_size: int) -> dict[str, bool]:
    """Whether a sharded matrix has the bits of a whole one after three steps, by optimizer and how it is sharded."""
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layouts: dict[str, tuple[DeviceMesh, list[Placement]]] = {
        "fsdp": (flat, [Shard(0)]),
        "hsdp": (square, [Replicate(), Shard(0)]),
        "fsdp x tp by rows": (square, [_StridedShard(0, split_factor=2), Shard(0)]),
        "fsdp x tp by columns": (square, [Shard(0), Shard(1)]),
    }
    return {
        f"{name}, {layout}": same_bits(kind, mesh, placements)
        for name, kind in KINDS.items()
        for layout, (mesh, placements) in layouts.items()
    }


def same_bits(kind: Kind, mesh: DeviceMesh, placements: list[Placement]) -> bool:
    draw = torch.Generator().manual_seed(0)
    weight, rest = torch.randn(10, kind.columns, generator=draw), nn.Parameter(torch.zeros(1))
    whole = nn.Parameter(weight.clone())
    sharded = nn.Parameter(distribute_tensor(weight, mesh, placements, src_data_rank=None))
    optimizer = kind.make([whole, sharded], rest)
    for gradient in torch.randn(3, 10, kind.columns, generator=draw):
        whole.grad = gradient.clone()
        sharded.grad = distribute_tensor(gradient, mesh, placements, src_data_rank=None)
        optimizer.step()
    pairs = [(optimizer.state[sharded][key].full_tensor(), optimizer.state[whole][key]) for key in kind.state]
    pairs.append((sharded.detach().full_tensor(), whole.detach()))
    return not torch.equal(whole.detach(), weight) and all(torch.equal(*pair) for pair in pairs)


def test_sharded_matrices_get_the_bits_of_whole_ones() -> None:
    for found in run_ranks(updated, world_size=4):
        assert len(found) == 4 * len(KINDS)
        assert all(found.values()), found
