"""What a plan says of memory against torch's own allocator, and of layouts against what is known of them."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from typer.testing import CliRunner

from benchmarks.accuracy.plan import measure
from rankscope.cli import app
from tests.trainer.layouts import tiny
from trainer.config.config import Config
from trainer.config.load import ConfigError, load_config
from trainer.layout.resolve import resolve
from trainer.model.initial_weights import initialise
from trainer.model.size import num_parameters
from trainer.model.transformer import Transformer
from trainer.parallel.compression import GradientCompression
from trainer.plan.anti_patterns import anti_patterns
from trainer.plan.cost.budget import RESTART_S, failure_cost, parse_tokens, training_cost
from trainer.plan.expected import expect
from trainer.plan.footprint.memory import in_flight, rank_memory, worst_rank_memory
from trainer.plan.hardware import Hardware, parse_bytes, parse_hardware
from trainer.plan.strategies import strategies
from trainer.plan.traffic import rank_traffic
from trainer.presets import config_path, preset_names
from trainer.training.optimizer import build_optimizer, optimizer_state

MODEL = {"dim": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 4, "hidden_dim": 352, "max_seq_len": 256}
EXPERTS = {**MODEL, "num_experts": 8, "expert_dim": 128}
MEASURED: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "grouped queries": {"model": {**MODEL, "num_kv_heads": 2}},
    "few tokens": {"model": {**MODEL, "dim": 256, "num_layers": 2, "hidden_dim": 704}, "data": {"seq_len": 32}},
    "tied": {"model": {**MODEL, "tie_embeddings": True}},
    "bf16": {"train": {"precision": "bf16"}},
    "full": {"train": {"activation_checkpointing": "full"}},
    "every second": {"train": {"activation_checkpointing": "every_n"}},
    "selective": {"train": {"activation_checkpointing": "selective"}},
    "muon": {"optim": {"name": "muon"}},
    "adamw8bit": {"optim": {"name": "adamw8bit"}},
    "experts": {"model": EXPERTS},
    "experts, full": {"model": EXPERTS, "train": {"activation_checkpointing": "full"}},
    "experts, selective": {"model": EXPERTS, "train": {"activation_checkpointing": "selective"}},
}


def settings(sections: dict[str, dict[str, Any]]) -> Config:
    return tiny(
        model=sections.get("model", MODEL),
        data={"seq_len": 128, **sections.get("data", {})},
        train={"global_batch_size": 4, **sections.get("train", {})},
        parallel=sections.get("parallel", {}),
        optim=sections.get("optim", {}),
    )


@pytest.fixture
def fake_ranks() -> Iterator[Callable[[int], None]]:
    """Makes this process one of four, whose collectives do nothing."""
    yield lambda rank: dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("name", MEASURED)
def test_memory_is_what_the_allocator_gives_out(name: str) -> None:
    config = settings(MEASURED[name])
    real = measure(config)
    need = rank_memory(config, resolve(config, 1), pp_rank=0, device="cpu")
    assert need.parameters == need.gradients == real.parameters
    assert need.optimizer == pytest.approx(real.optimizer, rel=0.001)
    assert need.activations + need.gathered == pytest.approx(real.kept_by_forward, rel=0.02)
    assert need.peak == pytest.approx(real.peak, rel=0.1)


@pytest.mark.parametrize(
    ("num_pieces", "sections"),
    [
        (2, {}),
        (4, {"model": {**MODEL, "num_kv_heads": 2}}),
        (2, {"train": {"activation_checkpointing": "full"}}),
    ],
)
def test_a_piece_of_a_sequence_keeps_the_keys_and_values_of_all(num_pieces: int, sections: dict[str, Any]) -> None:
    config = settings({**sections, "parallel": {"cp": num_pieces, "dp_shard": 1}})
    need = rank_memory(config, resolve(config, num_pieces), pp_rank=0, device="cpu")
    assert need.activations == pytest.approx(measure(config, num_pieces=num_pieces).kept_by_forward, rel=0.03)


def on(num_gpus: int, *overrides: str, preset: str = "llama-8b", **hardware: Any) -> tuple[Any, Hardware]:
    machine = parse_hardware(
        **{"gpu": "h100", "gpu_memory": "", "gpus_per_node": 8, "interconnect": "nvlink,ib400", **hardware}
    )
    config = load_config(config_path(preset), [*overrides])
    return expect(config, resolve(config, num_gpus), machine), machine


def test_state_is_sixteen_bytes_a_parameter_over_the_ranks_that_share_it() -> None:
    for preset, count in (("llama-8b", 8_030_261_248), ("llama-1b", 1_235_814_400)):
        config = load_config(config_path(preset))
        assert num_parameters(config.model) == count  # as the models' authors have published
        single = load_config(config_path(preset), ["train.global_batch_size=1", "train.micro_batch_size=1"])
        whole = rank_memory(single, resolve(single, 1), pp_rank=0, device="cuda")
        assert whole.parameters + whole.gradients + whole.optimizer == 16 * count
    sharded, _ = on(512)  # one pass a step: nothing accumulates
    memory = sharded.memory
    assert memory.parameters + memory.gradients + memory.optimizer == pytest.approx(16 * 8_030_261_248 / 512, rel=0.01)


def test_muon_gathers_each_matrix_and_multiplies_it_on_every_rank() -> None:
    plain, muon = (on(64, *overrides)[0] for overrides in ((), ("optim.name=muon",)))
    matrices = 8_030_261_248 - 2 * 128_256 * 4096 - 65 * 4096  # without embedding, head and norms
    (gather,) = (group.call for group in muon.groups if group.call.what == "updates of matrices")
    assert (gather.calls, gather.size, gather.num_bytes) == (32 * 7, 64, 4 * matrices // 64)
    assert plain.memory.optimizer - muon.memory.optimizer == 4 * matrices // 64
    # Five times, of a matrix with sides s <= l: 4 s s l for two products with it, 2 s s s for that of its short sides.
    short_long = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(4096, 14336)] * 3
    flops = 32 * 5 * sum(4 * s * s * long + 2 * s**3 for s, long in short_long)
    assert muon.compute_s - plain.compute_s == pytest.approx(flops / (0.5 * 989e12), rel=0.01)


def test_gradients_reduced_with_every_microbatch_are_not_kept_whole() -> None:
    each = "parallel.reduce_every_microbatch=true"
    late, soon = (on(64, *overrides)[0] for overrides in ((), (each,)))
    assert late.memory.gradients == pytest.approx(4 * 8_030_261_248, rel=0.01)
    assert soon.memory.gradients == pytest.approx(4 * 8_030_261_248 / 64, rel=0.01)

    def reduced_bytes(*overrides: str) -> int:
        config = load_config(config_path("llama-8b"), [*overrides])
        calls = rank_traffic(config, resolve(config, 64), pp_rank=0)
        return next(call.num_bytes for call in calls if call.op == "reduce_scatter")

    count = resolve(load_config(config_path("llama-8b")), 64).num_microbatches
    assert count > 1
    assert reduced_bytes(each) == count * reduced_bytes()
    assert 2 * reduced_bytes("parallel.reduce_dtype=bf16") == reduced_bytes()


def test_the_first_rank_of_a_pipeline_holds_most_microbatches() -> None:
    def flights(schedule: str, rank: int, stages: int = 1) -> int:
        return in_flight(schedule, pp=4, pp_rank=rank, microbatches=16, stages_per_rank=stages)

    assert [flights("1f1b", rank) for rank in range(4)] == [4, 3, 2, 1]
    assert flights("gpipe", 0) == flights("gpipe", 3) == 16
    assert [flights("interleaved_1f1b", rank, 2) for rank in range(4)] == [11, 9, 7, 5]
    config = load_config(config_path("llama-8b"), ["parallel.pp=4", "parallel.dp_shard=1"])
    assert worst_rank_memory(config, resolve(config, 4), "cuda").pp_rank in (0, 3)


def test_the_simplest_layout_that_fits() -> None:
    machine = parse_hardware(gpu="h100", gpu_memory="", gpus_per_node=8, interconnect="nvlink,ib400")
    small = strategies(load_config(config_path("gpt2-124m")), machine, 8)
    assert small.simplest
    assert small.simplest.name == "DDP"
    large = strategies(load_config(config_path("llama-8b")), machine, 64)
    assert large.simplest
    assert large.simplest.name.startswith("FSDP")
    assert large.simplest.expected.fits
    assert not large.tried[0].expected.fits
    for strategy in large.tried:  # what it says can be set can be set
        load_config(config_path("llama-8b"), [*strategy.overrides])
    tiny_device = parse_hardware(gpu="h100", gpu_memory="1GB", gpus_per_node=8, interconnect="nvlink,ib400")
    assert strategies(load_config(config_path("llama-8b")), tiny_device, 8).simplest is None


@pytest.mark.parametrize(
    ("num_gpus", "overrides", "said"),
    [
        (16, ["parallel.tp=8", "model.num_kv_heads=8"], "parallel.tp = 8 spans nodes of 4"),
        (8, ["parallel.pp=8", "parallel.dp_shard=1", "train.global_batch_size=8"], "8 microbatches for 8 pipeline"),
        (8, ["parallel.pp=8", "parallel.dp_shard=1", "train.global_batch_size=8"], "The bubble is 47%"),
        (4, ["parallel.dp_replicate=-1", "parallel.dp_shard=1"], "It will run out of memory"),
        (256, ["train.global_batch_size=256", "data.seq_len=1024"], "Exposed communication"),
        (4, ["data.seq_len=1024"], "1024 tokens a pass"),
        (64, ["train.global_batch_size=512"], "takes 8 passes a step, though all 8 sequences of a rank fit at once"),
    ],
)
def test_likely_problems_are_warned_of(num_gpus: int, overrides: list[str], said: str) -> None:
    expected, machine = on(num_gpus, *overrides, gpus_per_node=4, interconnect="nvlink,eth25")
    assert any(said in warning for warning in anti_patterns(expected, machine)), anti_patterns(expected, machine)


def test_a_sound_plan_has_no_warning() -> None:
    expected, machine = on(64, "train.global_batch_size=512", "train.micro_batch_size=0")
    assert anti_patterns(expected, machine) == []


def test_a_ring_over_nodes_uses_every_adapter() -> None:
    machine = parse_hardware(gpu="h100", gpu_memory="", gpus_per_node=8, interconnect="nvlink,ib400")
    assert machine.bandwidth(stride=1, size=8) == 450e9
    assert machine.bandwidth(stride=1, size=16) == 8 * 50e9
    assert machine.bandwidth(stride=8, size=2) == 50e9


def test_sizes_and_names_of_hardware() -> None:
    assert parse_bytes("80GB", "x") == 80 * 10**9
    assert parse_bytes("80 GiB", "x") == 80 * 2**30
    assert parse_bytes("141e9", "x") == 141 * 10**9
    for wrong in ("", "0GB", "-1", "80 elephants"):
        with pytest.raises(ConfigError, match="must be a size like 80GB"):
            parse_bytes(wrong, "--gpu-memory")
    with pytest.raises(ConfigError, match="did you mean"):
        parse_hardware(gpu="h10", gpu_memory="", gpus_per_node=8, interconnect="")
    with pytest.raises(ConfigError, match="--interconnect ib4000"):
        parse_hardware(gpu="h100", gpu_memory="", gpus_per_node=8, interconnect="nvlink,ib4000")


def test_a_file_comes_before_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_path("llama-8b").name == "llama-8b.toml"
    own = tmp_path / "my.toml"
    own.touch()
    assert config_path(own) == own
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-8b").touch()
    assert config_path("llama-8b") == Path("llama-8b")


@pytest.mark.parametrize("preset", sorted(preset_names()))
def test_every_preset_can_be_planned(preset: str) -> None:
    num_gpus = "4" if preset == "gpt-demo" else "8"  # its mesh is fixed
    said = CliRunner().invoke(app, ["plan", preset, "--gpus", num_gpus])
    assert said.exit_code == 0, said.output
    assert "peak" in said.output


def test_no_setting_is_left_out() -> None:
    for preset, override, said in (
        ("moe-debug", "parallel.ep=4", "all_to_all of tokens"),
        ("debug", "parallel.cp=2", "all_gather of keys and values"),
        ("debug", "parallel.cp_exchange=ring", "send of keys and values"),
        ("debug", "parallel.cpu_offload=all", "exclude the optimizer step on the host."),
        ("debug", "parallel.zero1=true", "broadcast of updated parameters"),
        ("debug", "parallel.gradient_compression=powersgd", "all_reduce of gradients' factors"),
    ):
        ddp = ["--set", "parallel.dp_replicate=-1", "--set", "parallel.dp_shard=1"]
        mesh = ddp if "zero1" in override or "compression" in override else []
        mesh += ["--set", "parallel.cp=2"] if "ring" in override else []
        told = CliRunner().invoke(app, ["plan", preset, "--gpus", "8", "--set", override, *mesh])
        assert told.exit_code == 0, told.output
        assert said in " ".join(told.output.split()), (override, told.output)


def test_replicas_share_the_state_as_torch_deals_it_out(fake_ranks: Callable[[int], None]) -> None:
    config = settings({"parallel": {"zero1": True, "dp_replicate": 4, "dp_shard": 1}})
    need = rank_memory(config, resolve(config, 4), pp_rank=0, device="cpu")
    held = []
    for rank in range(4):
        fake_ranks(rank)
        model = Transformer(config.model)
        initialise(model, config.model, seed=0)
        optimizer = build_optimizer([model], config.optim, shared_by=dist.group.WORLD)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        state = optimizer_state(optimizer).values()
        held.append(sum(each.numel() * each.element_size() for kept in state for each in kept.values()))
        dist.destroy_process_group()
    assert need.optimizer == pytest.approx(max(held), rel=0.001)
    assert need.optimizer < 2.2 * need.parameters / 4
    assert need.parameters + need.gradients + need.optimizer == pytest.approx(
        (8 + 8 / 4) * num_parameters(config.model), rel=0.02
    )


def test_what_power_sgd_keeps() -> None:
    parallel = {"dp_replicate": 4, "dp_shard": 1, "gradient_compression": "powersgd", "powersgd_start": 2}
    config = settings({"parallel": parallel})
    need = rank_memory(config, resolve(config, 4), pp_rank=0, device="cpu")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        kept = _kept_by_power_sgd(config)
    finally:
        gc.collect()  # DDP's reducer must not hold the group's last reference: torch would wait for itself
        dist.destroy_process_group()
    # The left factors are there too, but made anew in each step: they are no state.
    assert kept == pytest.approx(need.compression, rel=0.05)
    assert need.parameters < kept < need.compression


def _kept_by_power_sgd(config: Config) -> int:
    model = Transformer(config.model)
    initialise(model, config.model, seed=0)
    ddp = DistributedDataParallel(model)
    compression = GradientCompression(model, config.parallel, dist.group.WORLD, rank=0, seed=0)
    compression.attach(ddp)
    for _ in range(4):
        ddp(torch.zeros((1, 8), dtype=torch.int64)).sum().backward()
    return sum(value.numel() * value.element_size() for value in compression.tensors().values())


def test_json_says_what_the_text_says() -> None:
    said = CliRunner().invoke(app, ["plan", "llama-8b", "--gpus", "64", "--format", "json"])
    told = json.loads(said.output)
    assert told["num_parameters"] == 8_030_261_248
    assert told["simplest"] in [layout["name"] for layout in told["layouts"]]
    assert told["memory_bytes"]["peak"] < 80e9
    mistake = CliRunner().invoke(app, ["plan", "llama-8b", "--gpus", "7"])
    assert mistake.exit_code == 2
    assert mistake.output.count("\n") == 1


def test_cost_of_a_number_of_tokens() -> None:
    config = load_config(config_path("llama-8b"), [])
    hardware = parse_hardware(gpu="h100", gpu_memory="", gpus_per_node=8, interconnect="nvlink,ib400")
    expected = expect(config, resolve(config, 64), hardware)
    cost = training_cost(expected, hardware, num_tokens=parse_tokens("300B"), price_per_gpu_hour=2.5)
    per_step = config.train.global_batch_size * config.data.seq_len
    assert (cost.steps - 1) * per_step < 300e9 <= cost.steps * per_step
    assert cost.hours == pytest.approx(cost.steps * per_step / expected.tokens_per_s / 3600)
    assert cost.gpu_hours == pytest.approx(64 * cost.hours)
    assert cost.price == pytest.approx(2.5 * cost.gpu_hours)
    assert cost.energy_kwh == pytest.approx(0.7 * cost.gpu_hours)


def test_failures_cost_half_an_interval_and_a_restart() -> None:
    config = load_config(config_path("llama-8b"), [])
    hardware = parse_hardware(gpu="h100", gpu_memory="", gpus_per_node=8, interconnect="nvlink,ib400")
    expected = expect(config, resolve(config, 64), hardware)
    cost = training_cost(expected, hardware, num_tokens=parse_tokens("300B"), price_per_gpu_hour=2.5)
    lost = failure_cost(cost, expected, per_1000_gpu_days=0.5)
    assert lost.num_failures == pytest.approx(0.5 * cost.gpu_hours / 24_000)
    interval = expected.config.checkpoint.interval
    assert lost.lost_hours * 3600 == pytest.approx(lost.num_failures * (interval / 2 * expected.step_s + RESTART_S))
    assert lost.lost_price == pytest.approx(2.5 * lost.lost_hours * expected.plan.world_size)
    assert failure_cost(cost, expected, per_1000_gpu_days=0).lost_hours == 0


@pytest.mark.parametrize(
    ("text", "expected"), [("300B", 300 * 10**9), ("1.5e9", 1_500_000_000), ("2_000", 2000), ("2t", 2 * 10**12)]
)
def test_numbers_of_tokens(text: str, expected: int) -> None:
    assert parse_tokens(text) == expected


@pytest.mark.parametrize("text", ["", "many", "0", "-3B", "nan", "inf"])
def test_an_invalid_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a number of tokens like 300B"):
        parse_tokens(text)


def test_a_ring_of_context_parallel_sends_what_an_h100_recorded() -> None:
    """24 messages and 192 MiB a step of a rank; parameters 72.9 MiB, their gradients 73.4 (docs/gpu.md)."""
    values = ["dim=512", "num_layers=6", "num_heads=8", "num_kv_heads=8"]
    overrides = [f"model.{value}" for value in values]
    overrides += ["data.seq_len=256", "parallel.cp=2", "parallel.cp_exchange=ring", "parallel.dp_shard=1"]
    config = load_config(Path("examples/gpt-demo.toml"), overrides)
    calls = rank_traffic(config, resolve(config, 2), pp_rank=0)
    sent = [call for call in calls if call.op == "send"]
    assert (sum(call.calls for call in sent), sum(call.num_bytes for call in sent)) == (24, 192 << 20)
    others = {call.op: round(call.num_bytes / 2**20, 1) for call in calls if call.op != "send"}
    assert others == {"all_gather": 72.9, "reduce_scatter": 73.4}
