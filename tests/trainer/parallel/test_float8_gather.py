"""FSDP's gathers in fp8, emulated: the bits of products that are rounded after the gather, in each layout; what is
gathered, against the plan; that parameters stay plain memory; and what is refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.depth import tried, usually
from tests.processes import run_ranks
from tests.trainer.layouts import Outcome, tiny, train_layouts
from tests.trainer.training_runs import RunResult, run_loop, small
from trainer.config.load import ConfigError
from trainer.layout.resolve import resolve
from trainer.plan.footprint.weights import rank_units
from trainer.plan.traffic import rank_traffic
from trainer.training.build import build

pytestmark = pytest.mark.timeout(300)

STEPS = tried(2, nightly=4)
Sections = dict[str, dict[str, Any]]


def layout(gathered: bool, train: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **parallel: Any
           ) -> Sections:  # fmt: skip
    return {
        "model": model or {},
        "parallel": {"float8_all_gather": gathered, **parallel},
        "train": {"float8": "tensorwise", "float8_emulated": True, "steps": STEPS, **(train or {})},
    }


COMPILED = {"compile": True, "compile_backend": "aot_eager"}
TWO: dict[str, dict[str, Any]] = {
    "fsdp": {"dp_shard": 2},
    "parameters kept, microbatches": {
        "dp_shard": 2, "reshard_after_forward": False, "train": {"micro_batch_size": 2},
    },
    "recomputation": {"dp_shard": 2, "prefetch_blocks": 1, "train": {"activation_checkpointing": "full"}},
    "selective": {"dp_shard": 2, "train": {"activation_checkpointing": "selective"}},
    "compiled": {"dp_shard": 2, "train": COMPILED},
    "cp": {"dp_shard": 1, "cp": 2},
    "experts": {"dp_shard": 1, "ep": 2, "model": {"num_experts": 4, "expert_dim": 64}},
    "bf16": {"dp_shard": 2, "train": {"precision": "bf16"}},
}  # fmt: skip
TWO = usually(TWO, later=["compiled", "selective", "parameters kept, microbatches"])
FOUR: dict[str, dict[str, Any]] = {
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "fsdp x tp": {"dp_shard": 2, "tp": 2},
    "pp x fsdp": {"dp_shard": 2, "pp": 2, "train": {"micro_batch_size": 2}},
}
FOUR = usually(FOUR, later=FOUR)  # FSDP alone, three ranks and experts: the layouts beside them
UNEVEN = {"model": {"dim": 96, "hidden_dim": 192, "num_heads": 6, "num_kv_heads": 2}, "train": {"global_batch_size": 6}}
"""Keys and values have 32 rows, which three ranks cannot share evenly."""
THREE: dict[str, dict[str, Any]] = {"three ranks": {"dp_shard": 3, **UNEVEN}}


WORLDS = {2: TWO, 3: THREE, 4: FOUR}


@cache
def trained(world_size: int) -> list[dict[str, Outcome]]:
    """What each rank computed in the layouts of so many, without these gathers and with them."""
    both = {f"{name}, {gathered}": layout(gathered, **each) for name, each in WORLDS[world_size].items()
            for gathered in (False, True)}  # fmt: skip
    return run_ranks(train_layouts, world_size=world_size, args=(both, STEPS), deadline_s=280)


@pytest.mark.parametrize(
    ("name", "world_size"), [(name, size) for size, layouts in WORLDS.items() for name in layouts if name != "bf16"]
)
def test_it_computes_the_same_bits(name: str, world_size: int) -> None:
    for rank in trained(world_size):
        after, before = rank[f"{name}, False"], rank[f"{name}, True"]
        assert before.losses == after.losses
        assert before.norms == after.norms
        assert before.validation_loss == after.validation_loss
        for parameter, value in after.parameters.items():
            assert torch.equal(before.parameters[parameter], value), parameter


def test_in_bf16_numbers_are_rounded_once_less() -> None:
    """Otherwise they are rounded to bf16 for the gather, and that to fp8; the bound is that of layouts in fp8."""
    for rank in trained(2):
        after, before = rank["bf16, False"], rank["bf16, True"]
        assert before.losses != after.losses
        assert before.losses == pytest.approx(after.losses, rel=0.01)


def gathered_bytes(rank: int, world_size: int, sections: Sections) -> tuple[list[int], list[str]]:
    """Bytes of each block's parameters but experts in its forward, and the types of the sharded ones after it."""
    config = tiny(**sections)
    training = build(config, resolve(config, world_size), torch.device("cpu"))
    seen: list[int] = []

    def count(block: nn.Module, _: Any) -> None:
        gathered = [value for name, value in block.named_parameters() if "experts" not in name]
        seen.append(sum(getattr(value, "_data", value).nbytes for value in gathered))

    (module,) = training.modules
    for block in module.blocks.values():
        block.register_forward_pre_hook(count)
    training.forward_backward(training.batch(0))
    kinds = {type(value._local_tensor) for value in module.parameters()}
    training.close()
    return seen, sorted(kind.__name__ for kind in kinds)


