"""A flip in one rank's gradients: the step is computed again, and the run is bit for bit the run without the flip."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from probes.collectives.wrapped import install
from probes.guard.decisions import RunStopped
from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from tests.depth import later
from tests.processes import end_group, run_ranks
from tests.trainer import training_runs
from tests.trainer.training_runs import assert_same_bits, run_loop, small, with_steps
from trainer.rank.loop import Session

STEPS, STRUCK = 20, 15
TENSOR = "blocks.1.mlp.up.weight"


def _wrong_lane(session: Session, rank: int, steps: list[int]) -> None:
    """Every eighth element of one rank's gradient is ten million times itself before it is reduced."""
    parts = [module for part in session.training.modules for name, module in part.named_modules()
             if name == TENSOR.rpartition(".")[0]]  # fmt: skip
    left = list(steps)

    def before_forward(module: Any, inputs: Any) -> None:
        def change(grad: torch.Tensor) -> torch.Tensor:
            handle.remove()
            changed = grad.clone()
            local = changed.to_local() if isinstance(changed, DTensor) else changed
            local.view(-1)[::8] *= 1e7
            return changed

        if session.training.rank == rank and session.recorder.step_number in left and torch.is_grad_enabled():
            left.remove(session.recorder.step_number)
            handle = module.weight.register_hook(change)

    parts[0].register_forward_pre_hook(before_forward)


def _ranks(rank: int, world_size: int, folder: Path, parallel: dict[str, int]) -> dict[str, Any]:
    build = training_runs.build

    def recorded(*arguments: Any, recorder: Any) -> Any:
        install(recorder)  # before any group is made, as the worker does
        end_group()
        store = dist.FileStore(str(folder / f"store-{next(numbers)}"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        return build(*arguments, recorder=recorder)

    numbers = itertools.count()

    training_runs.build = recorded  # type: ignore[assignment]
    config = with_steps(small(parallel=parallel, checkpoint={"memory_survives": False}), STEPS)

    def run(name: str, steps: list[int], faults: list[str]) -> Any:
        def change(session: Session) -> None:
            _wrong_lane(session, 1, steps)

        return run_loop(config, folder / name, rank=rank, world_size=world_size, change=change, faults=faults)

    whole = run("whole", [], [])
    lane = run("lane", [STRUCK], [])
    flipped = run("flipped", [], [f"bit_flip_gradient@step={STRUCK},rank=1,tensor={TENSOR}"])
    assert_same_bits(lane, whole)
    assert_same_bits(flipped, whole)
    with pytest.raises(RunStopped, match=r"corrupted 2 times on .* rank 1"):
        run("twice", [STRUCK, STRUCK + 2], [])
    return {"lane": lane.tried, "flipped": flipped.tried, "whole": whole.tried}


def _events(folder: Path, kind: str) -> list[dict[str, Any]]:
    events, _, _ = read_events(RunDir(folder).rank_dir(0, 0) / "events.jsonl")
    return [event for event in events if event["kind"] == kind]


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"dp_replicate": 2, "dp_shard": 1}, id="ddp", marks=later("under FSDP, beside it")),
        pytest.param({"dp_shard": 2}, id="fsdp"),
    ],
)
def test_flipped_gradients_are_computed_again(parallel: dict[str, int], tmp_path: Path) -> None:
    """A lane of a device that is off, and one flipped bit, which makes a number whose square no float32 holds."""
    steps = [(step, step - 1) for step in range(1, STEPS + 1)]
    again = [*steps[:STRUCK], (STRUCK, STRUCK - 1), *steps[STRUCK:]]
    for found in run_ranks(_ranks, world_size=2, args=(tmp_path, parallel)):
        assert found["whole"] == steps, "no false alarm"
        assert found["lane"] == again, "the same batch twice, and nothing else"
        assert found["flipped"] == again
    for name in ("lane", "flipped"):
        (told,) = _events(tmp_path / name, "gradient_outlier")
        assert (told["step"], told["outlier_rank"], told["came_back"]) == (STRUCK, 1, False)
        assert told["peak"] > 10 * told["peak_again"]
        assert not _events(tmp_path / name, "rollback")
