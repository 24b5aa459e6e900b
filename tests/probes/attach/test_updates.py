"""Steps of loops that update by hand, and of models that are trained in turn."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module
from torch.utils.data import DataLoader, TensorDataset

from probes.attach.attach import Attached, attach, detach
from probes.attach.auto_attach import auto_attach
from probes.attach.loop import updates as updates_module
from probes.attach.loop.updates import TAKES_OVER
from probes.fail_open import error_counts
from probes.tape import event_kinds
from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from store import Store


def recorded(run_dir: Path, sql: str) -> list[tuple[Any, ...]]:
    with Store.open(RunDir(run_dir)) as store:
        return store.rows(sql)


@pytest.mark.parametrize(("num_passes", "in_place"), [(1, False), (3, False), (3, True)])
def test_a_loop_without_an_optimizer_has_a_step_for_each_time_it_clears_gradients(
    num_passes: int, in_place: bool, tmp_path: Path
) -> None:
    """As the word language model of pytorch/examples does it by default; fastai's optimizers zero in place."""
    model = nn.Linear(4, 1)
    norms: list[float] = []
    auto_attach(run_dir=tmp_path / "run", watch=False)
    for number in range(5):
        model.zero_grad(set_to_none=not in_place)
        for _ in range(num_passes):
            (model(torch.ones(2, 4)).sum() * 0.0 + number).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.fill_(number)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-0.1)
    detach()
    rows = recorded(tmp_path / "run", "SELECT step, loss, grad_norm FROM steps ORDER BY step")
    assert rows == [(number + 1, float(number), pytest.approx(norms[number])) for number in range(5)]
    assert recorded(tmp_path / "run", "SELECT count(*) FROM spans WHERE kind = 'backward'") == [(5 * num_passes,)]
    assert recorded(tmp_path / "run", "SELECT count(*) FROM events WHERE kind = 'first_update'") == [(1,)]


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_loop_without_an_optimizer_may_clear_gradients_after_the_forward_pass(is_seen: bool, tmp_path: Path) -> None:
    """As Keras does on torch. torch does not count what is written through `parameter.data`."""
    model = nn.Linear(4, 1)
    auto_attach(run_dir=tmp_path / "run", watch=False)
    for number in range(5):
        for part in range(2):
            loss = model(torch.ones(2, 4)).sum() * 0.0 + number
            if part == 0:
                model.zero_grad()
            loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                (parameter if is_seen else parameter.data).sub_(0.1)
    detach()
    rows = recorded(tmp_path / "run", "SELECT step, loss, committed FROM steps ORDER BY step")
    assert rows == [(number + 1, float(number), True if number < 4 or is_seen else None) for number in range(5)]
    passes = "SELECT step, count(*) FROM spans WHERE kind = 'forward' GROUP BY step ORDER BY step"
    late = 0 if is_seen else 1  # the pass after whose forward gradients are cleared
    assert recorded(tmp_path / "run", passes) == [(1, 2 + late), *[(step, 2) for step in (2, 3, 4)], (5, 2 - late)]


@pytest.mark.parametrize("clears", [True, False])
def test_a_loop_of_tensors_without_a_module_or_optimizer_has_steps(clears: bool, tmp_path: Path) -> None:
    """As lessons on autograd fit a polynomial."""
    slope, offset = torch.ones(3, requires_grad=True), torch.ones(1, requires_grad=True)
    losses: list[float] = []
    auto_attach(run_dir=tmp_path / "run", watch=False)
    for _ in range(5):
        for _ in range(2):
            loss = (slope * torch.tensor([1.0, 2.0, 3.0]) + offset).square().mean()
            loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for tensor in (slope, offset):
                assert tensor.grad is not None
                tensor -= 0.01 * tensor.grad
                if clears:
                    tensor.grad = None
                else:
                    tensor.grad.zero_()
    detach()
    rows = recorded(tmp_path / "run", "SELECT step, loss, committed FROM steps ORDER BY step")
    assert rows == [(n + 1, pytest.approx(loss), True) for n, loss in enumerate(losses)]


