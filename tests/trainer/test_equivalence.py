"""Every parallel layout trains as one process does on the same global batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.processes import run_ranks
from tests.trainer.layouts import Outcome, compare, tiny, train, train_layouts

# All layouts of a world size train in one set of processes, which counts for the first test that asks for it.
pytestmark = pytest.mark.timeout(300)

STEPS = 20
# float32 sums in another order; 20 steps of AdamW amplify the difference, the losses here are near 4.
LOSS_TOLERANCE = 1e-4
PARAMETER_TOLERANCE = 5e-4

Sections = dict[str, dict[str, Any]]


def layout(train: dict[str, Any] | None = None, **parallel: Any) -> Sections:
    return {"parallel": {"dp_shard": 1, **parallel}, **({"train": train} if train else {})}


TWO_RANKS: dict[str, Sections] = {
    "ddp": layout(dp_replicate=2),
    "fsdp": layout(dp_shard=2),
    "tp": layout(tp=2),
    "tp, no sequence or loss parallel": layout(tp=2, sequence_parallel=False, loss_parallel=False),
    "tp, document mask": {**layout(tp=2), "data": {"document_mask": True, "separator": 10}},
    "fsdp, document mask, recomputation": {
        **layout(dp_shard=2, train={"activation_checkpointing": "full"}),
        "data": {"document_mask": True, "separator": 10},
    },
    "tp, tied embeddings": {**layout(tp=2), "model": {"tie_embeddings": True}},
    "fsdp, tied embeddings": {**layout(dp_shard=2), "model": {"tie_embeddings": True}},
    "zero-2": layout(dp_shard=2, reshard_after_forward=False),
    "fsdp, explicit prefetch": layout(dp_shard=2, prefetch_blocks=1),
    "fsdp, full recomputation": layout(dp_shard=2, train={"activation_checkpointing": "full"}),
    "fsdp, every second block": layout(dp_shard=2, train={"activation_checkpointing": "every_n"}),
    "fsdp, selective": layout(dp_shard=2, train={"activation_checkpointing": "selective"}),
    "ddp, full recomputation": layout(dp_replicate=2, train={"activation_checkpointing": "full"}),
    "tp, selective": layout(tp=2, train={"activation_checkpointing": "selective"}),
}
FOUR_RANKS: dict[str, Sections] = {
    "ddp": layout(dp_replicate=4),
    "ddp, two microbatches": layout(dp_replicate=4, train={"micro_batch_size": 1}),
    "fsdp": layout(dp_shard=4),
    "fsdp, two microbatches": layout(dp_shard=4, train={"micro_batch_size": 1}),
    "tp": layout(tp=4),
    "fsdp x tp": layout(dp_shard=2, tp=2),
    "ddp x tp": layout(dp_replicate=2, tp=2),
    "hsdp": layout(dp_replicate=2, dp_shard=2),
    "hsdp, zero-2, two microbatches": layout(
        dp_replicate=2, dp_shard=2, reshard_after_forward=False, train={"micro_batch_size": 1}
    ),
}


@pytest.fixture(scope="module")
def single() -> dict[str, Outcome]:
    """What one process does, by what of the model or data is not the default."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {
            "plain": train(tiny(), 1, STEPS),
            "tied": train(tiny(model={"tie_embeddings": True}), 1, STEPS),
            "masked": train(tiny(data={"document_mask": True, "separator": 10}), 1, STEPS),
        }
    finally:
        torch.set_num_threads(threads)


def outcomes_of(layouts: dict[str, Sections], world_size: int) -> list[dict[str, Outcome]]:
    return run_ranks(train_layouts, world_size=world_size, args=(layouts, STEPS), deadline_s=240)


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Outcome]]:
    return outcomes_of(TWO_RANKS, 2)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Outcome]]:
    return outcomes_of(FOUR_RANKS, 4)


def test_one_process_learns(single: dict[str, Outcome]) -> None:
    losses = single["plain"].losses
    assert losses[0] == pytest.approx(5.545, abs=0.2)  # ln 256: the untrained model knows nothing
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(name: str, single: dict[str, Outcome], two_ranks: list[dict[str, Outcome]]) -> None:
    check(name, TWO_RANKS, single, two_ranks)


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks(name: str, single: dict[str, Outcome], four_ranks: list[dict[str, Outcome]]) -> None:
    check(name, FOUR_RANKS, single, four_ranks)


def check(
    name: str, layouts: dict[str, Sections], single: dict[str, Outcome], by_rank: list[dict[str, Outcome]]
) -> None:
    expected = single["tied" if "model" in layouts[name] else "masked" if "data" in layouts[name] else "plain"]
    compare(expected, [rank[name] for rank in by_rank], loss=LOSS_TOLERANCE, parameter=PARAMETER_TOLERANCE)
