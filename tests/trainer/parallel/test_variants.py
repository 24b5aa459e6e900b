"""What can be switched on within a layout changes speed or memory, and nothing of what is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.depth import tried, usually
from tests.processes import run_ranks
from tests.trainer.layouts import Outcome, compare, tiny, train_alone, train_layouts

pytestmark = pytest.mark.timeout(600)

STEPS = tried(3, nightly=8)

Sections = dict[str, dict[str, Any]]


def layout(train: dict[str, Any] | None = None, **parallel: Any) -> Sections:
    return {"parallel": {"dp_shard": 1, **parallel}, "train": {"steps": STEPS, **(train or {})}}


# What inductor makes of it is tried in tests/trials/trainer/test_inductor.py: here it would compile for each layout.
COMPILED = {"compile": True, "compile_backend": "aot_eager"}

EXPERTS = {"model": {"num_experts": 4, "expert_dim": 64}}
CHOOSING = {"model": {"num_experts": 4, "expert_dim": 64, "expert_routing": "expert"}}
CAPACITY = {"model": {"num_experts": 4, "expert_dim": 64, "capacity_factor": 1.0}}

COMPUTED = ("model", "data", "optim")
"""Sections that one process has to have too."""

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
    "ddp, loss in chunks": layout(dp_replicate=2, train={"chunked_loss": True, "micro_batch_size": 2}),
    "fsdp, loss in chunks, compiled": layout(dp_shard=2, train={"chunked_loss": True, **COMPILED}),
    "fsdp, loss in chunks, tied embeddings": {
        **layout(dp_shard=2, train={"chunked_loss": True}),
        "model": {"tie_embeddings": True},
    },
    "tp, loss in chunks": layout(tp=2, train={"chunked_loss": True}),
    "tp, loss in chunks, no sequence or loss parallel": layout(
        tp=2, sequence_parallel=False, loss_parallel=False, train={"chunked_loss": True}
    ),
    "cp, ring": layout(cp=2, cp_exchange="ring"),
    "cp, ring, compiled, recomputation, two microbatches": layout(
        cp=2, cp_exchange="ring", train={**COMPILED, "micro_batch_size": 4, "activation_checkpointing": "full"}
    ),
    "cp, ring, selective": layout(cp=2, cp_exchange="ring", train={"activation_checkpointing": "selective"}),
    "cp, ring, experts": {**layout(cp=2, cp_exchange="ring"), **EXPERTS},
    "cp, loss in chunks": layout(cp=2, train={"chunked_loss": True}),
    "ddp, compiled": layout(dp_replicate=2, train=COMPILED),
    "fsdp, compiled, full recomputation": layout(
        dp_shard=2, train={**COMPILED, "activation_checkpointing": "full", "micro_batch_size": 2}
    ),
    "fsdp, compiled, selective": layout(dp_shard=2, train={**COMPILED, "activation_checkpointing": "selective"}),
    "tp, compiled": layout(tp=2, train=COMPILED),
    "ep": {**layout(ep=2), **EXPERTS},
    "ep, selective": {**layout(ep=2, train={"activation_checkpointing": "selective"}), **EXPERTS},
    "ep, experts choose": {**layout(ep=2), **CHOOSING},
    "tp, experts choose, recomputation": {**layout(tp=2, train={"activation_checkpointing": "full"}), **CHOOSING},
    "cp, experts choose": {**layout(cp=2), **CHOOSING},
    "ep, capacity, two microbatches, recomputation": {
        **layout(ep=2, train={"micro_batch_size": 2, "activation_checkpointing": "full"}),
        **CAPACITY,
    },
    "cp": layout(cp=2),
    "cp, two microbatches, compiled": layout(cp=2, train={**COMPILED, "micro_batch_size": 4}),
    "tp, experts": {**layout(tp=2), **EXPERTS},
    "tp, experts, no sequence or loss parallel, recomputation": {
        **layout(tp=2, sequence_parallel=False, loss_parallel=False, train={"activation_checkpointing": "full"}),
        **CAPACITY,
    },
    "tp, experts, selective, two microbatches": {
        **layout(tp=2, train={"micro_batch_size": 4, "activation_checkpointing": "selective"}),
        **CAPACITY,
    },
    "tp, experts, compiled": {**layout(tp=2, train=COMPILED), **EXPERTS},
    "cp, experts, capacity, recomputation": {
        **layout(cp=2, train={"micro_batch_size": 4, "activation_checkpointing": "full"}),
        **CAPACITY,
    },
    "cp, experts, compiled": {**layout(cp=2, train=COMPILED), **EXPERTS},
    "experts under ddp": {**layout(dp_replicate=2), **EXPERTS},
    "experts under fsdp, compiled": {**layout(dp_shard=2, train=COMPILED), **CAPACITY},
    # On a CPU nothing moves and no launch accepts it, but the policy and all that follows from it are the same.
    "fsdp, cpu offload": layout(dp_shard=2, cpu_offload="all"),
    "hsdp, cpu offload": layout(dp_replicate=2, cpu_offload="all"),
    "fsdp, moments on the host": layout(dp_shard=2, cpu_offload="optimizer"),
    "tp, moments on the host": layout(tp=2, cpu_offload="optimizer"),
    "ddp, zero-1": layout(dp_replicate=2, zero1=True),
    "tp, selective": layout(tp=2, train={"activation_checkpointing": "selective"}),
    "tp, full recomputation": layout(tp=2, train={"activation_checkpointing": "full"}),
}


VARIANTS = usually(
    VARIANTS,
    later=[
        "ddp, compiled", "cp, two microbatches, compiled", "ep",
        "zero-2", "fsdp, each microbatch reduced",  # test_equivalence.py: under HSDP
        "tp, loss in chunks, no sequence or loss parallel", "tp, full recomputation", "tp, moments on the host",
        "cp, ring, experts", "cp, ring, selective", "cp, loss in chunks", "ep, selective", "hsdp, cpu offload",
        "tp, experts, selective, two microbatches", "cp, experts, capacity, recomputation",
        "tp, document mask", "fsdp, tied embeddings", "fsdp, full recomputation", "ddp, full recomputation",
        "fsdp, compiled, selective", "tp, compiled", "cp", "tp, experts", "tp, experts, compiled",
        "cp, experts, compiled", "tp, selective",
        # "cp, ring" and "fsdp, compiled, full recomputation"; compiled and in chunks: trainer/faults/test_faults.py
        "cp, ring, compiled, recomputation, two microbatches", "fsdp, loss in chunks, compiled",
        "fsdp, loss in chunks, tied embeddings",  # "ddp, loss in chunks" and "tp, tied embeddings"
        "tp, experts choose, recomputation",  # experts that choose under ep and cp, recomputed experts under tp
        "experts under fsdp, compiled",  # "fsdp, compiled, full recomputation", "experts under ddp"
    ],
)  # fmt: skip


EIGHT_BIT: Sections = {"model": {"dim": 256, "hidden_dim": 256}, "optim": {"name": "adamw8bit"}}
# Sums of two numbers of eight bits: what a step's gradient differs by is 1/256 of it. Muon rounds its updates to as
# many, and so apart where gradients differ in float32's last bit; AdamW8bit its moments.
ROUNDED: dict[str, Sections] = {
    "fsdp, reduced in bf16": layout(dp_shard=2, reduce_dtype="bf16"),
    "fsdp, each microbatch reduced in bf16": layout(
        dp_shard=2, reduce_dtype="bf16", reduce_every_microbatch=True, train={"micro_batch_size": 2}
    ),
    "fsdp, muon": {**layout(dp_shard=2), "optim": {"name": "muon"}},
    "tp, muon": {**layout(tp=2), "optim": {"name": "muon"}},
    "fsdp, adamw8bit": {**layout(dp_shard=2), **EIGHT_BIT},
    "tp, adamw8bit": {**layout(tp=2), **EIGHT_BIT},
}


def _computed(sections: Sections) -> str:
    return repr({name: sections[name] for name in COMPUTED if name in sections})


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Outcome]]:
    return run_ranks(train_layouts, world_size=2, args=(VARIANTS | ROUNDED, STEPS), deadline_s=480)


@pytest.fixture(scope="module")
def single() -> dict[str, Outcome]:
    """What one process does with the same model and data; by the sections that are not the defaults."""
    alone: dict[str, Outcome] = {}
    for sections in (VARIANTS | ROUNDED).values():
        shared = {name: sections[name] for name in COMPUTED if name in sections}
        if _computed(sections) not in alone:
            alone[_computed(sections)] = train_alone(tiny(train={"steps": STEPS}, **shared), STEPS)
    return alone


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_computes_the_same(
    name: str, single: dict[str, Outcome], two_ranks: list[dict[str, Outcome]]
) -> None:
    compare(single[_computed(VARIANTS[name])], [rank[name] for rank in two_ranks], loss=1e-4, parameter=5e-4)


def test_one_rank_with_its_state_in_host_memory(single: dict[str, Outcome]) -> None:
    layouts = {"all": layout(cpu_offload="all"), "optimizer": layout(cpu_offload="optimizer")}
    (outcomes,) = run_ranks(train_layouts, world_size=1, args=(layouts, STEPS), deadline_s=240)
    for outcome in outcomes.values():
        compare(single["{}"], [outcome], loss=1e-6, parameter=1e-6)


@pytest.mark.parametrize("name", ROUNDED)
def test_a_variant_that_rounds_stays_close(
    name: str, single: dict[str, Outcome], two_ranks: list[dict[str, Outcome]]
) -> None:
    """Adam moves a weight whose gradient is nearly zero by a whole step either way: hence the norms."""
    expected = single[_computed(ROUNDED[name])]
    parameters: dict[str, torch.Tensor] = {}
    for outcome in (rank[name] for rank in two_ranks):
        assert outcome.losses == pytest.approx(expected.losses, rel=1 / 256)
        assert outcome.norms == pytest.approx(expected.norms, rel=1 / 256)
        parameters |= outcome.parameters
    assert parameters.keys() == expected.parameters.keys()
    assert any(not torch.equal(parameters[key], value) for key, value in expected.parameters.items())
    for key, value in expected.parameters.items():
        assert torch.linalg.vector_norm(parameters[key] - value) < 1 / 64 * torch.linalg.vector_norm(value), key
