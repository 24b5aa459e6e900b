"""What a budget is enough for, the size that it is best spent on, and times corrected by a run's first steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rankscope.cli import app
from tests.factories import empty_run, make_run
from trainer.config.load import ConfigError, load_config
from trainer.layout.resolve import resolve
from trainer.plan.calibration import calibrate, calibrated
from trainer.plan.cost.budget import training_cost
from trainer.plan.cost.compute_optimal import compute_optimal, within_budget
from trainer.plan.expected import Expected, expect
from trainer.plan.hardware import Hardware, parse_hardware
from trainer.plan.manifest import planned
from trainer.presets import config_path


def on(num_gpus: int, *overrides: str, preset: str = "llama-8b") -> tuple[Expected, Hardware]:
    hardware = parse_hardware(gpu="h100", gpu_memory="", gpus_per_node=8, interconnect="nvlink,ib400")
    config = load_config(config_path(preset), [*overrides])
    return expect(config, resolve(config, num_gpus), hardware), hardware


def test_compute_optimal_is_chinchilla_for_the_operations_of_chinchilla() -> None:
    """Hoffmann et al. 2022, table 3: 5.76e23 operations, 67 to 70 billion parameters, 1.4 to 1.5 trillion tokens."""
    best = compute_optimal(5.76e23)
    assert best.num_parameters == pytest.approx(70e9, rel=0.02)
    assert best.num_tokens == pytest.approx(1.4e12, rel=0.02)
    assert compute_optimal(4 * 5.76e23).num_parameters == pytest.approx(2 * best.num_parameters)


def test_a_budget_is_enough_for_the_tokens_that_cost_it() -> None:
    expected, hardware = on(64)
    cost = training_cost(expected, hardware, num_tokens=300 * 10**9, price_per_gpu_hour=2.5)
    budget = within_budget(expected, gpu_hours=1.0001 * cost.gpu_hours, price_per_gpu_hour=2.5)
    assert cost.steps <= budget.steps <= 1.001 * cost.steps
    assert budget.price == pytest.approx(cost.price, rel=0.001)
    assert budget.hours == pytest.approx(cost.hours, rel=0.001)
    assert budget.optimal.num_flops == pytest.approx(budget.num_tokens * expected.flops_per_token)
    assert within_budget(expected, gpu_hours=0, price_per_gpu_hour=None).num_tokens == 0


def test_a_runs_first_steps_correct_the_times_of_another_layout(tmp_path: Path) -> None:
    tried, hardware = on(2, "parallel.dp_shard=2", preset="debug")
    step_ms = 3e3 * tried.step_s  # three times as long as planned
    run = make_run(
        tmp_path, ranks=2, steps=20, step_ms=step_ms, collective_ms=0.01 * step_ms,
        config=tried.config.model_dump(mode="json"),
    )  # fmt: skip
    found = calibrate(run.path, hardware)
    assert found.num_steps == 15
    assert found.factor == pytest.approx(3, rel=0.15)
    large, _ = on(64)
    corrected = calibrated(large, found.factor)
    assert corrected.step_s == pytest.approx(found.factor * large.step_s)
    assert corrected.tokens_per_s == pytest.approx(large.tokens_per_s / found.factor)
    assert corrected.communication_share == pytest.approx(large.communication_share)
    assert corrected.memory == large.memory


def test_a_run_that_cannot_correct_anything_is_one_line(tmp_path: Path) -> None:
    _, hardware = on(8)
    with pytest.raises(ConfigError, match=r"--calibrate .*nothing"):
        calibrate(tmp_path / "nothing", hardware)
    with pytest.raises(ConfigError, match=r"it has no steps after the first 5$"):
        calibrate(empty_run(tmp_path).path, hardware)
    with pytest.raises(ConfigError, match=r"its run\.json has no configuration of a training$"):
        calibrate(make_run(tmp_path / "attached", ranks=1, steps=10).path, hardware)


def test_what_a_run_says_of_its_device_is_printed_as_it_is(tmp_path: Path) -> None:
    tried, _ = on(2, "parallel.dp_shard=2", preset="debug")
    run = make_run(
        tmp_path, ranks=2, steps=20, config=tried.config.model_dump(mode="json"), device_name="a [/] of [red]"
    )
    done = CliRunner().invoke(app, ["plan", "debug", "--gpus", "2", "--no-ladder", "--calibrate", str(run.path)])
    assert done.exit_code == 0, done.output
    assert f"Calibrated by {run.path.name} on a [/] of [red]: a step took" in done.stdout


@pytest.mark.parametrize(
    ("name", "gpu"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA GeForce RTX 4090", "rtx4090"),
     ("NVIDIA L40S", "l40s"), ("a toaster", None), ("", None)],
)  # fmt: skip
def test_a_run_keeps_the_time_that_its_devices_should_take(name: str, gpu: str | None) -> None:
    config = load_config(config_path("llama-8b"))
    kept = planned(config, resolve(config, 64), rank=0, device="cuda", device_name=name)
    expected, _ = on(64)
    if gpu is None:
        assert kept["step_s"] is None
    elif gpu == "h100":
        assert kept["step_s"] == pytest.approx(expected.step_s)
    else:
        assert kept["step_s"] > expected.step_s
    assert planned(config, resolve(config, 64), rank=0, device="cpu", device_name=name)["step_s"] is None


@pytest.mark.parametrize("output", ["text", "json"])
def test_the_command_prints_the_budget(output: str) -> None:
    options = ["--gpus", "64", "--gpu-hours", "50000", "--price-per-gpu-hour", "2", "--no-ladder", "--format", output]
    done = CliRunner().invoke(app, ["plan", "llama-8b", *options])
    assert done.exit_code == 0, done.output
    if output == "json":
        budget = json.loads(done.stdout)["budget"]
        assert budget["price"] == 100_000
        assert budget["optimal"]["num_tokens"] == pytest.approx(20 * budget["optimal"]["num_parameters"])
    else:
        assert "Budget of 50,000 GPU-hours, price 100,000:" in done.stdout
        assert "(20 a parameter, Hoffmann et al. 2022); this model has 8.03 G" in done.stdout
