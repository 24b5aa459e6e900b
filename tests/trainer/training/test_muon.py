"""Muon: torch's own update, and a state dict of both of its parts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.trainer.training.optimizer_runs import assert_same, bits, take, trained
from tests.trainer.training_runs import small
from trainer.config.config import Config
from trainer.plan.expected import MUON_ITERATIONS
from trainer.training.muon import NUM_ITERATIONS, rate_ratio


def muon(**optim: Any) -> Config:
    return small(optim={"name": "muon", **optim})


def test_updates_are_those_of_torch() -> None:
    training = trained(muon(weight_decay=0.2, momentum=0.9), 0)
    optimizer = training.optimizer
    matrices = [p for name, p in training.named_parameters() if name.startswith("blocks.") and p.dim() == 2]
    others = {name: p for name, p in training.named_parameters() if not any(p is matrix for matrix in matrices)}
    assert {name.split(".")[0] for name in others} == {"blocks", "embed", "norm", "head"}
    twins = {parameter: torch.nn.Parameter(parameter.detach().clone()) for _, parameter in training.named_parameters()}
    torchs: list[torch.optim.Optimizer] = [
        torch.optim.Muon([twins[p] for p in matrices], weight_decay=0.2, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
        *(
            torch.optim.AdamW([twins[p]], betas=(0.9, 0.95), weight_decay=0.2 if name == "head.weight" else 0.0)
            for name, p in others.items()
        ),
    ]
    for step in range(3):
        training.forward_backward(training.batch(step))
        training.clip()
        for parameter, twin in twins.items():
            assert parameter.grad is not None
            twin.grad = parameter.grad.clone()
        rate = training.step(step)
        for each in torchs:
            each.param_groups[0]["lr"] = rate
            each.step()
    for parameter, twin in twins.items():
        if any(parameter is matrix for matrix in matrices):
            assert torch.equal(parameter, twin)
            assert set(optimizer.state[parameter]) == {"momentum_buffer"}
        else:  # one kernel rounds otherwise than a row of them
            torch.testing.assert_close(parameter.detach(), twin.detach(), rtol=0, atol=1e-6)
            assert set(optimizer.state[parameter]) == {"exp_avg", "exp_avg_sq", "step"}


def test_state_dict_of_the_optimizer_is_that_of_both_parts() -> None:
    one, other = trained(muon(), 2), trained(muon(), 0)
    for (_, parameter), (_, source) in zip(other.named_parameters(), one.named_parameters(), strict=True):
        parameter.data.copy_(source.data)
    other.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
    for training in (one, other):
        take(training, 2)
    assert_same(bits(one), bits(other))


def test_the_plan_counts_the_iterations_that_there_are() -> None:
    assert MUON_ITERATIONS == NUM_ITERATIONS
    assert rate_ratio(torch.Size((16, 4))) == pytest.approx(0.8)
