"""Memory of real ranks against its plan, by the allocator's events: FSDP with microbatches, compressed gradients,
context parallel, experts; and what tensor parallel keeps."""

from __future__ import annotations

import weakref
from statistics import mean
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.accuracy.plan_ranks import RankMeasured, measured_rank
from tests.depth import later, usually
from tests.processes import run_ranks
from tests.trainer.plan.test_plan import EXPERTS, MODEL, settings
from tests.waiting import wait_for
from trainer.config.load import load_config
from trainer.layout.resolve import resolve
from trainer.plan.footprint.memory import rank_memory
from trainer.training.build import build

pytestmark = pytest.mark.timeout(300)

CPU = torch.device("cpu")

FULL = {"train": {"activation_checkpointing": "full"}}
CP = {"parallel": {"dp_shard": 1, "cp": 2}}
TP = {"parallel": {"dp_shard": 1, "tp": 2}}
REPLICATED = {"parallel": {"dp_shard": 1, "tp": 2, "sequence_parallel": False}}
DDP = {"dp_replicate": 2, "dp_shard": 1}
FSDP = {"parallel": {"dp_shard": 2}}
ONE_A_PASS = {"train": {"micro_batch_size": 1}}
MEASURED: dict[str, dict[str, dict[str, Any]]] = {
    "FSDP, 2 microbatches": {**FSDP, **ONE_A_PASS},
    "FSDP, 2 microbatches, each reduced": {"parallel": {"dp_shard": 2, "reduce_every_microbatch": True}, **ONE_A_PASS},
    "FSDP, bf16": {**FSDP, "train": {"precision": "bf16"}},
    "DDP, int8": {"parallel": {**DDP, "gradient_compression": "int8"}},
    "DDP, top-k": {"parallel": {**DDP, "gradient_compression": "topk", "topk_ratio": 0.01}},
    "DDP, bf16": {"parallel": {**DDP, "gradient_compression": "bf16"}},
    "context parallel": CP,
    "ring": {"parallel": {**CP["parallel"], "cp_exchange": "ring"}},
    "context parallel, grouped queries": {**CP, "model": {**MODEL, "num_kv_heads": 2}},
    "context parallel, recompute all": {**CP, **FULL},
}


MEASURED = usually(
    MEASURED,  # each of the two in test_plan.py, without the other's exchange
    later=["context parallel, grouped queries", "context parallel, recompute all"],
)


def measured(rank: int, world_size: int, repeats: int) -> dict[str, RankMeasured]:
    found = {}
    for name, sections in MEASURED.items():
        found[name] = measured_rank(settings(sections), world_size, repeats=repeats)
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, RankMeasured]]:
    return run_ranks(measured, world_size=2, args=(1,))


@pytest.mark.parametrize("name", MEASURED)
def test_a_rank_needs_no_less_than_is_planned(name: str, ranks: list[dict[str, RankMeasured]]) -> None:
    """gloo's threads may hold a buffer for a moment longer: how much more it is, is a trial."""
    config = settings(MEASURED[name])
    need = rank_memory(config, resolve(config, 2), pp_rank=0, device="cpu")
    real = min((rank[name] for rank in ranks), key=lambda rank: rank.peak)  # they need the same
    assert need.parameters == real.parameters
    assert need.optimizer == pytest.approx(real.optimizer, rel=0.001)
    assert need.peak * 0.95 <= real.peak


EP_FSDP = {"parallel": {"dp_shard": 2, "ep": 2}, "model": EXPERTS, **FULL}


def of_experts(rank: int, world_size: int, repeats: int) -> RankMeasured:
    return measured_rank(settings(EP_FSDP), world_size, repeats=repeats)


@later("experts and FSDP apart: trainer/plan/test_plan.py and the test above; beside it in tests/trials/trainer")
def test_experts_sharded_over_fewer_ranks_are_gathered_and_reduced_separately() -> None:
    config = settings(EP_FSDP)
    need = rank_memory(config, resolve(config, 4), pp_rank=0, device="cpu")
    ranks = run_ranks(of_experts, world_size=4, args=(1,))
    assert {real.parameters for real in ranks} == {need.parameters}
    assert need.optimizer == pytest.approx(ranks[0].optimizer, rel=0.001)
    # The plan gives each rank the same number of tokens; a router gives one more than another.
    assert need.peak * 0.95 <= mean(real.peak for real in ranks)


def inputs_kept(rank: int, world_size: int) -> dict[bool, list[tuple[int, bool]]]:
    """Of each recomputed block, by whether the residuals are split: the bytes of its input, and whether that was still
    there after forward. It is not once what forward kept was dropped."""
    found = {}
    for is_split in (True, False):
        training = build(settings({**(TP if is_split else REPLICATED), **FULL}), resolve(settings(TP), 2), CPU)
        (part,), inputs = training.parts, []

        def remember(block: object, args: tuple[torch.Tensor, ...], kept: list[Any] = inputs) -> None:
            kept.append((args[0].numel() * args[0].element_size(), weakref.ref(args[0])))

        for block in part.module.blocks.values():
            block.register_forward_pre_hook(remember)
        logits = part.forward_module(training.batch(0).inputs)
        is_there = [reference() is not None for _, reference in inputs]
        del logits
        # gloo's threads may hold what was sent for a moment longer.
        wait_for(lambda kept=inputs: all(reference() is None for _, reference in kept), "input of a block to be freed")
        found[is_split] = [(size, was_there) for (size, _), was_there in zip(inputs, is_there, strict=True)]
        training.close()
        dist.barrier()
    return found


def test_tensor_parallel_ranks_keep_a_part_of_the_input_of_a_recomputed_block_each() -> None:
    """Partitioned activations: an input is (batch, seq, dim) in float32, over the ranks."""
    config = settings(TP)
    whole = 4 * config.train.global_batch_size * config.data.seq_len * config.model.dim
    for kept in run_ranks(inputs_kept, world_size=2):
        assert kept[True] == [(whole // 2, True)] * config.model.num_layers
        assert kept[False] == [(whole, True)] * config.model.num_layers


def test_what_the_allocator_counts_is_the_peak_without_the_context_of_the_driver() -> None:
    """On an H200 the allocator gave out 3,779 MiB at the most where this plan's peak is 4,648 MiB with its context."""
    sizes = ["model.dim=1024", "model.num_layers=8", "data.seq_len=512", "train.global_batch_size=8"]
    config = load_config(None, [*sizes, "train.device=cuda", "parallel.dp_shard=-1", "parallel.dp_replicate=1"])
    need = rank_memory(config, resolve(config, 1), pp_rank=0, device="cuda")
    assert need.allocated == pytest.approx(3_779 * 2**20, rel=0.1)
    assert need.allocated < need.peak
