"""AdamW with moments of 8 bits: near AdamW, torchao's update where both do the same, and codes on any mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.processes import run_ranks
from tests.trainer.training.optimizer_runs import CPU, assert_same, take, trained
from tests.trainer.training_runs import run_loop, small, with_steps
from trainer.checkpoint.state import training_tensors
from trainer.config.config import Config
from trainer.layout.constraints import CODES_BLOCK
from trainer.layout.resolve import resolve
from trainer.training.adamw8bit import BLOCK, STATE_KEYS, AdamW8bit, _coded, _read
from trainer.training.build import build
from trainer.training.rank_training import Training

WIDE = {"dim": 256, "hidden_dim": 256, "num_layers": 1}


def eight_bit(name: str = "adamw8bit", **sections: dict[str, Any]) -> Config:
    return small(**{"model": WIDE, "optim": {"name": name}, **sections})


@pytest.mark.parametrize("signed", [True, False])
def test_a_number_is_read_back_as_the_nearest_of_256(signed: bool) -> None:
    numbers = torch.randn(64, 4 * BLOCK, generator=torch.Generator().manual_seed(3)) ** 3
    numbers = numbers if signed else numbers.abs()
    codes, scales = _coded(numbers.clone(), signed=signed)
    assert codes.dtype == torch.uint8
    assert (codes.shape, scales.shape) == ((64, 4 * BLOCK), (64, 4))
    read = _read(codes, scales, signed=signed)
    largest = numbers.view(-1, BLOCK).abs().amax(1)
    assert signed or torch.equal(read.view(-1, BLOCK).amax(1), largest), "the largest of a block is exact"
    values = _read(torch.arange(256, dtype=torch.uint8).view(2, BLOCK), torch.ones(2, 1), signed=signed).flatten()
    errors = (numbers.view(-1, BLOCK, 1) / largest.view(-1, 1, 1) - values).abs().amin(-1)
    found = (numbers - read).view(-1, BLOCK).abs() / largest.view(-1, 1)
    torch.testing.assert_close(found, errors, rtol=0, atol=1e-6)


def test_a_block_of_zeros_stays_zero() -> None:
    codes, scales = _coded(torch.zeros(2, BLOCK), signed=True)
    assert torch.equal(_read(codes, scales, signed=True), torch.zeros(2, BLOCK))


@torch.compiler.set_stance("force_eager")  # torchao compiles its update, which rounds otherwise
def test_updates_are_those_of_torchao() -> None:
    """Whose blocks are runs of the whole matrix: of rows that are multiples of a block, the same ones."""
    from torchao.optim import AdamW8bit as TorchaoAdamW8bit

    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 2 * BLOCK, generator=draw)
    ours, theirs = (torch.nn.Parameter(weight.clone()) for _ in range(2))
    rest = torch.nn.Parameter(torch.zeros(1))
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    groups = [{"params": [ours], "eight_bit": True}, {"params": [rest], "eight_bit": False}]
    optimizers = [AdamW8bit(groups, **settings), TorchaoAdamW8bit([theirs], block_size=BLOCK, **settings)]
    for _ in range(5):
        gradient = torch.randn(weight.shape, generator=draw)
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    # A number between two codes may be rounded to either where it differs in the last bit.
    apart = (ours - theirs).detach().abs()
    assert (apart < 1e-5).float().mean() > 0.999
    assert apart.max() < 0.05 * settings["lr"]
    own, other = optimizers[0].state[ours], optimizers[1].state[theirs]
    for key in ("exp_avg", "exp_avg_sq"):
        assert (own[f"{key}_codes"] == other[key].codes).float().mean() > 0.999
        torch.testing.assert_close(own[f"{key}_scales"].flatten(), other[key].scale)


def test_the_loss_falls_as_with_moments_of_32_bits() -> None:
    config = {name: with_steps(eight_bit(name), 60) for name in ("adamw", "adamw8bit")}
    losses = {}
    for name, each in config.items():
        training = build(each, resolve(each, 1), CPU)
        losses[name] = torch.tensor([take(training, step) for step in range(60)])
    fell = losses["adamw"][0] - losses["adamw"][-10:].mean()
    assert fell > 1.0
    assert not torch.equal(losses["adamw"], losses["adamw8bit"])
    assert abs(losses["adamw8bit"][-10:].mean() - losses["adamw"][-10:].mean()) < 0.02 * fell


def test_only_matrices_other_than_the_embedding_have_codes() -> None:
    training = trained(eight_bit(model={**WIDE, "hidden_dim": 96}), 1)
    state = training.optimizer.state
    coded = {name for name, parameter in training.named_parameters() if set(state[parameter]) == set(STATE_KEYS)}
    plain = {name for name, parameter in training.named_parameters() if "exp_avg_sq" in state[parameter]}
    assert coded == {
        *(f"blocks.0.attention.{part}.weight" for part in ("query", "key", "value", "out")),
        "blocks.0.mlp.gate.weight", "blocks.0.mlp.up.weight", "head.weight",
    }  # fmt: skip
    assert plain == {name for name, _ in training.named_parameters()} - coded
    assert BLOCK == CODES_BLOCK


def whole_state(rank: int, world_size: int, folder: Path, parallel: dict[str, Any], steps: int, attempt: int) -> Any:
    """The whole tensors of the state that a run began with, and of the one that it ended with."""
    found: list[dict[str, torch.Tensor]] = []

    def whole(training: Training) -> dict[str, torch.Tensor]:
        tensors = {name: value.detach() for name, value in training_tensors(training).items()}
        return {n: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for n, v in tensors.items()}

    trainings: list[Training] = []

    def change(session: Any) -> None:
        trainings.append(session.training)
        start = session.recovery.start

        def starting() -> Any:
            position = start()
            found.append(whole(session.training))
            return position

        session.recovery.start = starting

    config = with_steps(eight_bit(parallel=parallel, checkpoint={"memory_survives": False}), steps)
    run_loop(config, folder, rank=rank, world_size=world_size, attempt=attempt, change=change)
    return found[0], whole(trainings[0])


def test_codes_and_scales_survive_a_change_of_mesh(tmp_path: Path) -> None:
    """Row shards, then columns split between blocks, then one process."""
    sharded = run_ranks(whole_state, world_size=2, args=(tmp_path, {"dp_shard": 2}, 3, 0))
    split = run_ranks(whole_state, world_size=2, args=(tmp_path, {"dp_shard": 1, "tp": 2}, 5, 1))
    alone = whole_state(0, 1, tmp_path, {}, 6, 2)
    assert {name.rsplit(".", 1)[1] for name in alone[0] if name.startswith("optimizer.")} > set(STATE_KEYS)
    assert_same(split[0][0], sharded[0][1])
    assert_same(alone[0], split[0][1])
    assert not torch.equal(alone[0]["model.embed.weight"], alone[1]["model.embed.weight"]), "it trained on"
