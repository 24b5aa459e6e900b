"""Pipelines, and their products with data and tensor parallelism, train as one process does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.depth import later, tried, usually
from tests.processes import run_ranks
from tests.trainer.layouts import Outcome, compare, tiny, train_alone, train_layouts
from trainer.config.load import ConfigError
from trainer.layout.plan import split_layers
from trainer.layout.resolve import resolve

pytestmark = pytest.mark.timeout(300)

STEPS = tried(3, nightly=10)
MODEL = {"num_layers": 4}

Sections = dict[str, dict[str, Any]]


def layout(train: dict[str, Any] | None = None, **parallel: Any) -> Sections:
    # Four microbatches in two stages a rank: the least that all schedules accept.
    batch = {"micro_batch_size": 8 // parallel.get("dp_replicate", 1) // parallel.get("dp_shard", 1) // 4}
    return {
        "model": MODEL,
        "train": {"steps": STEPS, **batch, **(train or {})},
        "parallel": {"dp_shard": 1, "pp": 2, **parallel},
    }


TWO_RANKS = {
    "gpipe": layout(schedule="gpipe"),
    "1f1b": layout(schedule="1f1b"),
    "1f1b, stages by cost": layout(schedule="1f1b", stage_costs=[1.0, 1.0, 1.0, 3.0]),
    "interleaved": layout(schedule="interleaved_1f1b"),
    "interleaved zero-bubble": layout(schedule="interleaved_zero_bubble"),
    "zbv zero-bubble": layout(schedule="zbv_zero_bubble"),
    "interleaved zero-bubble, full recomputation": layout(
        schedule="interleaved_zero_bubble", train={"activation_checkpointing": "full"}
    ),
}
FOUR_RANKS = {
    "pp x ddp": layout(dp_replicate=2),
    "pp x fsdp": layout(dp_shard=2),
    "pp x tp": layout(tp=2),
    "interleaved x ddp": layout(dp_replicate=2, schedule="interleaved_1f1b"),
    "interleaved x fsdp": layout(dp_shard=2, schedule="interleaved_1f1b"),
    "zero-bubble x ddp": layout(dp_replicate=2, schedule="interleaved_zero_bubble"),
    "zbv x fsdp": layout(dp_shard=2, schedule="zbv_zero_bubble"),
}
FOUR_RANKS = usually(FOUR_RANKS, later=["pp x ddp", "pp x fsdp", "interleaved x ddp", "zbv x fsdp"])
EIGHT_RANKS = {"pp x fsdp x tp": layout(dp_shard=2, tp=2), "pp x hsdp": layout(dp_replicate=2, dp_shard=2)}


@pytest.fixture(scope="module")
def single() -> Outcome:
    return train_alone(tiny(model=MODEL, train={"steps": STEPS}), STEPS)


def outcomes_of(layouts: dict[str, Sections], world_size: int) -> list[dict[str, Outcome]]:
    return run_ranks(train_layouts, world_size=world_size, args=(layouts, STEPS), deadline_s=240)


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Outcome]]:
    return outcomes_of(TWO_RANKS, 2)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Outcome]]:
    return outcomes_of(FOUR_RANKS, 4)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(name: str, single: Outcome, two_ranks: list[dict[str, Outcome]]) -> None:
    compare(single, [rank[name] for rank in two_ranks], loss=1e-4, parameter=5e-4)


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks(name: str, single: Outcome, four_ranks: list[dict[str, Outcome]]) -> None:
    compare(single, [rank[name] for rank in four_ranks], loss=1e-4, parameter=5e-4)


@later("two of the dimensions: test_four_ranks; FSDP x TP: test_equivalence.py")
def test_three_dimensions_on_eight_ranks(single: Outcome) -> None:
    by_rank = outcomes_of(EIGHT_RANKS, 8)
    for name in EIGHT_RANKS:
        compare(single, [rank[name] for rank in by_rank], loss=1e-4, parameter=5e-4)


@pytest.mark.parametrize(
    ("num_layers", "stages", "expected"),
    [(8, 4, [2, 2, 2, 2]), (10, 4, [3, 3, 2, 2]), (4, 4, [1, 1, 1, 1]), (7, 2, [4, 3]), (5, 1, [5])],
)
def test_equal_layers_are_spread(num_layers: int, stages: int, expected: list[int]) -> None:
    split = split_layers(num_layers, stages, 1, "loop", [])
    assert [len(layers) for layers in split.layers] == expected
    assert [layer for layers in split.layers for layer in layers] == list(range(num_layers))


def test_stages_are_balanced_by_cost() -> None:
    assert split_layers(4, 2, 1, "loop", [1, 1, 1, 3]).layers == ((0, 1, 2), (3,))
    assert split_layers(4, 2, 1, "loop", [5, 1, 1, 1]).layers == ((0,), (1, 2, 3))


def test_who_runs_which_stage() -> None:
    assert split_layers(8, 2, 2, "loop", []).of_rank == ((0, 2), (1, 3))
    assert split_layers(8, 2, 2, "v", []).of_rank == ((0, 3), (1, 2))


def test_zero_bubble_replicas_are_not_left_to_ddp() -> None:
    config = tiny(**layout(dp_replicate=2, schedule="interleaved_zero_bubble"))
    assert resolve(config, 4).data_parallel_kind == "hsdp"
    assert resolve(tiny(**layout(dp_replicate=2)), 4).data_parallel_kind == "ddp"


@pytest.mark.parametrize(
    ("schedule", "micro", "expected"),
    [
        ("1f1b", 8, "makes 1 microbatch a step; schedule 1f1b needs at least parallel.pp = 2"),
        (
            "zbv_zero_bubble",
            4,
            "makes 2 microbatches a step; schedule zbv_zero_bubble needs at least 2 x parallel.pp = 4",
        ),
    ],
)
def test_too_few_microbatches(schedule: str, micro: int, expected: str) -> None:
    sections = layout(schedule=schedule)
    sections["train"] = {"micro_batch_size": micro}
    with pytest.raises(ConfigError, match=expected):
        resolve(tiny(**sections), 2)


def test_microbatches_that_are_no_whole_rounds() -> None:
    sections = layout(schedule="interleaved_1f1b") | {"train": {"global_batch_size": 5, "micro_batch_size": 1}}
    with pytest.raises(ConfigError, match=r"5 microbatches a step; .* needs a multiple of 2, the number of whole"):
        resolve(tiny(**sections), 2)


def test_selective_checkpointing_is_refused_by_the_name_of_the_schedule() -> None:
    sections = layout(schedule="zbv_zero_bubble") | {"train": {"activation_checkpointing": "selective"}}
    with pytest.raises(ConfigError, match="zbv_zero_bubble splits it in two; allowed: none, full, every_n"):
        resolve(tiny(**sections), 2)
