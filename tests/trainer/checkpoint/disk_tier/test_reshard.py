"""A checkpoint on another mesh: fsdp 4 -> fsdp 2 x tp 2 -> ddp 2 with ZeRO-1 -> one process, the same bits, optimizer
state included; and experts, which are divided in other ways than the rest."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.depth import later
from tests.processes import run_ranks
from tests.trainer.training_runs import run_loop, small, with_steps
from trainer.checkpoint.state import training_tensors
from trainer.training.rank_training import Training


def _whole_state(
    rank: int,
    world_size: int,
    folder: Path,
    parallel: dict[str, Any],
    steps: int,
    attempt: int,
    model: dict[str, Any] | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The whole tensors of the state that a run began with, and of the one that it ended with."""
    found: list[Training] = []
    begun: dict[str, torch.Tensor] = {}

    def change(session: Any) -> None:
        found.append(session.training)
        start = session.recovery.start

        def starting() -> Any:
            position = start()
            begun.update(_whole(session.training))
            return position

        session.recovery.start = starting

    checkpoint = {"memory_survives": False}
    config = with_steps(small(parallel=parallel, checkpoint=checkpoint, model=model or {}), steps)
    run_loop(config, folder, rank=rank, world_size=world_size, attempt=attempt, change=change)
    return begun, _whole(found[0])


def _whole(training: Training) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in training_tensors(training).items()
        if not name.startswith("compression.")
    }


def test_every_bit_survives_a_change_of_mesh(tmp_path: Path) -> None:
    first = run_ranks(_whole_state, world_size=4, args=(tmp_path, {"dp_shard": 4}, 4, 0))
    second = run_ranks(_whole_state, world_size=4, args=(tmp_path, {"dp_shard": 2, "tp": 2}, 6, 1))
    # What PowerSGD keeps is in no checkpoint before, and of no use afterwards.
    shared = {"dp_replicate": 2, "dp_shard": 1, "zero1": True, "gradient_compression": "powersgd", "powersgd_start": 2}
    zero1 = run_ranks(_whole_state, world_size=2, args=(tmp_path, shared, 7, 2))
    third = _whole_state(0, 1, tmp_path, {}, 8, 3)
    # Each replica has a share of the optimizer's state.
    own = [{name for name in after if name.startswith("optimizer.")} for _, after in zero1]
    assert own[0]
    assert own[1]
    assert own[0].isdisjoint(own[1])
    begun, ended = (zero1[0][when] | zero1[1][when] for when in (0, 1))
    for before, after in ((first[0][1], second[0][0]), (second[0][1], begun), (ended, third[0])):
        assert before.keys() == after.keys()
        assert {name.rsplit(".", 1)[1] for name in after if name.startswith("optimizer.")} == {
            "exp_avg", "exp_avg_sq", "step",
        }  # fmt: skip
        for name, value in before.items():
            assert torch.equal(value, after[name]), name
    assert not torch.equal(third[0]["model.embed.weight"], third[1]["model.embed.weight"]), "it trained on"


@later("a change of mesh: the test above; experts: trainer/launcher/test_resume.py (ep x tp)")
def test_every_bit_of_experts_survives_a_change_of_mesh(tmp_path: Path) -> None:
    meshes = ({"ep": 2, "cp": 2}, {"ep": 2, "tp": 2}, {"dp_replicate": 2, "tp": 2}, {"dp_shard": 2, "cp": 2})
    model, found = {"num_experts": 4}, []
    for number, mesh in enumerate(meshes):
        steps = (tmp_path, {"dp_shard": 1, **mesh}, 2 * number + 2, number, model)
        found.append(run_ranks(_whole_state, world_size=4, args=steps)[0])
    found.append(_whole_state(0, 1, tmp_path, {}, 2 * len(meshes) + 2, len(meshes), model))
    for (_, before), (after, ended) in itertools.pairwise(found):
        assert before.keys() == after.keys()
        assert "optimizer.blocks.1.mlp.experts.down.exp_avg_sq" in after
        for name, value in before.items():
            assert torch.equal(value, after[name]), name
        assert not torch.equal(after["model.blocks.1.mlp.experts.up"], ended["model.blocks.1.mlp.experts.up"])
