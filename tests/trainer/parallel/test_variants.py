"""What can be switched on within a layout changes speed or memory, and nothing of what is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.processes import run_ranks
from tests.trainer.layouts import Outcome, compare, tiny, train_alone, train_layouts

pytestmark = pytest.mark.timeout(300)

STEPS = 8

Sections = dict[str, dict[str, Any]]


def layout(train: dict[str, Any] | None = None, **parallel: Any) -> Sections:
    return {"parallel": {"dp_shard": 1, **parallel}, "train": {"steps": STEPS, **(train or {})}}


# What inductor makes of it is tried in `test_compile`: here it would compile for each layout.
COMPILED = {"compile": True, "compile_backend": "aot_eager"}

EXPERTS = {"model": {"num_experts": 4, "expert_dim": 64}}
CAPACITY = {"model": {"num_experts": 4, "expert_dim": 64, "capacity_factor": 1.0}}

VARIANTS: dict[str, Sections] = {
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
    "fsdp, each microbatch reduced": layout(dp_shard=2, reduce_every_microbatch=True, train={"micro_batch_size": 2}),
    "fsdp, full recomputation": layout(dp_shard=2, train={"activation_checkpointing": "full"}),
    "fsdp, every second block": layout(dp_shard=2, train={"activation_checkpointing": "every_n"}),
    "fsdp, selective": layout(dp_shard=2, train={"activation_checkpointing": "selective"}),
    "ddp, full recomputation": layout(dp_replicate=2, train={"activation_checkpointing": "full"}),
    "ddp, compiled": layout(dp_replicate=2, train=COMPILED),
    "fsdp, compiled, full recomputation": layout(
        dp_shard=2, train={**COMPILED, "activation_checkpointing": "full", "micro_batch_size": 2}
    ),
    "ep": {**layout(ep=2), **EXPERTS},
    "ep, capacity, two microbatches, recomputation": {
        **layout(ep=2, train={"micro_batch_size": 2, "activation_checkpointing": "full"}),
        **CAPACITY,
    },
    "cp": layout(cp=2),
    "cp, two microbatches, compiled": layout(cp=2, train={**COMPILED, "micro_batch_size": 4}),
    "experts under ddp": {**layout(dp_replicate=2), **EXPERTS},
    "experts under fsdp, compiled": {**layout(dp_shard=2, train=COMPILED), **CAPACITY},
    # On a CPU nothing moves and no launch accepts it, but the policy and all that follows from it are the same.
    "fsdp, cpu offload": layout(dp_shard=2, cpu_offload=True),
    "ddp, zero-1": layout(dp_replicate=2, zero1=True),
    "tp, selective": layout(tp=2, train={"activation_checkpointing": "selective"}),
}


# Sums of two numbers of eight bits: what a step's gradient differs by is 1/256 of it.
ROUNDED: dict[str, Sections] = {
    "fsdp, reduced in bf16": layout(dp_shard=2, reduce_dtype="bf16"),
    "fsdp, each microbatch reduced in bf16": layout(
        dp_shard=2, reduce_dtype="bf16", reduce_every_microbatch=True, train={"micro_batch_size": 2}
    ),
}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Outcome]]:
    return run_ranks(train_layouts, world_size=2, args=(VARIANTS | ROUNDED, STEPS), deadline_s=240)


@pytest.fixture(scope="module")
def single() -> dict[str, Outcome]:
    """What one process does with the same model and data; by the sections that are not the defaults."""
    alone: dict[str, Outcome] = {}
    for sections in VARIANTS.values():
        shared = {name: sections[name] for name in ("model", "data") if name in sections}
        if repr(shared) not in alone:
            alone[repr(shared)] = train_alone(tiny(train={"steps": STEPS}, **shared), STEPS)
    return alone


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name: str, single: dict[str, Outcome], two_ranks: list[dict[str, Outcome]]) -> None:
    sections = VARIANTS[name]
    expected = single[repr({key: sections[key] for key in ("model", "data") if key in sections})]
    compare(expected, [rank[name] for rank in two_ranks], loss=1e-4, parameter=5e-4)


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded(name: str, single: dict[str, Outcome], two_ranks: list[dict[str, Outcome]]) -> None:
    """Adam moves a weight whose gradient is nearly zero by a whole step either way: hence the norms."""
    expected = single[repr({})]
    parameters: dict[str, torch.Tensor] = {}
    for outcome in (rank[name] for rank in two_ranks):
        assert outcome.losses == pytest.approx(expected.losses, rel=1 / 256)
        assert outcome.norms == pytest.approx(expected.norms, rel=1 / 256)
        parameters |= outcome.parameters
    assert parameters.keys() == expected.parameters.keys()
    assert any(not torch.equal(parameters[key], value) for key, value in expected.parameters.items())
    for key, value in expected.parameters.items():
        assert torch.linalg.vector_norm(parameters[key] - value) < 1 / 64 * torch.linalg.vector_norm(value), key
