"""Gradients by parameter: names, numbers, and the ones that went wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from probes.gradients import GradientProbe, clean_name
from probes.recorder import NullRecorder
from probes.tape_recorder import TapeRecorder
from tests.probes.recorded_world import recorded_world, rows
from tests.probes.small_models import batch, parallel_net
from tests.processes import run_ranks


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TapeRecorder:
    monkeypatch.setenv("RANKSCOPE_FAIL_LOUD", "1")
    return TapeRecorder(tmp_path, rank=0, attempt=0)


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model(torch.ones(5, 4)).square().sum().backward()
    return model


def test_norm_and_largest_value(recorder: TapeRecorder, tmp_path: Path) -> None:
    model = _model()
    GradientProbe(recorder, model.named_parameters(), interval=2).after_backward(4)
    found = {row["parameter"]: row for row in rows(tmp_path, "gradients")}
    assert list(found) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert found[name]["norm"] == pytest.approx(parameter.grad.norm().item(), rel=1e-6)
        assert found[name]["max_abs"] == parameter.grad.abs().max().item()
        assert (found[name]["step"], found[name]["nonfinite_count"]) == (4, 0)


def test_only_at_the_interval(recorder: TapeRecorder, tmp_path: Path) -> None:
    model = _model()
    probe = GradientProbe(recorder, model.named_parameters(), interval=3)
    for step in range(1, 7):
        probe.after_backward(step)
    assert [row["step"] for row in rows(tmp_path, "gradients")] == [3] * 4 + [6] * 4
    never = GradientProbe(recorder, model.named_parameters(), interval=0)
    never.after_backward(0)
    assert len(rows(tmp_path, "gradients")) == 8


def test_examine_names_what_is_not_finite(recorder: TapeRecorder, tmp_path: Path) -> None:
    model = _model()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients["1.weight"][0, 0] = math.inf
    gradients["0.bias"][:2] = math.nan
    probe = GradientProbe(recorder, model.named_parameters(), interval=0)
    assert probe.examine(9) == [("0.bias", 2), ("1.weight", 1)]
    found = {row["parameter"]: row for row in rows(tmp_path, "gradients")}
    assert math.isnan(found["0.bias"]["norm"])
    assert found["1.weight"]["max_abs"] == math.inf
    assert found["1.bias"]["nonfinite_count"] == 0


def test_a_norm_that_overflows_is_not_a_nan(recorder: TapeRecorder) -> None:
    model = _model()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3e38)
    assert GradientProbe(recorder, model.named_parameters(), interval=0).examine(1) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_and_missing_gradients(recorder: TapeRecorder, tmp_path: Path, dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4).to(dtype)
    frozen = nn.Linear(2, 2)
    model(torch.ones(2, 4, dtype=dtype)).sum().backward()
    parameters = [*model.named_parameters(), *frozen.named_parameters(prefix="frozen")]
    assert GradientProbe(recorder, parameters, interval=0).examine(1) == []
    found = rows(tmp_path, "gradients")
    assert [row["parameter"] for row in found] == ["weight", "bias"]
    assert found[1]["norm"] == pytest.approx(4.0)


def test_a_disabled_recorder_reads_nothing() -> None:
    probe = GradientProbe(NullRecorder(), _model().named_parameters(), interval=1)
    probe.after_backward(1)
    assert probe.examine(1) == []


@pytest.mark.parametrize(
    ("wrapped", "clean"),
    [
        ("module.blocks.0.weight", "blocks.0.weight"),
        ("_orig_mod.module.blocks.0._checkpoint_wrapped_module.up.weight", "blocks.0.up.weight"),
        ("_fsdp_wrapped_module.blocks.1._fsdp_wrapped_module.up", "blocks.1.up"),
        ("blocks.module.weight", "blocks.module.weight"),  # the user's own name
    ],
)
def test_names_are_those_of_the_model(wrapped: str, clean: str) -> None:
    assert clean_name(wrapped) == clean


def _shards(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with recorded_world(rank, world_size, folder) as recorder:
        forward, net = parallel_net("fsdp")
        forward(batch(1)).square().mean().backward()
        before = len(rows(recorder.directory, "collectives"))
        probe = GradientProbe(recorder, forward.named_parameters(), interval=1)
        probe.after_backward(1)
        totals = [probe.norms()]
        if rank == 1:
            net.blocks[0].up.bias.grad._local_tensor[0] = math.nan
        totals.append(probe.norms())
        found = probe.examine(2)
        calls = len(rows(recorder.directory, "collectives")) - before
    finite = [math.isfinite(total["2 of 0,1"]) for total in totals]
    return {"found": found, "calls": calls, "rows": rows(recorder.directory, "gradients"), "finite": finite}


def test_each_rank_looks_at_its_own_shard(tmp_path: Path) -> None:
    first, second = run_ranks(_shards, world_size=2, args=(str(tmp_path),))
    assert (first["found"], second["found"]) == ([], [("blocks.0.up.bias", 1)])
    assert first["calls"] == second["calls"] == 0
    assert (first["finite"], second["finite"]) == ([True, True], [True, False])
    norms = [
        {row["parameter"]: row["norm"] for row in values["rows"] if row["step"] == 1} for values in (first, second)
    ]
    assert set(norms[0]) == set(norms[1])
    assert norms[0] != norms[1]