def test_replacing_parameters_is_not_an_update(tmp_path: Path) -> None:
    """As FSDP2's do between a forward pass and its backward pass: the optimizer has the sharded ones."""
    model = nn.Linear(4, 1, bias=False)
    auto_attach(run_dir=tmp_path / "run", watch=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded, gathered = model.weight, nn.Parameter(torch.ones(1, 4))
    for _ in range(3):
        model.weight = sharded
        output = model(torch.ones(2, 4)).sum()
        model.weight = gathered
        output.backward()
        model.weight = sharded
    optimizer.step()
    detach()
    assert recorded(tmp_path / "run", "SELECT count(*) FROM steps") == [(1,)]


@pytest.mark.filterwarnings("error")
def test_values_passed_in_place_of_parameters_are_not_an_update_and_raise_no_warning(tmp_path: Path) -> None:
    """As in MAML: `functional_call` with parameters that were updated within the step."""
    model = nn.Linear(4, 1)
    auto_attach(run_dir=tmp_path / "run", watch=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(2):
            fast = {name: 1.0 * value for name, value in model.named_parameters()}
            for _ in range(2):
                loss = torch.func.functional_call(model, fast, (torch.ones(2, 4),)).sum()
                gradients = torch.autograd.grad(loss, tuple(fast.values()), create_graph=True)
                fast = {name: value - one for (name, value), one in zip(fast.items(), gradients, strict=True)}
            torch.func.functional_call(model, fast, (torch.ones(2, 4),)).square().sum().backward()
        optimizer.step()
    detach()
    assert recorded(tmp_path / "run", "SELECT count(*), count(grad_norm) FROM steps") == [(3, 3)]
    assert "attach.forward" not in error_counts


def test_gradients_used_before_the_first_step_of_an_optimizer_do_not_end_a_step(tmp_path: Path) -> None:
    """As sharpness-aware minimization uses them."""
    model = nn.Linear(4, 1)
    auto_attach(run_dir=tmp_path / "run", watch=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
    detach()
    assert recorded(tmp_path / "run", "SELECT step, committed FROM steps ORDER BY step") == [
        (1, True),
        (2, True),
        (3, True),
    ]


def adversaries(turns: int, critic_steps: int, *, is_shared: bool = False) -> None:
    critic, generator = nn.Linear(4, 1), nn.Linear(2, 4)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (critic, generator)]
    for _ in range(turns):
        for _ in range(1 if is_shared else critic_steps):
            critic(generator(torch.ones(3, 2))).mean().backward()
            optimizers[0].step()
        if not is_shared:
            critic(generator(torch.ones(3, 2))).mean().backward()
        optimizers[1].step()


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ({"turns": 5, "critic_steps": 1}, 1),
        ({"turns": 5, "critic_steps": 3}, 1),
        ({"turns": 1, "critic_steps": 9}, 0),  # two phases of one training
        ({"turns": 9, "critic_steps": 1, "is_shared": True}, 0),  # two optimizers of one loss
    ],
)
def test_models_that_are_trained_in_turn_are_recorded_as_such_once(
    loop: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    attached = auto_attach(run_dir=tmp_path / "run", watch=False)
    assert attached.run_dir is not None
    adversaries(**loop)
    detach()
    kinds = [event["kind"] for path in (tmp_path / "run").rglob("*.jsonl") for event in read_events(path)[0]]
    assert kinds.count(event_kinds.TRAINED_IN_TURN) == expected


def train(num_steps: int, *, level: float, attached: Attached | None = None) -> nn.Module:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if attached is not None:
        attach(model, optimizer)
    for _ in range(num_steps):
        optimizer.zero_grad()
        (model(torch.ones(2, 4)).sum() * 0.0 + level).backward()
        optimizer.step()
    return model


def events_of(run_dir: Path, kind: str) -> list[int]:
    paths = run_dir.rglob("*.jsonl")
    return [event["step"] for path in paths for event in read_events(path)[0] if event["kind"] == kind]


@pytest.mark.parametrize("is_told", [True, False])
def test_a_second_training_in_a_process_has_steps_and_a_mark(is_told: bool, tmp_path: Path) -> None:
    """As a sweep or a cross-validation does it, with or without `attach(model, optimizer)` for each."""
    attached = auto_attach(run_dir=tmp_path / "run", watch=False)
    kept = [train(30, level=level, attached=attached if is_told else None) for level in (1.0, 7.0)]
    detach()
    rows = recorded(tmp_path / "run", "SELECT loss, count(*), bool_or(grad_norm > 0) FROM steps GROUP BY 1 ORDER BY 1")
    assert [row[:2] for row in rows] == [(1.0, 30), (7.0, 30)]
    assert events_of(tmp_path / "run", event_kinds.TRAINING_BEGAN) == [31]
    spans = recorded(tmp_path / "run", "SELECT count(DISTINCT step) FROM spans WHERE kind = 'forward' AND step > 31")
    assert spans == [(29,)]
    assert len(kept) == 2


def test_a_second_training_may_have_several_optimizers(tmp_path: Path) -> None:
    """As an actor and its critics that are trained after another policy."""
    auto_attach(run_dir=tmp_path / "run", watch=False)
    train(10, level=1.0)
    models = [nn.Linear(4, 1) for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(20):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    detach()
    (count,) = recorded(tmp_path / "run", "SELECT count(*) FROM steps")[0]
    assert count == 10 + 20 + 1  # the last two updates follow the leader's last one
    assert events_of(tmp_path / "run", event_kinds.TRAINING_BEGAN) == [11]


def test_a_discriminator_that_joins_late_does_not_end_steps(tmp_path: Path) -> None:
    """As it does where an autoencoder is trained alone at first: steps end with the generator's updates."""
    auto_attach(run_dir=tmp_path / "run", watch=False)
    models = [nn.Linear(4, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1 * (place + 1)) for place, model in enumerate(models)]
    for number in range(40):
        for model, optimizer in list(zip(models, optimizers, strict=True))[: 1 if number < 20 else 2]:
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    detach()
    rows = recorded(tmp_path / "run", "SELECT round(lr, 1), count(*) FROM steps WHERE lr > 0 GROUP BY 1 ORDER BY 1")
    assert rows == [(0.1, 40), (0.2, 1)]


def test_another_optimizer_for_the_same_model_goes_on_with_its_training(tmp_path: Path) -> None:
    auto_attach(run_dir=tmp_path / "run", watch=False)
    model = nn.Linear(4, 1)
    for epoch in range(3):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (epoch + 1))
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            hooks_in_pass = list(module._global_forward_pre_hooks)
            optimizer.step()
        assert not hooks_in_pass  # no model is looked for any more
    detach()
    rows = recorded(tmp_path / "run", "SELECT round(lr, 3), count(*) FROM steps GROUP BY 1 ORDER BY 1 DESC")
    assert rows == [(0.1, 4), (0.05, 4), (0.033, 4)]
    assert events_of(tmp_path / "run", event_kinds.TRAINING_BEGAN) == []


@pytest.mark.parametrize("order", ["DG", "GD", "GDI"])
def test_models_that_are_trained_in_turn_on_each_batch_have_a_step_a_batch(order: str, tmp_path: Path) -> None:
    """Whichever steps first. InfoGAN's third optimizer updates both models."""
    generator, discriminator = nn.Linear(4, 4), nn.Linear(4, 1)
    parameters = {"G": [*generator.parameters()], "D": [*discriminator.parameters()]}
    parameters["I"] = parameters["G"] + parameters["D"]
    optimizers = {name: torch.optim.SGD(parameters[name], lr=0.01 * (order.index(name) + 1)) for name in order}
    auto_attach(run_dir=tmp_path / "run", watch=False)
    for _ in range(2):
        for (batch,) in DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2):
            for optimizer in optimizers.values():
                optimizer.zero_grad()
                discriminator(generator(batch)).square().mean().backward()
                optimizer.step()
    detach()
    passes = "SELECT step, count(*) FROM spans WHERE kind = 'backward' GROUP BY step ORDER BY step"
    assert recorded(tmp_path / "run", passes) == [(step, len(order)) for step in range(1, 9)]
    rates = recorded(tmp_path / "run", "SELECT DISTINCT round(lr, 3), committed FROM steps")
    assert rates == [(0.01 * len(order), True)]
    assert events_of(tmp_path / "run", event_kinds.TRAINING_BEGAN) == []


