"""Compressed gradients: how far they are from whole ones, and that the error which is recorded is that distance."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.processes import run_ranks
from tests.trainer.layouts import tiny
from trainer.layout.resolve import resolve
from trainer.replay.triage import replay
from trainer.training.build import build
from trainer.training.rank_training import Training

pytestmark = pytest.mark.timeout(120)

KINDS: dict[str, dict[str, Any]] = {
    "fp16": {"gradient_compression": "fp16"},
    "bf16": {"gradient_compression": "bf16"},
    "int8": {"gradient_compression": "int8"},
    "topk": {"gradient_compression": "topk", "topk_ratio": 0.05},
    "powersgd 1": {"gradient_compression": "powersgd", "powersgd_rank": 1, "powersgd_start": 2},
    "powersgd 8": {"gradient_compression": "powersgd", "powersgd_rank": 8, "powersgd_start": 2},
}


def trained(world_size: int, parallel: dict[str, Any]) -> Training:
    config = tiny(parallel={"dp_replicate": 2, "dp_shard": 1, **parallel}, model={"dim": 32, "hidden_dim": 64})
    return build(config, resolve(config, world_size), torch.device("cpu"))


def gradients(training: Training) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for _, p in training.named_parameters() if p.grad is not None]).double()


def distances(rank: int, world_size: int) -> dict[str, Any]:
    """(recorded error, distance from what DDP alone gives) of three backward passes on batch 0, from one state."""
    whole = trained(world_size, {})
    whole.forward_backward(whole.batch(0))
    exact = gradients(whole)
    found: dict[str, Any] = {}
    for kind, parallel in KINDS.items():
        training = trained(world_size, parallel)
        found[kind] = []
        for _ in range(3):
            training.sample_compression(True)
            training.forward_backward(training.batch(0))
            squares = training.compression_squares()
            assert squares is not None
            got = gradients(training)
            distance = ((got - exact).norm() / exact.norm()).item()
            found[kind].append((math.sqrt(squares[0] / squares[1]), distance, got.sum().item()))
            training.optimizer.zero_grad()
        assert training.compression_squares() is None, "nothing is left of it"
        with training.without_side_effects():
            training.forward_backward(training.batch(0))
        assert torch.equal(gradients(training), exact), "a replay sees whole gradients"
        kept = {name: value.clone() for name, value in training.compressions[0].tensors().items()}
        replay(training, training.batch(0), None, step=1)
        left = training.compressions[0].tensors()
        assert left.keys() == kept.keys(), "a replay drops no residual"
        assert all(torch.equal(value, left[name]) for name, value in kept.items())
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(distances, world_size=2, deadline_s=100)


@pytest.mark.parametrize("kind", KINDS)
def test_the_recorded_error_is_the_distance_from_whole_gradients(kind: str, ranks: list[dict[str, Any]]) -> None:
    for recorded, distance, _ in ranks[0][kind]:
        assert recorded == pytest.approx(distance, rel=1e-3, abs=1e-12)
    assert ranks[0][kind] == ranks[1][kind], "replicas keep the same gradients"


def test_each_kind_loses_what_its_format_must_lose(ranks: list[dict[str, Any]]) -> None:
    errors = {kind: [error for error, _, _ in found] for kind, found in ranks[0].items()}
    # Rounding to 11 and 8 significant bits: at most half of the last one, and on average a good part of it.
    assert 2**-14 < errors["fp16"][0] < 2**-11
    assert 2**-11 < errors["bf16"][0] < 2**-8
    # Levels of 1/127 of the largest of 256 numbers, and again in the mean.
    assert 2**-10 < errors["int8"][0] < 2**-5
    assert 0.1 < errors["topk"][0] < 1
    assert errors["powersgd 1"][:2] == [0, 0], "whole gradients before powersgd_start"
    assert 0.02 < errors["powersgd 8"][2] < errors["powersgd 1"][2] < 1


STEPS = 40


def learned(rank: int, world_size: int) -> dict[str, list[float]]:
    """Losses of the first steps, by kind."""
    kinds: dict[str, dict[str, Any]] = {"none": {}, "int8": KINDS["int8"], "int8 again": KINDS["int8"]}
    kinds["topk"] = {**KINDS["topk"], "topk_ratio": 0.1}
    found: dict[str, list[float]] = {}
    for kind, parallel in kinds.items():
        training = trained(world_size, parallel)
        losses = []
        for step in range(STEPS):
            losses.append(training.global_mean(training.forward_backward(training.batch(step))).item())
            training.clip()
            training.step(step)
        found[kind] = losses
    return found


def test_with_error_feedback_a_model_learns_as_without_compression() -> None:
    ranks = run_ranks(learned, world_size=2, deadline_s=100)
    assert ranks[0] == ranks[1]
    losses, last = ranks[0], {kind: sum(values[-5:]) / 5 for kind, values in ranks[0].items()}
    assert losses["int8"] == losses["int8 again"], "the same bits in each run"
    assert last["none"] < 0.8 * losses["none"][0]
    assert last["int8"] == pytest.approx(last["none"], rel=0.01)
    assert last["topk"] == pytest.approx(last["none"], rel=0.1)
