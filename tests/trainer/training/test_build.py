"""What `build` refuses or arranges before the first step: data, devices, dropout, gradients at rest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.processes import run_ranks
from tests.trainer.layouts import tiny
from trainer.config.load import ConfigError
from trainer.data.corpus import Corpus
from trainer.layout.resolve import resolve
from trainer.training.build import build, pick_backend, pick_device
from trainer.training.rank_training import Training

CPU = torch.device("cpu")


def single(**sections: dict[str, object]) -> Training:
    config = tiny(**sections)
    return build(config, resolve(config, 1), CPU)


def build_on_other_data(rank: int, world_size: int) -> str:
    config = tiny()
    corpus = Corpus(tokens=np.zeros(10_000, dtype=np.uint8), digest=f"{rank:032x}"[::-1])
    try:
        build(config, resolve(config, world_size), CPU, corpus=corpus)
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_with_different_data_are_refused() -> None:
    for message in run_ranks(build_on_other_data, world_size=2):
        assert "ranks read different data" in message
        assert "\n" not in message


def test_backend_and_device_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"train\.backend = 'nccl': needs train\.device = 'cuda'"):
        pick_backend(tiny(train={"backend": "nccl"}), CPU)
    assert pick_backend(tiny(), CPU) == "gloo"
    assert pick_device(tiny(), 0) == CPU
    with pytest.raises(ConfigError, match=r"parallel\.cpu_offload = 'all': needs train\.device = 'cuda'"):
        pick_device(tiny(parallel={"cpu_offload": True}), 0)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"train\.device = 'cuda': no CUDA device"):
            pick_device(tiny(train={"device": "cuda"}), 0)


def masks(rank: int, world_size: int, parallel: dict[str, int]) -> list[float]:
    """A random number drawn as dropout would at each of the batches 0, 1, 0."""
    config = tiny(model={"dropout": 0.5}, parallel={"dp_shard": 1, **parallel})
    training = build(config, resolve(config, world_size), CPU)
    drawn = []
    for index in (0, 1, 0):
        training._seed_dropout(index)
        drawn.append(torch.rand(1).item())
    return drawn


@pytest.mark.parametrize(
    ("parallel", "same"),
    [
        ({"dp_replicate": 2}, False),
        ({"tp": 2, "sequence_parallel": False}, True),
        ({"tp": 2}, False),
        ({"pp": 2}, False),
    ],
    ids=["data ranks differ", "tp ranks agree", "parts of a sequence differ", "stages differ"],
)
def test_dropout_is_a_function_of_batch_and_data_rank(parallel: dict[str, int], same: bool) -> None:
    first, second = run_ranks(masks, world_size=2, args=(parallel,))
    assert first[0] == first[2] != first[1]
    assert (first == second) is same


def test_training_with_dropout_repeats_itself() -> None:
    losses = []
    for _ in range(2):
        training = single(model={"dropout": 0.3})
        torch.rand(7)  # whatever else drew numbers
        losses.append(training.forward_backward(training.batch(3)).item())
    assert losses[0] == losses[1]


def gradient_placements(rank: int, world_size: int) -> list[str]:
    """Parameters whose gradient is not placed as they are, once it is clipped."""
    config = tiny(parallel={"dp_shard": 1, "tp": 2})
    training = build(config, resolve(config, world_size), CPU)
    training.forward_backward(training.batch(0))
    training.clip()
    return [
        name
        for name, parameter in training.named_parameters()
        if isinstance(parameter, DTensor)
        and (not isinstance(parameter.grad, DTensor) or parameter.grad.placements != parameter.placements)
    ]


def test_clipped_gradients_are_placed_as_their_parameters() -> None:
    assert run_ranks(gradient_placements, world_size=2) == [[], []]


def test_discarded_gradients_leave_no_trace() -> None:
    training = single()
    before = [parameter.detach().clone() for _, parameter in training.named_parameters()]
    training.forward_backward(training.batch(0))
    training.discard()
    assert all(parameter.grad is None for _, parameter in training.named_parameters())
    for (_, parameter), value in zip(training.named_parameters(), before, strict=True):
        assert torch.equal(parameter, value)


def test_evaluation_without_held_out_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.validation_ratio = 0"):
        single(data={"validation_ratio": 0.0}).evaluate_sets()


def test_spans_are_named_by_phase() -> None:
    from contextlib import nullcontext

    seen: list[tuple[str, int]] = []

    class Recorder:
        def span(self, kind: str, microbatch: int = -1) -> nullcontext[None]:
            seen.append((kind, microbatch))
            return nullcontext()

    config = tiny(train={"micro_batch_size": 4})
    training = build(config, resolve(config, 1), CPU, recorder=Recorder())
    training.forward_backward(training.batch(0))
    training.clip()
    training.step(0)
    assert seen == [
        ("data", -1),
        ("forward", 0),
        ("backward", 0),
        ("forward", 1),
        ("backward", 1),
        ("optimizer", -1),
        ("optimizer", -1),
    ]
