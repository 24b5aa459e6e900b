"""Tokens and operations from the shapes of an attached language model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from probes.attach.attach import attach, detach, log
from probes.attach.auto_attach import auto_attach
from probes.attach.loop.tokens import flops_per_token, num_padded, num_tokens
from probes.tape.rundir import RunDir
from store import Store

VOCABULARY, DIM = 16, 8


class Language(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layer = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(
        self, labels: Tensor | None = None, *, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        return self.head(self.layer(self.embedding(input_ids)))


@pytest.mark.parametrize("tied", [False, True])
def test_operations_are_six_a_weight_that_multiplies_each_token(tied: bool) -> None:
    assert flops_per_token(Language(tied=tied)) == 6 * (DIM * DIM + DIM * VOCABULARY)
    assert flops_per_token(nn.Linear(4, 4)) is None  # no language model


class TableEmbedding(nn.Module):
    """As projects that split the vocabulary, or initialise it their own way, write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(VOCABULARY, DIM))

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight)


def test_a_custom_embedding_looks_up_tokens() -> None:
    model = Language()
    model.embedding = TableEmbedding()  # type: ignore[assignment]
    assert flops_per_token(model) == flops_per_token(Language())
    rotary = nn.Linear(4, 4)
    rotary.embedding = type("RotaryEmbedding", (nn.Module,), {})()
    assert flops_per_token(rotary) is None


def test_tokens_are_the_ids_and_no_other_tensor() -> None:
    ids, images = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 3, 4, 4)
    assert num_tokens((ids,), {}) == num_tokens((), {"input_ids": ids}) == num_tokens(({"input_ids": ids},), {}) == 10
    assert num_tokens((images, torch.zeros(2, dtype=torch.int64)), {}) == 0  # labels of classes are no tokens
    assert num_tokens((torch.zeros(2, 3, dtype=torch.int64),), {"input_ids": ids}) == 10


def test_steps_hold_the_tokens_of_all_microbatches_unless_the_loop_logs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RANKSCOPE_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, run_dir=tmp_path / "run", watch=False)
    for step in range(3):
        for length in (4, 6):
            model(input_ids=torch.zeros(2, length, dtype=torch.int64)).sum().backward()
        optimizer.step()
        if step == 2:
            log(tokens=7)
    detach()
    run = RunDir(tmp_path / "run")
    with Store.open(run) as store:
        assert store.rows("SELECT tokens FROM steps ORDER BY step") == [(20,), (20,), (7,)]
    assert run.manifest()["flops_per_token"] == flops_per_token(model)


def test_padding_is_what_a_mask_of_zeros_and_ones_leaves_out() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    assert num_padded((), {"attention_mask": mask}) == num_padded(({"attention_mask": mask.bool()},), {}) == 4
    assert num_padded((), {"attention_mask": mask.float()}) == num_padded((mask,), {}) == 0  # added to scores; ids


def test_steps_hold_the_padded_tokens_of_all_microbatches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RANKSCOPE_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, run_dir=tmp_path / "run", watch=False)
    for padded in (0, 3):
        for length in (4, 6):
            mask = torch.ones(2, length, dtype=torch.int64)
            mask[1, length - padded :] = 0
            model(input_ids=torch.zeros(2, length, dtype=torch.int64), attention_mask=mask).sum().backward()
        optimizer.step()
    detach()
    with Store.open(RunDir(tmp_path / "run")) as store:
        assert store.rows("SELECT step, value FROM scalars WHERE name = 'padded_tokens'") == [(2, 6.0)]


def test_the_call_that_shows_the_model_is_counted(tmp_path: Path) -> None:
    """`rankscope run` learns which module trains from its first call, which is the first micro-batch of step 1."""
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    auto_attach(run_dir=tmp_path / "run", watch=False)
    for _ in range(2):
        for _ in range(2):
            model(torch.ones(2, 5, dtype=torch.int64)).sum().backward()
        optimizer.step()
    detach()
    with Store.open(RunDir(tmp_path / "run")) as store:
        assert store.rows("SELECT tokens FROM steps ORDER BY step") == [(20,), (20,)]
