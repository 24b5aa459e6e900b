"""Steps of federated learning: each client trains a copy of the model for a few updates, with a new optimizer."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from probes.attach.attach import detach
from probes.attach.auto_attach import auto_attach
from probes.attach.loop.updates import TAKES_OVER
from probes.tape import event_kinds
from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from store import Store

UPDATES, CLIENTS, ROUNDS = 4, 3, 2


def train(shared: nn.Module, client: int, *, decays: bool) -> dict[str, torch.Tensor]:
    """Train a copy, and return its weights."""
    model = copy.deepcopy(shared)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1) if decays else None
    for _ in range(UPDATES):
        optimizer.zero_grad()
        (model(torch.ones(2, 4)).sum() * 0.0 + float(client)).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return model.state_dict()


@pytest.mark.parametrize("decays", [False, True])
def test_each_update_of_each_client_is_a_step(decays: bool, tmp_path: Path) -> None:
    auto_attach(run_dir=tmp_path / "run", watch=False)
    shared = nn.Linear(4, 1)
    for _ in range(ROUNDS):
        weights = [train(shared, client, decays=decays) for client in range(CLIENTS)]
        shared.load_state_dict({name: sum(one[name] for one in weights) / CLIENTS for name in weights[0]})
    detach()
    with Store.open(RunDir(tmp_path / "run")) as store:
        losses = store.rows("SELECT loss FROM steps WHERE committed ORDER BY step")
    assert losses == [(float(client),) for _ in range(ROUNDS) for client in range(CLIENTS) for _ in range(UPDATES)]
    events = [event for path in (tmp_path / "run").rglob("*.jsonl") for event in read_events(path)[0]]
    began = [event["step"] for event in events if event["kind"] == event_kinds.TRAINING_BEGAN]
    assert began == [1 + UPDATES * number for number in range(1, ROUNDS * CLIENTS)]


def test_models_that_keep_their_optimizers_have_their_steps_in_each_round(tmp_path: Path) -> None:
    """As the folds of a cross-validation, or a policy and its value function that are each trained many times."""
    auto_attach(run_dir=tmp_path / "run", watch=False)
    models = [nn.Linear(4, 1) for _ in range(CLIENTS)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(ROUNDS):
        for fold, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for _ in range(TAKES_OVER):
                optimizer.zero_grad()
                (model(torch.ones(2, 4)).sum() * 0.0 + float(fold)).backward()
                optimizer.step()
    detach()
    with Store.open(RunDir(tmp_path / "run")) as store:
        losses = store.rows("SELECT loss FROM steps WHERE committed ORDER BY step")
    assert losses == [(float(fold),) for _ in range(ROUNDS) for fold in range(CLIENTS) for _ in range(TAKES_OVER)]


def test_threads_that_take_turns_at_one_optimizer_are_one_loop(tmp_path: Path) -> None:
    """As the learner threads of IMPALA, which share a lock."""
    auto_attach(run_dir=tmp_path / "run", watch=False)
    model, other = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learners, updates = 3, 5
    turns = [threading.Semaphore(int(number == 0)) for number in range(learners)]

    def learn(number: int) -> None:
        for update in range(updates):
            with torch.no_grad():
                other(torch.ones(2, 4))  # not in its turn
            turns[number].acquire()
            optimizer.zero_grad()
            (model(torch.ones(2, 4)).sum() * 0.0 + float(update * learners + number)).backward()
            optimizer.step()
            turns[(number + 1) % learners].release()

    threads = [threading.Thread(target=learn, args=(number,)) for number in range(learners)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    detach()
    with Store.open(RunDir(tmp_path / "run")) as store:
        losses = store.rows("SELECT loss FROM steps WHERE committed ORDER BY step")
        passes = store.rows("SELECT count(*) FROM spans WHERE kind = 'backward'")
    first = [(0.0,), (None,), (None,)]  # a thread is known to be a learner from its first update on
    assert losses == first + [(float(number),) for number in range(learners, learners * updates)]
    assert passes == [(learners * updates - 2,)]


def test_a_thread_s_turn_is_recorded_while_the_one_before_it_evaluates(tmp_path: Path) -> None:
    auto_attach(run_dir=tmp_path / "run", watch=False)
    updates = 4
    turns, evaluates, has_trained = threading.Semaphore(0), threading.Event(), threading.Event()

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.is_grad_enabled():
                evaluates.set()
                has_trained.wait(60)
            return super().forward(x)

    model = Model(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(loss: float) -> None:
        optimizer.zero_grad()
        (model(torch.ones(2, 4)).sum() * 0.0 + loss).backward()
        optimizer.step()

    def learn_and_evaluate() -> None:
        for update in range(updates):
            train(2.0 * update)
            turns.release()
            with torch.no_grad():
                model(torch.ones(2, 4))  # until the other thread's turn is over
            has_trained.clear()

    def learn() -> None:
        for update in range(updates):
            turns.acquire()
            evaluates.wait(60)
            evaluates.clear()
            train(2.0 * update + 1)
            has_trained.set()

    threads = [threading.Thread(target=one) for one in (learn_and_evaluate, learn)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    detach()
    with Store.open(RunDir(tmp_path / "run")) as store:
        losses = store.rows("SELECT loss FROM steps WHERE committed ORDER BY step")
    assert losses == [(0.0,), (None,)] + [(float(number),) for number in range(2, 2 * updates)]


def test_a_thread_that_trains_another_model_stays_out_of_the_loop(tmp_path: Path) -> None:
    auto_attach(run_dir=tmp_path / "run", watch=False)
    model, other = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer, its = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other))

    def train(one: nn.Module, by: torch.optim.Optimizer, loss: float) -> None:
        (one(torch.ones(2, 4)).sum() * 0.0 + loss).backward()
        by.step()

    for number in range(4):
        train(model, optimizer, float(number))
        thread = threading.Thread(target=train, args=(other, its, 9.0))
        thread.start()
        thread.join(60)
    detach()
    with Store.open(RunDir(tmp_path / "run")) as store:
        losses = store.rows("SELECT loss FROM steps WHERE committed ORDER BY step")
    assert losses == [(float(number),) for number in range(4)]