@pytest.mark.parametrize(
    ("each", "world_size"), [(TWO["fsdp"], 2), (TWO["bf16"], 2), (THREE["three ranks"], 3), (TWO["experts"], 2)]
)
def test_what_is_gathered_is_planned_and_parameters_stay_plain(each: dict[str, Any], world_size: int) -> None:
    sections = layout(True, **each)
    config = tiny(**sections)
    blocks = {unit.layer: unit for unit in reversed(rank_units(config, resolve(config, world_size), 0))}
    width = 2 if config.train.precision == "bf16" else 4
    planned = [unit.gathered_bytes(width) for layer, unit in sorted((k, u) for k, u in blocks.items() if k is not None)]
    for seen, kinds in run_ranks(gathered_bytes, world_size=world_size, args=(sections,)):
        assert kinds == ["Tensor"]
        assert seen == planned


def resumed(rank: int, world_size: int, folder: str) -> dict[str, RunResult]:
    def run(name: str, steps: int, attempt: int = 0, gathered: bool = True) -> RunResult:
        sections = layout(gathered, dp_shard=2, train={"steps": steps})
        config = small(**sections, checkpoint={"memory_survives": False, "memory_interval": 2})
        return run_loop(config, Path(folder) / name, rank=rank, world_size=world_size, attempt=attempt)

    found = {"straight": run("straight", 5)}
    for name, gathered in (("in fp8", True), ("otherwise", False)):
        run(name, 3)
        found[name] = run(name, 5, attempt=1, gathered=gathered)
    return found


def test_a_run_goes_on_from_its_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    """Also without these gathers: nothing of them is in a checkpoint."""
    for rank in run_ranks(resumed, world_size=2, args=(str(tmp_path),)):
        straight = rank.pop("straight")
        assert straight.losses.keys() == {1, 2, 3, 4, 5}
        for name, again in rank.items():
            assert again.start[0] == straight.start[0], name
            assert again.losses == {step: straight.losses[step] for step in (4, 5)}, name
            assert again.tensors.keys() == straight.tensors.keys()
            assert all(torch.equal(value, straight.tensors[key]) for key, value in again.tensors.items()), name


def test_a_quarter_of_the_bytes_of_its_matrices_is_sent() -> None:
    def sent(gathered: bool) -> int:
        config = tiny(**layout(gathered, dp_shard=2))
        (call,) = (call for call in rank_traffic(config, resolve(config, 2), pp_rank=0) if call.op == "all_gather")
        assert call.what == ("parameters in fp8" if gathered else "parameters")
        return call.num_bytes

    matrices = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
    assert sent(False) - sent(True) == 2 * 3 * matrices // 2, "gathered twice, three bytes less for a number, of a half"


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (layout(True, dp_shard=2, train={"float8": "none", "float8_emulated": False}), "not 'none'"),
        (layout(True, dp_shard=2, train={"float8": "rowwise"}), "needs train.float8 = 'tensorwise', not 'rowwise'"),
        (layout(True, dp_replicate=2, dp_shard=1), "needs FSDP"),
        (layout(True, dp_shard=2, cpu_offload="all"), "not with parallel.cpu_offload = 'all'"),
    ],
)
def test_what_does_not_go_with_it_is_refused(sections: Sections, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(tiny(**sections), 2)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
