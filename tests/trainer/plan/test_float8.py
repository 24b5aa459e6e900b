"""Plans of products in fp8: which layers, at which rate, on which devices, and what is said of the rest."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from rankscope.cli import app
from tests.trainer.plan.test_plan import on
from trainer.config.load import load_config
from trainer.layout.resolve import resolve
from trainer.model.float8 import convert_to_float8, is_converted
from trainer.model.transformer import Transformer
from trainer.plan.float8 import float8_products
from trainer.plan.hardware import parse_hardware
from trainer.plan.strategies import strategies
from trainer.presets import config_path

FLOAT8 = "train.float8=tensorwise"


@pytest.mark.parametrize(
    ("overrides", "tp"),
    [
        ([], 1),
        ([], 4),
        (["model.num_heads=16", "model.num_kv_heads=2"], 2),
        (["model.hidden_dim=360"], 1),
        (["model.num_experts=4"], 2),
    ],
)
def test_products_in_fp8_are_those_of_the_layers_that_torchao_converts(overrides: list[str], tp: int) -> None:
    """Of two key heads of 8 numbers each of 2 ranks has 8 rows, and 360 is no multiple of 16 either."""
    mesh = [f"parallel.tp={tp}", "parallel.dp_shard=1", "model.dim=128", FLOAT8]
    config = load_config(None, [*mesh, *overrides])
    with torch.device("meta"):
        model = Transformer(config.model)
    convert_to_float8(model, config.train, tp=tp)
    weights = [layer.get_parameter("weight") for layer in model.modules() if is_converted(layer)]
    machine = parse_hardware(gpu="h100", gpu_memory="", gpus_per_node=8, interconnect="")
    found = float8_products(config, resolve(config, tp), machine)
    assert found is not None
    assert found.flops_per_token == 6 * sum(weight.numel() for weight in weights)
    kept = {name.rpartition(".")[2] for name, layer in model.blocks["0"].named_modules()
            if isinstance(layer, torch.nn.Linear) and not is_converted(layer)}  # fmt: skip
    assert kept - {"router"} == {*found.others} - {"attention's scores", "head", "routers", "experts"}


def test_products_in_fp8_are_planned_at_their_rate_where_it_is_known() -> None:
    plain, fast = on(64)[0], on(64, FLOAT8)[0]
    assert fast.float8 is not None
    share = fast.float8.flops_per_token / fast.flops_per_token
    assert share == pytest.approx(6 * 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 4096 * 14336) / fast.flops_per_token)
    assert fast.compute_s / plain.compute_s == pytest.approx(1 - share + share * 989.5 / 1979)
    assert fast.mfu > plain.mfu
    assert fast.ridge_flops_per_byte == pytest.approx(2 * plain.ridge_flops_per_byte, rel=0.001)
    for overrides, gpu in (([FLOAT8], "a100"), (["train.float8=rowwise"], "rtx4090"),
                           ([FLOAT8, "train.float8_emulated=true"], "h100")):  # fmt: skip
        assert on(64, *overrides, gpu=gpu)[0] == replace(
            on(64, gpu=gpu)[0], config=load_config(config_path("llama-8b"), overrides)
        )


def test_gathers_in_fp8_are_half_of_those_in_bf16_and_leave_the_other_layouts_possible() -> None:
    gathers = "parallel.float8_all_gather=true"
    plain, fast = (on(64, FLOAT8, *more)[0] for more in ([], [gathers]))
    sent = [next(group.call for group in each.groups if group.call.op == "all_gather") for each in (plain, fast)]
    matrices = 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    assert sent[0].num_bytes - sent[1].num_bytes == 2 * fast.plan.num_microbatches * matrices // 64
    # The block that computes and the next one; embedding and head stay in bf16.
    assert plain.memory.gathered - fast.memory.gathered == 2 * matrices // 32
    machine = parse_hardware(gpu="h100", gpu_memory="", gpus_per_node=8, interconnect="")
    ladders = [strategies(load_config(config_path("llama-8b"), [FLOAT8, *more]), machine, 64)
               for more in ([], [gathers])]  # fmt: skip
    assert [each.name for each in ladders[0].tried] == [each.name for each in ladders[1].tried]
    assert ladders[0].impossible == ladders[1].impossible


@pytest.mark.parametrize(("gpu", "is_said"), [("h100", True), ("a100", False)])
def test_the_plan_names_what_is_in_fp8(gpu: str, is_said: bool) -> None:
    command = ["plan", "llama-8b", "--gpus", "64", "--gpu", gpu, "--set", FLOAT8, "--no-ladder"]
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 0, told.output
    line = "fp8 72% of the operations, at a peak of 1.98 PFLOP/s; attention's scores and head in bf16."
    assert (line in " ".join(told.output.split())) == is_said, told.output
    found = json.loads(CliRunner().invoke(app, [*command, "--format", "json"]).output)["float8"]
    assert (found is not None) == is_said
    assert not is_said or (found["peak_flops_per_s"], found["others"]) == (1979e12, ["attention's scores", "head"])
