"""Gradient norms measured at the update: sparse gradients, and tensors that no model holds."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from probes.attach.attach import detach
from probes.attach.auto_attach import auto_attach
from probes.tape.rundir import RunDir
from store import Store


def rows(run_dir: Path, sql: str) -> list[tuple[object, ...]]:
    with Store.open(RunDir(run_dir)) as store:
        return store.rows(sql)


NORMS = "SELECT grad_norm FROM steps ORDER BY step"


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(10, 4, mode="sum", sparse=True)
        self.head = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.table(ids))
        return out


def test_the_norm_counts_sparse_gradients_and_each_row_once(tmp_path: Path) -> None:
    auto_attach(run_dir=tmp_path / "run", watch=False, gradient_interval=1)
    model = Recommender()
    optimizers = [
        torch.optim.SparseAdam(list(model.table.parameters()), lr=0.1),
        torch.optim.Adam(model.head.parameters(), lr=0.1),
    ]
    norms: list[float] = []
    for number in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (model(torch.tensor([[1, 1, 2], [2, 3, number]])).sum() * (float("nan") if number == 2 else 1.0)).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        norms.append(float(torch.stack([one.to_dense().norm() for one in gradients if one is not None]).norm()))
        for optimizer in optimizers:
            optimizer.step()
    detach()
    assert rows(tmp_path / "run", NORMS) == [(pytest.approx(norm, nan_ok=True),) for norm in norms]
    bad = "SELECT DISTINCT parameter FROM gradients WHERE step = 3 AND nonfinite_count > 0 ORDER BY parameter"
    assert [name for (name,) in rows(tmp_path / "run", bad)] == ["head.bias", "head.weight", "table.weight"]


def test_tensors_that_no_model_holds_have_a_norm(tmp_path: Path) -> None:
    """As a picture's pixels in style transfer, a latent code or a table of factors."""
    auto_attach(run_dir=tmp_path / "run", watch=False)
    factors = [torch.ones(3, requires_grad=True), torch.ones(4, requires_grad=True)]
    optimizer = torch.optim.SGD(factors, lr=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        (factors[0].sum() * 3.0 + factors[1].sum()).backward()
        optimizer.step()
    detach()
    assert rows(tmp_path / "run", NORMS) == [(pytest.approx((3 * 9 + 4) ** 0.5),)] * 3


class Layers(nn.Module):
    """Called through a method, so that each layer is called from outside of all modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(10))
        self.scale = nn.Parameter(torch.ones(4))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * self.scale).sum()


class Tied(nn.Module):
    """Two models that share weights and are called one by one."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(4, 4)
        self.encoder = nn.Sequential(shared, nn.Linear(4, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 4), shared)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.decoder(self.encoder(x)).sum()
        return out


@pytest.mark.parametrize("kind", [Layers, Tied])
@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_the_norm_is_of_each_parameter_once_though_parts_of_the_model_are_called(
    kind: type[Layers | Tied], num_optimizers: int, tmp_path: Path
) -> None:
    auto_attach(run_dir=tmp_path / "run", watch=False)
    model = kind()
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(parameters[i::num_optimizers], lr=0.01) for i in range(num_optimizers)]
    norms: list[float] = []
    for _ in range(3):
        model.zero_grad()
        model.loss(torch.ones(2, 4)).backward()
        norms.append(float(nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None])))
        for optimizer in optimizers:
            optimizer.step()
    detach()
    assert rows(tmp_path / "run", NORMS) == [(pytest.approx(norm),) for norm in norms]


def test_the_norm_is_of_the_model_where_the_loop_calls_copies_computed_from_it(tmp_path: Path) -> None:
    """As in meta-learning: a copy's parameters have a graph, which must not be kept in memory."""
    auto_attach(run_dir=tmp_path / "run", watch=False)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    norms, copies = [], []
    for _ in range(3):
        optimizer.zero_grad()
        adapted = nn.Linear(4, 1)
        adapted._parameters.update({name: parameter * 0.5 for name, parameter in model.named_parameters()})
        copies.append(weakref.ref(adapted.weight))
        adapted(torch.ones(2, 4)).sum().backward()
        del adapted
        norms.append(float(nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])))
        optimizer.step()
    gc.collect()
    assert [copied() for copied in copies] == [None] * 3
    detach()
    assert rows(tmp_path / "run", NORMS) == [(pytest.approx(norm),) for norm in norms]
