"""Products in fp8, emulated: what is converted, that it trains as float32 does, in each layout, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.depth import tried, usually
from tests.processes import run_ranks
from tests.trainer.layouts import Outcome, tiny, train_alone, train_layouts
from tests.trainer.training_runs import RunResult, run_loop, small
from trainer.config.config import Config
from trainer.config.load import ConfigError
from trainer.layout.resolve import resolve
from trainer.model.checkpointing import apply_activation_checkpointing
from trainer.model.compiling import compile_blocks
from trainer.model.float8 import check_float8, convert_to_float8, is_converted
from trainer.model.initial_weights import initialise
from trainer.model.transformer import Transformer
from trainer.training.build import pick_device
from trainer.training.loss import token_loss

pytestmark = pytest.mark.timeout(300)

CPU = torch.device("cpu")
STEPS = tried(4, nightly=8)
RECIPES = ("tensorwise", "rowwise")


def float8(recipe: str = "tensorwise", **train: Any) -> dict[str, Any]:
    return {"float8": recipe, "float8_emulated": True, **train}


def converted(recipe: str, **sections: dict[str, Any]) -> Transformer:
    config = tiny(train=float8(recipe), **sections)
    model = Transformer(config.model)
    convert_to_float8(model, config.train)
    initialise(model, config.model, seed=0)
    return model


def test_the_matrices_of_the_blocks_are_converted_under_their_names() -> None:
    model, plain = converted("tensorwise"), Transformer(tiny().model)
    layers = [name for name, layer in model.named_modules() if is_converted(layer)]
    assert len(layers) == 7 * len(model.blocks)
    assert all(name.startswith("blocks.") for name in layers)
    shapes = [{name: value.shape for name, value in each.named_parameters()} for each in (model, plain)]
    assert shapes[0] == shapes[1]
    assert all(type(value) is torch.nn.Parameter for value in model.parameters())


@pytest.mark.parametrize("tp", [1, 4])
def test_a_layer_that_does_not_fit_stays(tp: int) -> None:
    """Of 4 tensor-parallel ranks each has 8 rows of a key's 32."""
    config = tiny(train=float8())
    model = Transformer(config.model)
    count = convert_to_float8(model, config.train, tp=tp)
    fits = {name for name, layer in model.blocks["0"].named_modules() if is_converted(layer)}
    small = {"attention.key", "attention.value"} if tp == 4 else set()
    every = {*(f"attention.{part}" for part in ("query", "key", "value", "out")), "mlp.gate", "mlp.up", "mlp.down"}
    assert fits == every - small
    assert count == len(model.blocks) * len(fits)


def test_a_model_that_has_no_layer_for_it_is_refused() -> None:
    config = tiny(train=float8(), model={"dim": 48, "hidden_dim": 72, "num_heads": 2, "num_kv_heads": 1})
    with pytest.raises(ConfigError, match=r"train\.float8 = 'tensorwise': no layer has rows and columns"):
        convert_to_float8(Transformer(config.model), config.train, tp=4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_product_is_that_of_rounded_numbers(recipe: str) -> None:
    """Three bits of a fraction: each number is off by 1/16 at most, and so is what comes out, less what cancels."""
    layer = converted(recipe).blocks["0"].mlp.up
    x = torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(1))
    exact, found = torch.nn.functional.linear(x, layer.weight), layer(x)
    assert not torch.equal(exact, found)
    assert torch.linalg.vector_norm(found - exact) < 1 / 16 * torch.linalg.vector_norm(exact)


@pytest.fixture(scope="module")
def alone() -> dict[str, Outcome]:
    """One process in float32, and in fp8 by each recipe."""
    settings: dict[str, dict[str, Any]] = {"float32": {}, **{recipe: float8(recipe) for recipe in RECIPES}}
    return {name: train_alone(tiny(train={"steps": 20, **train}), 20) for name, train in settings.items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_loss_falls_as_in_float32(recipe: str, alone: dict[str, Outcome]) -> None:
    exact, found = alone["float32"].losses, alone[recipe].losses
    fell = exact[0] - exact[-1]
    assert fell > 1.0
    assert found != exact
    assert max(abs(a - b) for a, b in zip(found, exact, strict=True)) < 0.05 * fell


LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": {"dp_replicate": 2, "dp_shard": 1}},
    "fsdp": {"parallel": {"dp_shard": 2}},
    "fsdp, rowwise, recomputation": {"parallel": {"dp_shard": 2}, "train": {"activation_checkpointing": "full"}},
    "fsdp, selective": {"parallel": {"dp_shard": 2}, "train": {"activation_checkpointing": "selective"}},
    "tp": {"parallel": {"dp_shard": 1, "tp": 2}},
    "cp": {"parallel": {"dp_shard": 1, "cp": 2}},
    "pp": {"parallel": {"dp_shard": 1, "pp": 2}, "train": {"micro_batch_size": 4}},
}


