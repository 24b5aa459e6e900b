"""Sharded or whole, a model starts from the same values, and no rank needs memory for more than its shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.processes import run_ranks
from tests.trainer.layouts import tiny
from trainer.config.config import Config
from trainer.layout.resolve import resolve
from trainer.model import initial_weights
from trainer.model.initial_weights import initialise
from trainer.model.transformer import Transformer
from trainer.training.build import build

# 20 rows in four parts: some ranks have less, and of what tensor parallel leaves some have nothing.
MODEL = {"dim": 40, "num_heads": 2, "num_kv_heads": 2, "hidden_dim": 20, "vocab_size": 258}
SEED = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 4},
    "fsdp": {"dp_shard": 4},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "tp": {"tp": 2, "dp_replicate": 2},
    "fsdp x tp": {"dp_shard": 2, "tp": 2},
    "pp x fsdp": {"pp": 2, "dp_shard": 2},
}


def config_of(name: str) -> Config:
    return tiny(model=MODEL, run={"seed": SEED}, parallel={"dp_shard": 1, **LAYOUTS[name]})


def _built(rank: int, world_size: int) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name in LAYOUTS:
        config = config_of(name)
        training = build(config, resolve(config, world_size), torch.device("cpu"))
        found[name] = {
            key: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for key, value in training.named_parameters()
        }
        for module in training.modules:
            found[name] |= {key: value.clone() for key, value in module.named_buffers()}
    return found


def test_every_layout_starts_from_the_same_values() -> None:
    whole = Transformer(config_of("fsdp").model)
    initialise(whole, config_of("fsdp").model, seed=SEED)
    expected = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    by_rank = run_ranks(_built, world_size=4)
    for name in LAYOUTS:
        seen = {key: value for rank in by_rank for key, value in rank[name].items()}
        assert seen.keys() == expected.keys()
        for rank in by_rank:
            for key, value in rank[name].items():
                assert torch.equal(value, expected[key]), f"{name}: {key}"


@pytest.mark.parametrize("shape", [(70, 1100), (3, 40, 600), (32, 512), (1, 7)])
def test_a_part_equals_the_same_slice_of_the_whole(shape: tuple[int, ...]) -> None:
    whole = initial_weights._normal("0/some.weight", tuple(slice(0, size) for size in shape))
    assert abs(float(whole.mean())) < 5 / whole.numel() ** 0.5
    generator = np.random.default_rng(0)
    for _ in range(20):
        bounds = [sorted(generator.integers(0, size, 2, endpoint=True)) for size in shape]
        part = tuple(slice(int(first), int(last)) for first, last in bounds)
        assert torch.equal(initial_weights._normal("0/some.weight", part), whole[part])
    if whole.numel() > 1000:
        assert len(whole.flatten().unique()) > 0.99 * whole.numel()  # no two tiles alike
        assert abs(float(whole.std()) - 1) < 0.02


def test_a_rank_draws_its_own_shards_only(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    draw = torch.randn

    def counted(*args: Any, **options: Any) -> Tensor:
        sizes.append(draw(*args, **options).numel())
        return draw(*args, **options)

    monkeypatch.setattr(torch, "randn", counted)
    initial_weights._normal("0/w", (slice(0, 4096), slice(0, 1024)))
    whole = sum(sizes)
    sizes.clear()
    initial_weights._normal("0/w", (slice(1000, 1064), slice(0, 1024)))  # 64 rows: a rank of 64
    assert whole == 4096 * 1024
    assert sum(sizes) <= 3 * 32 * 1024