def test_an_optimizer_used_later_does_not_keep_the_first_step_open(tmp_path: Path) -> None:
    first, later = nn.Linear(4, 1), nn.Linear(4, 1)
    trainings = [(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in (first, later)]
    auto_attach(run_dir=tmp_path / "run", watch=False)
    for model, optimizer in trainings:
        for (batch,) in DataLoader(TensorDataset(torch.ones(2 * TAKES_OVER, 4)), batch_size=2):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    detach()
    passes = "SELECT step, count(*) FROM spans WHERE kind = 'backward' GROUP BY step ORDER BY step"
    assert recorded(tmp_path / "run", passes) == [(step, 1) for step in range(1, 2 * TAKES_OVER + 1)]


class Sharded(torch.optim.Optimizer):
    """As ZeroRedundancyOptimizer: a step of an inner optimizer, then more."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.optim = torch.optim.SGD(parameters, lr=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optim.step(closure)


def test_a_step_inside_the_step_of_another_optimizer_is_part_of_it(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    auto_attach(run_dir=tmp_path / "run", watch=False)
    optimizer = Sharded(list(model.parameters()))
    for _ in range(4):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    detach()
    updates = "SELECT step, count(*), count(end_ns) FROM spans WHERE kind = 'optimizer' GROUP BY step ORDER BY step"
    assert recorded(tmp_path / "run", updates) == [(step, 1, 1) for step in (1, 2, 3, 4)]
    assert recorded(tmp_path / "run", "SELECT count(optimizer_ns) FROM steps WHERE optimizer_ns > 0") == [(4,)]


def test_a_step_that_raised_does_not_hide_those_of_another_optimizer(tmp_path: Path) -> None:
    """A loop may catch the exception and go on with a new optimizer."""
    model = nn.Linear(4, 1)
    auto_attach(run_dir=tmp_path / "run", watch=False)
    optimizer = Sharded(list(model.parameters()))
    for number in range(4):
        model(torch.ones(2, 4)).sum().backward()
        try:
            optimizer.step((lambda: 1 / 0) if number == 1 else None)
        except ZeroDivisionError:
            optimizer = Sharded(list(model.parameters()))
            optimizer.step()
    detach()
    open_ = "SELECT step, count(end_ns) FROM spans WHERE kind = 'optimizer' GROUP BY step ORDER BY step"
    assert recorded(tmp_path / "run", open_) == [(step, 1) for step in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("kind", "loaded", "expected"),
    [(torch.optim.AdamW, True, 3), (torch.optim.AdamW, False, None), (torch.optim.SGD, True, None)],
)
def test_the_first_update_records_the_count_of_a_loaded_optimizer(
    kind: Any, loaded: bool, expected: int | None, tmp_path: Path
) -> None:
    """A restart of an attached loop counts its steps from 1 again: only this shows where it went on."""

    def step(optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    model = nn.Linear(4, 1)
    former = kind(model.parameters(), lr=1e-3)
    step(former, 3)
    auto_attach(run_dir=tmp_path / "run", watch=False)
    optimizer = kind(model.parameters(), lr=1e-3)
    if loaded:
        optimizer.load_state_dict(former.state_dict())
    step(optimizer, 4)
    detach()
    events = [event for path in (tmp_path / "run").rglob("*.jsonl") for event in read_events(path)[0]]
    assert [event["num_before"] for event in events if event["kind"] == event_kinds.FIRST_UPDATE] == [expected]


def test_a_count_on_a_device_is_recorded_once_it_has_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a fused AdamW on a GPU, also where it was loaded before the loop was attached to."""
    arrived = SimpleNamespace(is_there=False)
    arrived.query = lambda: arrived.is_there
    asked: list[Any] = []

    def read_back(count: torch.Tensor) -> tuple[torch.Tensor, Any]:
        asked.append(count)
        return torch.tensor(30.0), arrived

    monkeypatch.setattr(updates_module, "read_back", read_back)
    written: list[Any] = []
    recorder = SimpleNamespace(event=lambda kind, **detail: written.append((kind, detail)))
    updates = updates_module.Updates(recorder)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(nn.Linear(4, 1).parameters())
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {"step": torch.zeros((), device="meta")}
    leader = None
    for is_there in (False, False, True, True):
        arrived.is_there = is_there
        updates.backward_ended()
        leader = updates.step_begins(optimizer, leader)
        assert written == ([(event_kinds.FIRST_UPDATE, {"num_before": 30})] if is_there else [])
    assert len(asked) == 1


@pytest.mark.parametrize("place", ["first", "last", "inside"])
def test_several_optimizers_of_one_loss_are_one_training(place: str, tmp_path: Path) -> None:
    """As Muon for matrices with AdamW for the others, or an optimizer for each parameter that steps within backward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()}
    if place == "last":  # the optimizer that ends the loop's steps
        attach(model, list(optimizers.values()), run_dir=tmp_path / "run", watch=False)
    else:
        auto_attach(run_dir=tmp_path / "run", watch=False)
    if place == "inside":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())
    for _ in range(2 * TAKES_OVER):
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        for optimizer in () if place == "inside" else optimizers.values():
            optimizer.step()
    detach()
    (rows,) = recorded(tmp_path / "run", "SELECT count(*), count(loss), count(grad_norm) FROM steps")
    num_norms = 0 if place == "inside" else 2 * TAKES_OVER  # within backward other gradients are still to come
    assert rows == (2 * TAKES_OVER, 2 * TAKES_OVER, num_norms)
    assert events_of(tmp_path / "run", event_kinds.TRAINING_BEGAN) == []
    assert events_of(tmp_path / "run", event_kinds.FIRST_UPDATE) == [2 if place == "inside" else 1]


@pytest.mark.parametrize(
    "order",
    [
        lambda number: "matrices others" if number >= 10 else "others",
        lambda number: "others matrices" if number >= 10 else "matrices",
        lambda number: "matrices others" if number % 10 == 0 else "others",
        lambda number: "matrices others" if number % 2 else "others",
        lambda number: "matrices others" if number < 15 else "others",
    ],
    ids=["joins first", "joins last", "steps in every tenth", "steps in every second", "ends"],
)
def test_optimizers_of_one_model_are_one_training_though_one_pauses(
    order: Callable[[int], str], tmp_path: Path
) -> None:
    """As Muon with AdamW, where one begins later or updates less often."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    auto_attach(run_dir=tmp_path / "run", watch=False)
    optimizers = {
        "matrices": torch.optim.SGD([one for one in model.parameters() if one.ndim == 2], lr=0.01),
        "others": torch.optim.AdamW([one for one in model.parameters() if one.ndim < 2]),
    }
    for number in range(4 * TAKES_OVER):
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        for name in order(number).split():
            optimizers[name].step()
    train(4, level=1.0)
    detach()
    assert recorded(tmp_path / "run", "SELECT count(*), count(loss) FROM steps") == [(4 * TAKES_OVER + 4,) * 2]
    assert events_of(tmp_path / "run", event_kinds.TRAINING_BEGAN) == [4 * TAKES_OVER + 1]
    assert events_of(tmp_path / "run", event_kinds.TRAINED_IN_TURN) == []


def test_an_outer_optimizer_ends_the_steps_of_inner_trainings_and_these_are_freed(tmp_path: Path) -> None:
    """As meta-learning does it: each task trains a copy with a new optimizer, `torch.autograd.grad` the model."""
    auto_attach(run_dir=tmp_path / "run", watch=False)
    model = nn.Linear(4, 1)
    outer = torch.optim.SGD(model.parameters(), lr=0.1)
    made: list[weakref.ref[object]] = []
    for _ in range(30):
        outer.zero_grad()
        for _ in range(2):
            task = nn.Linear(4, 1)
            task.load_state_dict(model.state_dict())
            inner = torch.optim.SGD(task.parameters(), lr=0.1)
            made += [weakref.ref(task), weakref.ref(inner)]
            for _ in range(3):
                inner.zero_grad()
                task(torch.randn(2, 4)).square().mean().backward()
                inner.step()
            gradients = torch.autograd.grad(task(torch.randn(2, 4)).square().mean(), list(task.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        outer.step()
    gc.collect()
    alive = sum(reference() is not None for reference in made)
    detach()
    (count,) = recorded(tmp_path / "run", "SELECT count(*) FROM steps")[0]
    assert 30 - TAKES_OVER <= count <= 30
    assert alive <= 4  # the last task's, and the two optimizers that led


def test_models_of_former_trainings_are_freed(tmp_path: Path) -> None:
    """A sweep in one process must not keep every model and optimizer in memory."""
    auto_attach(run_dir=tmp_path / "run", watch=False)
    made = []
    for number in range(5):
        made.append(weakref.ref(train(2 * TAKES_OVER, level=float(number))))
    gc.collect()
    assert sum(reference() is not None for reference in made) == 0
    detach()
    assert len(events_of(tmp_path / "run", event_kinds.TRAINING_BEGAN)) == 4