LAYOUTS = usually(LAYOUTS, later=["fsdp", "fsdp, selective"])  # selective: the gradients below


def in_float8(name: str) -> dict[str, Any]:
    recipe = "rowwise" if "rowwise" in name else "tensorwise"
    return {**LAYOUTS[name], "train": {"steps": 20, **float8(recipe), **LAYOUTS[name].get("train", {})}}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Outcome]]:
    return run_ranks(train_layouts, world_size=2, args=({name: in_float8(name) for name in LAYOUTS}, STEPS),
                     deadline_s=240)  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_as_one_process_does(
    name: str, alone: dict[str, Outcome], two_ranks: list[dict[str, Outcome]]
) -> None:
    """Scales are those of what a rank has, so layouts round otherwise, each time anew, and errors do not add up."""
    found = two_ranks[-1][name]
    exact = alone["float32"]
    assert found.losses != exact.losses[:STEPS]
    assert found.losses == pytest.approx(exact.losses[:STEPS], rel=0.01)
    assert all(rank[name].losses == found.losses for rank in two_ranks)
    assert all(rank[name].norms == found.norms for rank in two_ranks)


@pytest.mark.parametrize("kind", ["none", "full", "selective"])
def test_recomputed_and_compiled_blocks_have_the_same_gradients(kind: str) -> None:
    config = tiny(train=float8(activation_checkpointing=kind))
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    gradients = []
    for changes in (False, True):
        model = converted("tensorwise")
        if changes:
            apply_activation_checkpointing(model, config.train)
            if kind == "none":
                compile_blocks(model, "aot_eager")
        token_loss(model(tokens), tokens).backward()
        gradients.append({name: value.grad for name, value in model.named_parameters()})
    for name, value in gradients[0].items():
        assert value is not None
        torch.testing.assert_close(gradients[1][name], value, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_a_run_goes_on_from_its_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    def run(folder: str, steps: int, attempt: int = 0) -> RunResult:
        kept = {"memory_survives": False, "memory_interval": 2}
        config = small(train=float8(steps=steps), checkpoint=kept)
        return run_loop(config, tmp_path / folder, rank=0, world_size=1, attempt=attempt)

    straight = run("straight", 5)
    run("resumed", 3)
    resumed = run("resumed", 5, attempt=1)
    assert resumed.tensors.keys() == straight.tensors.keys()
    assert all(torch.equal(value, straight.tensors[name]) for name, value in resumed.tensors.items())


def test_a_processor_without_fp8_is_refused_in_one_line() -> None:
    assert pick_device(tiny(train=float8()), 0) == CPU
    with pytest.raises(ConfigError) as caught:
        pick_device(tiny(train={"float8": "tensorwise"}), 0)
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith("train.float8 = 'tensorwise': no fp8 matrix products on CPU")
    assert "train.float8_emulated = true" in said


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"pip install 'rankscope\[fp8\]'"):
        check_float8(tiny(train=float8()).train, CPU)


@pytest.mark.parametrize(
    ("sections", "ranks", "words"),
    [
        ({"train": float8(precision="fp16")}, 1, "not with train.precision = 'fp16'"),
        ({"train": float8(micro_batch_size=1), "data": {"seq_len": 24}}, 1, "a pass has 24 tokens"),
        ({"train": {"float8_emulated": True}}, 1, "needs train.float8"),
        (
            {"train": float8(micro_batch_size=2), "model": {"num_layers": 4},
             "parallel": {"dp_shard": 1, "pp": 2, "schedule": "zbv_zero_bubble"}},
            2,
            "cannot be split into input and weight gradients",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_with_it_is_refused(sections: dict[str, Any], ranks: int, words: str) -> None:
    config: Config = tiny(**sections)
    with pytest.raises(ConfigError) as caught:
        resolve(config, ranks)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.gpu
def test_a_gpu_with_fp8_multiplies_as_the_emulation_does() -> None:
    device = torch.device("cuda")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this device has no products in fp8")
    x = torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    config = tiny(train={"float8": "tensorwise"})
    check_float8(config.train, device)
    model = Transformer(config.model)
    convert_to_float8(model, config.train)
    initialise(model, config.model, seed=0)
    real, emulated = (
        each.blocks["0"].mlp.up.to(device, torch.bfloat16)(x) for each in (model, converted("tensorwise"))
    )
    torch.testing.assert_close(real, emulated, rtol=1 / 64, atol=1e-3)
