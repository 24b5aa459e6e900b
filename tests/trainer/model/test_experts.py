"""A mixture of experts: what a token gets, what is dropped, which losses act, what is counted, also of a piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.processes import run_ranks
from tests.trainer.layouts import tiny
from trainer.model.checkpointing import apply_activation_checkpointing
from trainer.model.experts import MixtureOfExperts, _by_expert
from trainer.model.initial_weights import initialise
from trainer.model.size import flops_per_token, num_parameters
from trainer.model.transformer import Transformer


def mixture(**model: object) -> MixtureOfExperts:
    config = tiny(model={"dim": 16, "num_experts": 4, "expert_dim": 24, **model}).model
    torch.manual_seed(0)
    layer = MixtureOfExperts(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


@pytest.mark.parametrize("model", [{}, {"capacity_factor": 0.5}, {"experts_per_token": 1, "capacity_factor": 2.0}])
def test_each_expert_takes_the_tokens_that_suit_it_best(model: dict[str, Any]) -> None:
    layer, x = mixture(expert_routing="expert", **model), torch.randn(3, 8, 16)
    capacity = round((layer.capacity_factor or 1) * 8 * layer.chosen / 4)
    expected = torch.zeros_like(x)
    for row in range(3):
        probabilities = (x[row] @ layer.router.weight.T).softmax(-1)
        for expert in range(4):
            alike = (probabilities[:, expert] * 2**12).round()
            for place in alike.argsort(descending=True, stable=True)[:capacity].tolist():
                token, own = x[row, place], layer.experts
                hidden = F.silu(own.gate[expert] @ token) * (own.up[expert] @ token)
                expected[row, place] += probabilities[place, expert] * (own.down[expert] @ hidden)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
    load = layer.take_load()
    assert load is not None
    assert load.tolist() == [[3 * capacity] * 4, [0] * 4], "all experts alike, and none drops a token"


def by_hand(layer: MixtureOfExperts, x: Tensor) -> tuple[Tensor, list[list[int]], list[list[int]]]:
    """Token by token: the output, the experts chosen, and those that had no room, by sequence."""
    out = torch.zeros_like(x)
    chosen_by: list[list[int]] = []
    dropped_by: list[list[int]] = []
    batch, seq, _ = x.shape
    capacity = -(-int(layer.capacity_factor * seq * layer.chosen) // layer.num_experts) or seq * layer.chosen
    for row in range(batch):
        taken = [0] * layer.num_experts
        chosen_by.append([])
        dropped_by.append([])
        for place in range(seq):
            token = x[row, place]
            probabilities = (layer.router.weight @ token).softmax(-1)
            weights, experts = probabilities.topk(layer.chosen)
            if layer.chosen > 1:
                weights = weights / weights.sum()
            for weight, expert in zip(weights, experts.tolist(), strict=True):
                chosen_by[row].append(expert)
                taken[expert] += 1
                if taken[expert] > capacity:
                    dropped_by[row].append(expert)
                    continue
                own = layer.experts
                hidden = F.silu(own.gate[expert] @ token) * (own.up[expert] @ token)
                out[row, place] = out[row, place] + weight * (own.down[expert] @ hidden)
    return out, chosen_by, dropped_by


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"experts_per_token": 1},
        {"capacity_factor": 0.5},
        {"experts_per_token": 4},
        {"expert_products": "grouped", "experts_per_token": 1, "capacity_factor": 0.5},
    ],
)
def test_each_token_goes_to_its_experts(model: dict[str, object]) -> None:
    layer, x = mixture(**model), torch.randn(3, 8, 16)
    expected, chosen, dropped = by_hand(layer, x)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
    load = layer.take_load()
    assert load is not None
    for row, lists in zip(load.tolist(), (chosen, dropped), strict=True):
        assert row == [sum(one.count(expert) for one in lists) for expert in range(4)]
    assert bool(load[1].sum()) == ("capacity_factor" in model)
    assert layer.take_load() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_have_the_gradients_of_the_loop(dtype: torch.dtype) -> None:
    """Also of an expert that gets no token, and under autocast, which does not know the grouped product."""
    x = torch.randn(2, 4, 16)
    out: list[Tensor] = []
    gradients: list[Tensor] = []
    for products in ("loop", "grouped"):
        layer = mixture(expert_products=products, num_experts=32)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            out.append(layer(x))
        out[-1].square().sum().backward()
        assert layer.experts.gate.grad is not None
        gradients.append(layer.experts.gate.grad)
    torch.testing.assert_close(out[1], out[0])
    torch.testing.assert_close(gradients[1], gradients[0])
    assert not gradients[0].any(dim=2).any(dim=1).all(), "each expert got a token"


def test_later_tokens_drop_no_earlier_one() -> None:
    layer, x = mixture(capacity_factor=0.5), torch.randn(1, 12, 16)
    changed = x.clone()
    changed[:, 7:] = torch.randn(1, 5, 16)
    torch.testing.assert_close(layer(x)[:, :7], layer(changed)[:, :7])


def test_experts_prefer_no_position_where_probabilities_are_small() -> None:
    probabilities = (0.3 * torch.randn(1, 1024, 256, generator=torch.Generator().manual_seed(0))).softmax(-1)
    weights, _ = _by_expert(probabilities, 32, None)
    first, *_, last = [float(quarter.mean()) for quarter in (weights > 0).sum(-1)[0].float().chunk(4)]
    assert first == pytest.approx(last, rel=0.05)


def test_losses_of_the_router_enter_in_backward() -> None:
    """As if they had been added to the loss, times the scale; balance is 1 and z is small where all is even."""
    layer, x = mixture(balance_loss=0.5, router_z_loss=0.25), torch.randn(2, 8, 16)
    layer.loss_scale = 8.0
    layer(x).square().mean().mul(8.0).backward()
    got = layer.router.weight.grad
    assert got is not None
    layer.router.weight.grad = None

    logits = x @ layer.router.weight.T
    probabilities = logits.softmax(-1)
    share = F.one_hot(probabilities.topk(2).indices, 4).float().mean((1, 2)) * 2 / 2
    balance = 4 * (share * probabilities.mean(1)).sum(-1).mean()
    z = logits.logsumexp(-1).square().mean()
    layer.balance_loss = layer.z_loss = 0.0
    (8.0 * (layer(x).square().mean() + 0.5 * balance + 0.25 * z)).backward()
    torch.testing.assert_close(got, layer.router.weight.grad, rtol=1e-4, atol=1e-5)


PIECES: dict[str, object] = {"capacity_factor": 0.5, "balance_loss": 0.5, "router_z_loss": 0.25}


def _piece(rank: int, world_size: int) -> dict[str, Any]:
    """Of a layer whose ranks have a piece of each sequence, and together one loss."""
    layer = mixture(**PIECES)
    x = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(1))
    layer.pieces, layer.loss_share = dist.group.WORLD, 1 / world_size
    out = layer(x.chunk(world_size, dim=1)[rank])
    out.square().sum().backward()
    return {"out": out.detach(), "load": layer.take_load(),
            "gradients": [parameter.grad for parameter in layer.parameters()]}  # fmt: skip


def test_pieces_of_a_sequence_are_treated_as_the_whole() -> None:
    layer, x = mixture(**PIECES), torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(1))
    out = layer(x)
    out.square().sum().backward()
    pieces = run_ranks(_piece, world_size=3)
    torch.testing.assert_close(torch.cat([piece["out"] for piece in pieces], dim=1), out)
    load = layer.take_load()
    assert load is not None
    assert load[1].all(), "each expert drops some"
    assert torch.equal(sum(piece["load"] for piece in pieces), load)
    for number, parameter in enumerate(layer.parameters()):
        assert parameter.grad is not None
        # Sums of terms of some thousands in another order: the rounding is one of the whole, not of a small element.
        difference = sum(piece["gradients"][number] for piece in pieces) - parameter.grad
        assert difference.norm() <= 1e-6 * parameter.grad.norm()


def test_recomputation_and_evaluation_are_not_counted() -> None:
    config = tiny(model={"num_experts": 4, "expert_dim": 32}, train={"activation_checkpointing": "full"})
    model = Transformer(config.model)
    initialise(model, config.model, seed=0)
    apply_activation_checkpointing(model, config.train)
    tokens = torch.randint(256, (2, 16))
    model(tokens).mean().backward()
    layers = [block.mlp for block in model.blocks.values()]
    assert [int(layer.take_load()[0].sum()) for layer in layers] == [2 * 2 * 16] * 2
    model.eval()
    model(tokens)
    assert [layer.take_load() for layer in layers] == [None, None]


def test_size_of_a_mixture() -> None:
    config = tiny(model={"num_experts": 4, "expert_dim": 32}).model
    with torch.device("meta"):
        model = Transformer(config)
    assert num_parameters(config) == sum(parameter.numel() for parameter in model.parameters())
    two, four = (tiny(model={"num_experts": n, "expert_dim": 32}).model for n in (2, 4))
    only_routers = 6 * 2 * config.num_layers * config.dim
    assert flops_per_token(four, 32) - flops_per_token(two, 32) == only_routers, "a token goes to two experts anyway"
