"""Parallel training is the same to the last bit with its groups recorded as without; each kind leaves its calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from probes.tape.format.writer import COMPLETE
from tests.probes.recorded_world import recorded_world, rows
from tests.probes.small_models import batch, pipeline, train
from tests.processes import run_ranks

KINDS = ("ddp", "fsdp", "hsdp", "tp", "fsdp_tp")


def _training(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in KINDS:
        trained = {}
        for record in (False, True):
            with recorded_world(rank, world_size, folder, f"{kind}-{record}-", record=record) as recorder:
                net = train(kind, recorder, 3)
                trained[record] = [getattr(p, "_local_tensor", p).detach().clone() for p in net.parameters()]
                if kind == "fsdp_tp" and record:
                    found["checkpoint"] = _checkpoint(net, folder)
        found[kind] = {
            "same": all(torch.equal(a, b) for a, b in zip(trained[False], trained[True], strict=True)),
            "rows": rows(recorder.directory, "collectives"),
        }
    outputs = {}
    for record in (False, True):
        with recorded_world(rank, world_size, folder, f"pipeline-{record}-", record=record) as recorder:
            stage, schedule = pipeline()
            for step in range(1, 3):
                with recorder.step(step):
                    first, last = rank == 0, rank == world_size - 1
                    schedule.step(*([batch(step)] if first else []), target=batch(step, 1) if last else None)
            outputs[record] = [p.grad.clone() for p in stage.submod.parameters()]
    found["pipeline"] = {
        "same": all(torch.equal(a, b) for a, b in zip(outputs[False], outputs[True], strict=True)),
        "rows": rows(recorder.directory, "collectives"),
    }
    return found


def _checkpoint(net: torch.nn.Module, folder: str) -> bool:
    """Save, damage, load: whether everything came back."""
    before = [p._local_tensor.clone() for p in net.parameters()]
    path = str(Path(folder) / "checkpoint")
    dcp.save(net.state_dict(), checkpoint_id=path)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter._local_tensor.zero_()
    state = net.state_dict()
    dcp.load(state, checkpoint_id=path)
    net.load_state_dict(state)
    return all(torch.equal(a, p._local_tensor) for a, p in zip(before, net.parameters(), strict=True))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_training, world_size=4, args=(str(tmp_path_factory.mktemp("training")),))


@pytest.mark.parametrize("kind", [*KINDS, "pipeline"])
def test_training_is_the_same_to_the_last_bit(trained: list[dict[str, Any]], kind: str) -> None:
    assert all(values[kind]["same"] for values in trained)


@pytest.mark.parametrize(
    ("kind", "ops"),
    [
        ("ddp", {("world:0-3", "all_reduce", "backward")}),
        ("fsdp", {("world:0-3", "all_gather", "forward"), ("world:0-3", "reduce_scatter", "backward")}),
        ("hsdp", {("dp_shard:0-1", "reduce_scatter", "backward"), ("dp_replicate:0,2", "all_reduce", "backward")}),
        ("tp", {("world:0-3", "all_reduce", "forward"), ("world:0-3", "all_reduce", "backward")}),
        ("fsdp_tp", {("tp:0-1", "all_reduce", "forward"), ("dp_shard:0,2", "all_gather", "backward")}),
        ("pipeline", {("world:0-3", "send", ""), ("world:0-3", "recv", "")}),
    ],
)
def test_each_parallelism_leaves_its_calls(trained: list[dict[str, Any]], kind: str, ops: set[Any]) -> None:
    found = {(row["process_group"], row["op"], row["phase"]) for row in trained[0][kind]["rows"]}
    assert ops <= found
    for values in trained:
        assert [row for row in values[kind]["rows"] if row["state"] != COMPLETE] == []


def test_a_checkpoint_goes_through_the_recorded_groups(trained: list[dict[str, Any]]) -> None:
    assert all(values["checkpoint"] for values in trained)
