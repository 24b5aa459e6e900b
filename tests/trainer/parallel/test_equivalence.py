"""Every parallel layout trains as one process does on the same global batches."""

from __future__ import annotations

from typing import Any

import pytest

from tests.depth import later, tried, usually
from tests.processes import run_ranks
from tests.trainer.layouts import Outcome, compare, tiny, train_alone, train_layouts

# All layouts of a world size train in one set of processes, which counts for the first test that asks for it.
pytestmark = pytest.mark.timeout(600)

STEPS = tried(3, nightly=10)
STEPS_TO_LEARN = 20
# float32 sums in another order; the steps of AdamW amplify the difference, the losses here are near 4.
LOSS_TOLERANCE = 1e-4
PARAMETER_TOLERANCE = 5e-4

Sections = dict[str, dict[str, Any]]


EXPERTS = {"num_experts": 4, "expert_dim": 64, "capacity_factor": 1.25}


def layout(train: dict[str, Any] | None = None, **parallel: Any) -> Sections:
    return {"parallel": {"dp_shard": 1, **parallel}, **({"train": train} if train else {})}


def experts(**sections: Any) -> Sections:
    return {**layout(**sections), "model": EXPERTS}


TWO_RANKS: dict[str, Sections] = {
    "ddp": layout(dp_replicate=2),
    "fsdp": layout(dp_shard=2),
    "tp": layout(tp=2),
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
    "cp x tp": layout(cp=2, tp=2),
    "ddp x cp": layout(dp_replicate=2, cp=2),
    "fsdp x ep": experts(dp_shard=2, ep=2),
    "fsdp x ep, grouped": {**layout(dp_shard=2, ep=2), "model": {**EXPERTS, "expert_products": "grouped"}},
    "ddp x ep, two microbatches": experts(dp_replicate=2, ep=2, train={"micro_batch_size": 1}),
    "pp x ep": experts(pp=2, ep=2, train={"micro_batch_size": 2}),
    "ep x tp": experts(ep=2, tp=2),
    "ep x tp, grouped": {**layout(ep=2, tp=2), "model": {**EXPERTS, "expert_products": "grouped"}},
    "ep x cp": experts(ep=2, cp=2),
    "ep x cp, grouped": {**layout(ep=2, cp=2), "model": {**EXPERTS, "expert_products": "grouped"}},
    "cp x tp, experts, two microbatches": experts(cp=2, tp=2, train={"micro_batch_size": 4}),
    "ddp x tp, experts": experts(dp_replicate=2, tp=2),
    "fsdp x tp, experts, without sequence parallel": experts(dp_shard=2, tp=2, sequence_parallel=False),
    "pp x tp, experts": experts(pp=2, tp=2, train={"micro_batch_size": 2}),
    "pp x cp, experts": experts(pp=2, cp=2, train={"micro_batch_size": 2}),
    "hsdp, each microbatch reduced": layout(
        dp_replicate=2, dp_shard=2, reduce_every_microbatch=True, train={"micro_batch_size": 1}
    ),
    "hsdp, zero-2, two microbatches": layout(
        dp_replicate=2, dp_shard=2, reshard_after_forward=False, train={"micro_batch_size": 1}
    ),
}
EIGHT_RANKS: dict[str, Sections] = {
    "ep x cp x tp": experts(ep=2, cp=2, tp=2),
    "hsdp x ep x cp": experts(dp_replicate=2, ep=2, cp=2),
    "fsdp x ep x tp": {**layout(dp_shard=2, ep=2, tp=2), "model": {**EXPERTS, "expert_products": "grouped"}},
}


FOUR_RANKS = usually(
    FOUR_RANKS,
    later=[
        "ddp", "fsdp", "fsdp, two microbatches", "tp", "hsdp", "fsdp x ep, grouped",
        "ddp x ep, two microbatches", "ep x tp", "ep x cp, grouped", "ddp x tp, experts", "pp x tp, experts",
        "pp x cp, experts", "ddp x tp", "ep x cp",
        # "cp x tp", "fsdp x tp"; experts under each, without sequence parallel, in two microbatches: test_variants.py
        "cp x tp, experts, two microbatches", "fsdp x tp, experts, without sequence parallel",
    ],
)  # fmt: skip


@pytest.fixture(scope="module")
def single() -> Outcome:
    return train_alone(tiny(), STEPS)


@pytest.fixture(scope="module")
def mixture() -> Outcome:
    """Of a model with experts."""
    return train_alone(tiny(model=EXPERTS), STEPS)


def outcomes_of(layouts: dict[str, Sections], world_size: int) -> list[dict[str, Outcome]]:
    return run_ranks(train_layouts, world_size=world_size, args=(layouts, STEPS), deadline_s=480)


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Outcome]]:
    return outcomes_of(TWO_RANKS, 2)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Outcome]]:
    return outcomes_of(FOUR_RANKS, 4)


def test_one_process_learns() -> None:
    losses = train_alone(tiny(), STEPS_TO_LEARN).losses
    assert losses[0] == pytest.approx(5.545, abs=0.2)  # ln 256: the untrained model knows nothing
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(name: str, single: Outcome, two_ranks: list[dict[str, Outcome]]) -> None:
    compare(single, [rank[name] for rank in two_ranks], loss=LOSS_TOLERANCE, parameter=PARAMETER_TOLERANCE)


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks(name: str, single: Outcome, mixture: Outcome, four_ranks: list[dict[str, Outcome]]) -> None:
    expected = mixture if "model" in FOUR_RANKS[name] else single
    compare(expected, [rank[name] for rank in four_ranks], loss=LOSS_TOLERANCE, parameter=PARAMETER_TOLERANCE)


@later("two of the three dimensions, also of ranks that are no neighbours: test_four_ranks")
def test_experts_on_eight_ranks(mixture: Outcome) -> None:
    """Where the ranks that hold the experts, or share a sequence, are no neighbours."""
    by_rank = outcomes_of(EIGHT_RANKS, 8)
    for name in EIGHT_RANKS:
        compare(mixture, [rank[name] for rank in by_rank], loss=LOSS_TOLERANCE, parameter=PARAMETER_TOLERANCE)
