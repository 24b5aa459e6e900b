"""Layouts that are tried, shared links, devices of a user's own table, and what would fit where nothing does."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rankscope.cli import app
from trainer.config.config import Config
from trainer.config.load import ConfigError, load_config
from trainer.layout.resolve import resolve
from trainer.plan.anti_patterns import anti_patterns
from trainer.plan.expected import expect
from trainer.plan.hardware import Hardware, named_hardware, parse_hardware
from trainer.plan.strategies import strategies
from trainer.plan.text import render
from trainer.presets import config_path

LLAMA_70B = {
    "model": {"vocab_size": 32000, "dim": 8192, "num_layers": 80, "num_heads": 64, "num_kv_heads": 8,
              "hidden_dim": 28672, "max_seq_len": 4096},
    "data": {"seq_len": 4096},
    "train": {"precision": "bf16", "global_batch_size": 512},
}  # fmt: skip


def machine(gpu: str = "h100", interconnect: str = "nvlink,ib400", gpus_per_node: int = 8, **more: str) -> Hardware:
    return parse_hardware(
        gpu=gpu, gpu_memory=more.get("gpu_memory", ""), gpus_per_node=gpus_per_node, interconnect=interconnect,
        host_memory=more.get("host_memory", ""),
    )  # fmt: skip


def test_a_large_model_is_advised_to_reduce_each_sequence_before_it_is_cut() -> None:
    found = strategies(Config.model_validate(LLAMA_70B), machine("a100"), 64)
    assert found.simplest
    assert "parallel.reduce_every_microbatch=true" in found.simplest.overrides
    assert "parallel.tp=1" in found.simplest.overrides
    cut = next(each for each in found.tried if each.name.startswith("tp 8"))
    assert cut.expected.fits
    assert found.simplest.expected.step_s < cut.expected.step_s


def test_smaller_state_and_fp8_are_tried_where_the_device_has_them() -> None:
    config = load_config(config_path("llama-8b"))
    names = {gpu: [each.name for each in strategies(config, machine(gpu), 16).tried] for gpu in ("h100", "a100")}
    for listed in names.values():
        assert any("8-bit AdamW" in name for name in listed)
        assert any("all state on the host" in name for name in listed)
    assert [any("fp8" in name for name in listed) for listed in names.values()] == [True, False]
    eight_bit = load_config(config_path("llama-8b"), ["optim.name=adamw8bit"])
    assert not any("8-bit AdamW" in each.name for each in strategies(eight_bit, machine(), 16).tried)


GPT_3 = {
    "model": {"vocab_size": 51200, "dim": 12288, "num_layers": 96, "num_heads": 96, "hidden_dim": 32768,
              "max_seq_len": 2048},
    "data": {"seq_len": 2048},
    "parallel": {"tp": 8, "pp": 8, "dp_shard": 1, "schedule": "interleaved_1f1b", "stages_per_rank": 3},
    "train": {"precision": "bf16", "global_batch_size": 64, "micro_batch_size": 1,
              "activation_checkpointing": "selective"},
}  # fmt: skip


def test_the_own_layout_is_compared_with_the_others() -> None:
    config = Config.model_validate(GPT_3)
    found = strategies(config, machine("a100"), 64)
    assert found.fastest
    assert (found.fastest.name, found.fastest.overrides) == ("as configured", ())
    assert found.fastest.expected.step_s == expect(config, resolve(config, 64), machine("a100")).step_s
    # Of the own stages, nothing is left in the way of other pipelines.
    assert not any("stages_per_rank" in why for _, why in found.impossible)
    text = printed(config, 64, 110, machine("a100"))
    assert "\nThe fastest: as configured\n" in text
    plain = strategies(load_config(config_path("llama-8b")), machine(), 64)
    assert "as configured" not in [each.name for each in plain.tried], "it is one of the others"


def test_the_own_layout_may_be_the_only_one_that_fits() -> None:
    overrides = ["train.global_batch_size=1", "parallel.tp=8", "parallel.cp=8", "model.num_kv_heads=8"]
    found = strategies(load_config(config_path("llama-8b"), overrides), machine(), 64)
    assert found.simplest
    assert (found.simplest.name, found.would_fit) == ("as configured", ())


def test_fp8_is_not_proposed_for_a_small_gain() -> None:
    experts = {"num_experts": 64, "experts_per_token": 8, "expert_dim": 8192, "dim": 1024, "num_heads": 8}
    config = Config.model_validate({**LLAMA_70B, "model": {**LLAMA_70B["model"], **experts, "num_layers": 4}})
    found = strategies(config, machine(), 64)
    assert found.simplest
    assert not any("fp8" in each.name for each in found.tried)


@pytest.mark.parametrize(("parallel", "is_low"), [({"ep": 8}, False), ({"dp_shard": 8}, True)])
def test_intensity_of_experts_is_that_of_the_rows_that_come_to_them(parallel: dict[str, int], is_low: bool) -> None:
    experts = {"num_experts": 64, "experts_per_token": 2, "expert_dim": 2048}
    train = {**LLAMA_70B["train"], "micro_batch_size": 1}
    config = Config.model_validate(
        {**LLAMA_70B, "model": {**LLAMA_70B["model"], **experts}, "parallel": parallel, "train": train}
    )
    warnings = anti_patterns(expect(config, resolve(config, 8), machine()), machine())
    assert any("for each byte that experts move" in line for line in warnings) == is_low


def test_every_proposed_setting_can_be_set() -> None:
    for config in (Config.model_validate(LLAMA_70B), load_config(config_path("moe-debug"))):
        for num_gpus in (1, 16):
            for strategy in strategies(config, machine(), num_gpus).tried:
                changed = load_config(config_path("debug"), [*strategy.overrides, "train.global_batch_size=64"])
                assert changed.parallel.tp == strategy.expected.plan.tp


def pipeline_s(pp: int, interconnect: str, gpus_per_node: int, num_gpus: int = 8) -> float:
    overrides = [f"parallel.pp={pp}", f"parallel.dp_shard={num_gpus // pp}", "train.global_batch_size=64"]
    config = load_config(config_path("debug"), overrides)
    hardware = machine("a100", interconnect, gpus_per_node)
    expected = expect(config, resolve(config, num_gpus), hardware)
    return sum(group.seconds for group in expected.groups if group.call.op == "send")


def test_a_pipeline_pays_for_each_boundary_and_not_for_the_first_alone() -> None:
    # Stages 0 and 1 on one node, 2 and 3 on the other: the second boundary is the slow one.
    inside, fast, slow = (pipeline_s(4, f"nvlink,{link}", nodes)
                          for link, nodes in (("eth10", 8), ("ib400", 4), ("eth10", 4)))  # fmt: skip
    assert inside < fast < slow
    # A message within the node and one beyond it: half of each.
    assert slow == pytest.approx((inside + pipeline_s(4, "eth10,eth10", 4)) / 2, rel=0.01)


@pytest.mark.parametrize("stages", [2, 4])
def test_boundaries_within_a_node_cost_the_same_on_any_network(stages: int) -> None:
    assert pipeline_s(stages, "nvlink,eth10", 8) == pipeline_s(stages, "nvlink,ib400", 8)


def test_an_adapter_may_be_shared_by_several_devices() -> None:
    own, shared, node = (machine(interconnect=f"nvlink,{link}") for link in ("eth100", "eth100/2", "eth100/8"))
    for stride, size in ((1, 64), (8, 8)):
        assert own.bandwidth(stride=stride, size=size) == 2 * shared.bandwidth(stride=stride, size=size)
        assert own.bandwidth(stride=stride, size=size) == 8 * node.bandwidth(stride=stride, size=size)
    assert node.between == "eth100 shared by 8"
    # Four devices cannot share with eight.
    assert machine(interconnect="nvlink,eth100/8", gpus_per_node=4).bandwidth(stride=4, size=2) == 12.5e9 / 4
    for wrong in ("eth100/0", "eth100/two", "eth100/-1"):
        with pytest.raises(ConfigError, match="number of devices that share"):
            machine(interconnect=f"nvlink,{wrong}")


TABLE = """
[gpu.dojo]
watts = 400
memory_gb = 64
bf16_tflops = 200
float32_tflops = 50
memory_tb_per_s = 2
inside = "fabric"
host_link = "pcie4"
[link.fabric]
gb_per_s = 100
[link.efa]
gb_per_s = 50
gpus_per_adapter = 8
"""


def test_devices_and_links_of_a_table(tmp_path: Path) -> None:
    table = tmp_path / "ours.toml"
    table.write_text(TABLE)
    command = ["plan", "debug", "--gpus", "16", "--gpu", "dojo", "--hardware", str(table), "--interconnect",
               "nvlink,efa", "--format", "json", "--set", "train.global_batch_size=64"]  # fmt: skip
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    assert content["hardware"]["between"] == "efa shared by 8"
    assert content["hardware"]["memory_bytes"] == 64e9
    assert parse_hardware(gpu="h100", gpu_memory="", gpus_per_node=8, interconnect="fabric,efa", table=table)
    with pytest.raises(ConfigError, match="--gpu dojo: not known"):
        machine("dojo")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("watts = 400\n", ""), "gpu.dojo: lacks watts"),
        (("bf16_tflops = 200\n", ""), "lacks bf16_tflops or fp16_tflops"),
        (("memory_gb = 64", "memory_gb = -64"), "memory_gb = -64: must be a number above 0"),
        (("gb_per_s = 100", 'gb_per_s = "fast"'), "link.fabric.gb_per_s"),
        (("gpus_per_adapter = 8", "gpus_per_adapter = true"), "gpus_per_adapter"),
        (("[link.efa]", "[lnik.efa]"), "lnik: must be"),
        (('inside = "fabric"', "inside = 7"), "names of links"),
        (("[gpu.dojo]", "[gpu.dojo"), "no TOML"),
    ],
)
def test_a_mistake_in_a_table_is_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    table = tmp_path / "ours.toml"
    table.write_text(TABLE.replace(*change))
    done = CliRunner().invoke(app, ["plan", "debug", "--gpu", "dojo", "--hardware", str(table)])
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("name", "gpu"),
    [("NVIDIA A10", "a10"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA L4", "l4"), ("NVIDIA L40S", "l40s"),
     ("Tesla V100-SXM2-32GB", "v100"), ("NVIDIA GB200", "gb200"), ("NVIDIA B200", "b200"), ("NVIDIA A10G", None),
     ("NVIDIA L40", None), ("AMD Instinct MI300X", "mi300x"), ("NVIDIA GeForce RTX 4090", "rtx4090")],
)  # fmt: skip
def test_a_device_is_known_by_its_whole_name(name: str, gpu: str | None) -> None:
    found = named_hardware(name)
    assert (found and found.gpu) == gpu


def test_a_device_without_bf16_says_what_it_has() -> None:
    half = load_config(config_path("debug"), ["train.precision=fp16"])
    assert expect(half, resolve(half, 8), machine("v100")).step_s > 0
    low = load_config(config_path("debug"), ["train.precision=bf16"])
    with pytest.raises(ConfigError, match="v100 does not support it; use float32 or fp16"):
        expect(low, resolve(low, 8), machine("v100"))


def test_nothing_fits_names_what_would() -> None:
    config = Config.model_validate(LLAMA_70B)
    lines = strategies(config, machine(host_memory="200GB"), 8).would_fit
    assert any(line.startswith(("16 devices", "32 devices")) for line in lines)
    assert any("200.0 GB" in line and "in each node" in line for line in lines)
    assert any("QLoRA" in line for line in lines)
    assert strategies(config, machine(), 8).would_fit == ()  # a host of any size holds the state
    number = next(int(line.split()[0]) for line in lines if "devices:" in line)
    more = strategies(config, machine(host_memory="200GB"), number)
    assert more.simplest
    assert "host" not in more.simplest.name
    half = strategies(config, machine(host_memory="200GB"), number // 2)
    assert half.simplest is None or "8-bit" in half.simplest.name


def test_one_device_is_offered_the_hosts_memory() -> None:
    """FSDP2 gathers block by block there too, in its own precision and not by autocast."""
    config = load_config(config_path("llama-8b"))
    found = strategies(config, machine("l4", interconnect="pcie4,ib400"), 1)
    assert found.simplest
    assert "all state on the host" in found.simplest.name
    small = strategies(config, machine("l4", interconnect="pcie4,ib400", host_memory="64GB"), 1)
    assert small.simplest is None
    assert any("the host's memory" in line and "has 64.0 GB" in line for line in small.would_fit)


def test_the_parts_of_one_offloaded_rank_add_up_to_its_peak() -> None:
    settings = ["parallel.cpu_offload=all", "train.activation_checkpointing=full", "train.micro_batch_size=1"]
    config = load_config(config_path("llama-8b"), settings)
    memory = expect(config, resolve(config, 1), machine("l4", interconnect="pcie4,ib400")).memory
    assert memory.gradients == 4 * memory.num_parameters  # whole, until the last microbatch
    assert memory.gathered < 4e9  # the root and two blocks
    assert memory.peak < memory.sum + 2e9


def test_tensor_parallel_over_a_slow_network_is_advised_less() -> None:
    config = Config.model_validate(LLAMA_70B | {"parallel": {"tp": 8, "dp_shard": 2}})
    warnings = anti_patterns(expect(config, resolve(config, 16), slow := machine(interconnect="pcie4,eth10")), slow)
    assert any("Lower parallel.tp to 4 or 1" in line for line in warnings)


def accumulation_warnings(config: Config, num_gpus: int) -> list[str]:
    hardware = machine()
    warnings = anti_patterns(expect(config, resolve(config, num_gpus), hardware), hardware)
    return [line for line in warnings if "fit at once" in line]


def test_accumulation_is_warned_of_where_the_batch_fits() -> None:
    batch = "train.global_batch_size=64"
    assert accumulation_warnings(load_config(config_path("gpt2-124m"), ["train.micro_batch_size=1", batch]), 8)
    assert not accumulation_warnings(load_config(config_path("gpt2-124m"), ["train.micro_batch_size=0", batch]), 8)
    large = Config.model_validate({**LLAMA_70B, "train": {**LLAMA_70B["train"], "micro_batch_size": 1}})
    assert not accumulation_warnings(large, 64)


@pytest.mark.parametrize("preset", ["gpt-demo", "llama-8b"])
def test_no_number_of_the_layouts_is_cut_at_80_columns(preset: str) -> None:
    config, written = load_config(config_path(preset)), io.StringIO()
    hardware = machine()
    num_gpus = {"gpt-demo": 4, "llama-8b": 64}[preset]
    found = strategies(config, hardware, num_gpus)
    expected = expect(config, resolve(config, num_gpus), hardware)
    render(expected, hardware, [], found, Console(file=written, width=80, force_terminal=True, no_color=True))
    table = written.getvalue().partition("Layouts")[2].partition("\n\n")[0]
    assert "…" not in table
    assert all(title in table for title in ("GB a rank", "step", "exposed", "MFU", "<- simplest"))
    for each in found.tried:
        assert each.name.split()[0] in table
    assert ("fits" in table) == any(not each.expected.fits for each in found.tried)


def printed(config: Config, num_gpus: int, width: int, hardware: Hardware | None = None) -> str:
    written, hardware = io.StringIO(), hardware or machine()
    expected = expect(config, resolve(config, num_gpus), hardware)
    found = strategies(config, hardware, num_gpus)
    render(expected, hardware, [], found, Console(file=written, width=width, no_color=True))
    return written.getvalue()


def test_bytes_of_all_collectives_of_a_link_are_in_proportion_to_their_time() -> None:
    text = printed(load_config(config_path("llama-8b")), 64, 110)
    gather, reduce = (next(line for line in text.splitlines() if f"  {op} of" in line).split("  ") for op in
                      ("all_gather", "reduce_scatter"))  # fmt: skip
    gathered_gb, gather_ms = (float(cell.split()[0]) for cell in (cell for cell in gather if cell[-2:] in ("GB", "ms")))
    reduced_gb, reduce_ms = (
        float(cell.split()[0]) for cell in [cell for cell in reduce if cell[-2:] in ("GB", "ms")][:2]
    )
    # But for the latency of their hops, since the sizes of their calls differ.
    assert gathered_gb / gather_ms == pytest.approx(reduced_gb / reduce_ms, rel=0.15)
    assert "nccl-tests" in text


def test_mfu_says_which_peak_it_is_relative_to() -> None:
    text = printed(load_config(config_path("llama-8b")), 64, 110)
    assert "MFU 37% of the bf16 peak (990 TFLOP/s)" in text
    assert "also in fp8, whose own peak is higher" in text
    assert "fp8" not in printed(load_config(config_path("gpt-demo")), 4, 110)


@pytest.mark.parametrize("width", [60, 80, 400])
def test_options_of_the_suggested_layout_can_be_copied_as_they_are(width: int) -> None:
    config = load_config(config_path("llama-8b"))
    _, _, tail = printed(config, 64, width).partition("The simplest that fits:")
    command = tail.partition("\n\n")[0].replace("\\\n", " ")
    simplest = strategies(config, machine(), 64).simplest
    assert simplest is not None
    assert command.split() == [word for override in simplest.overrides for word in ("--set", override)]
    assert ("\\" in tail) == (width < 400)
