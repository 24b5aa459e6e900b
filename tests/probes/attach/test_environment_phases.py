"""Actions in an environment are a phase of the step that they are for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from analyzers.numerics.policy_loss import policy_attempts
from probes.attach.attach import attach, detach
from probes.tape.rundir import RunDir
from store import Store


class OrderEnforcing:
    """Has the name and the method of Gymnasium's wrapper; without state."""

    def step(self, action: int) -> tuple[torch.Tensor, float]:
        return torch.full((1, 4), float(action)), 1.0


STEP = OrderEnforcing.step


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[OrderEnforcing]:
    module = ModuleType("gymnasium.wrappers.common")
    module.OrderEnforcing = OrderEnforcing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield OrderEnforcing()
    detach()
    assert OrderEnforcing.step is STEP


def recorded(run_dir: Path, sql: str) -> list[tuple[Any, ...]]:
    with Store.open(RunDir(run_dir)) as store:
        return store.rows(sql)


def test_a_rollout_is_one_phase_and_its_policy_evaluates_nothing(environment: OrderEnforcing, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, run_dir=tmp_path / "run", watch=False)
    for _ in range(3):
        seen = []
        for action in range(5):
            state, _ = environment.step(action)
            with torch.no_grad():
                seen.append(model(state))
        for _ in range(2):  # updates of one rollout: the first step has its time
            model(torch.cat([torch.ones(1, 4)] * 5)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    environment.step(0)  # an episode after the last update is no step
    detach()
    rows = recorded(tmp_path / "run", "SELECT step, kind FROM spans WHERE step <= 6 ORDER BY start_ns")
    assert [row for row in rows if row[1] in ("environment", "evaluate")] == [
        (step, "environment") for step in (1, 3, 5)
    ]
    assert [kind for step, kind in rows if step == 1] == ["environment", "forward", "backward", "optimizer"]
    assert recorded(tmp_path / "run", "SELECT max(step), count(loss) FROM steps") == [(6, 6)]
    with Store.open(RunDir(tmp_path / "run")) as store:
        assert policy_attempts(store) == {0}


def test_a_loop_that_trains_in_between_has_a_phase_for_each_action(environment: OrderEnforcing, tmp_path: Path) -> None:
    """REINFORCE keeps the graph of every choice, and goes backward through all of them at the end of the episode."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, run_dir=tmp_path / "run", watch=False)
    for _ in range(2):
        chosen, state = [], torch.ones(1, 4)
        for action in range(3):
            chosen.append(model(state))
            state, _ = environment.step(action)
        torch.stack(chosen).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    detach()
    kinds = [
        kind for _, kind in recorded(tmp_path / "run", "SELECT step, kind FROM spans WHERE step = 1 ORDER BY start_ns")
    ]
    assert kinds == [*["forward", "environment"] * 3, "backward", "optimizer"]
    assert recorded(tmp_path / "run", "SELECT count(*) FROM steps") == [(2,)]


class Policy(nn.Module):
    """Chooses with a distribution: in `forward`, as some write it, or in a method, as CleanRL does."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Linear(4, 2)

    def forward(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.distributions.Categorical(logits=self.actor(state))
        action = chosen.sample()
        return action, chosen.log_prob(action)


@pytest.mark.parametrize("is_method", [True, False])
def test_a_policy_that_scores_its_own_samples_acts_in_an_environment_of_the_loop(
    is_method: bool, tmp_path: Path
) -> None:
    policy = Policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    attach(policy, optimizer, run_dir=tmp_path / "run", watch=False)
    for _ in range(2):
        states, actions = torch.ones(5, 4), []
        for state in states:
            with torch.no_grad():
                actions.append((policy.forward if is_method else policy)(state)[0])
        for _ in range(2):
            scores = torch.distributions.Categorical(logits=policy.actor(states)).log_prob(torch.stack(actions))
            (-scores.mean()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    detach()
    rows = recorded(tmp_path / "run", "SELECT step FROM spans WHERE kind = 'environment' ORDER BY start_ns")
    assert rows == [(1,), (3,)]
    assert recorded(tmp_path / "run", "SELECT count(*) FROM steps") == [(4,)]
    with Store.open(RunDir(tmp_path / "run")) as store:
        assert policy_attempts(store) == {0}
    assert not hasattr(torch.distributions.Categorical.log_prob, "__wrapped__")


def test_other_uses_of_distributions_are_not_an_environment(tmp_path: Path) -> None:
    """A variational loss scores its own sample with a gradient, a flow its data, and a language model only samples."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, run_dir=tmp_path / "run", watch=False)
    prior = torch.distributions.Normal(torch.zeros(4), torch.ones(4))
    for _ in range(2):
        posterior = torch.distributions.Normal(model(torch.ones(1, 4)), torch.ones(4))
        latent = posterior.rsample()
        (posterior.log_prob(latent) - prior.log_prob(latent)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        prior.sample()
        torch.distributions.Categorical(logits=torch.ones(3)).sample()
    detach()
    assert recorded(tmp_path / "run", "SELECT count(*) FROM spans WHERE kind = 'environment'") == [(0,)]


def test_a_compiled_policy_has_no_graph_break(tmp_path: Path) -> None:
    policy = Policy()
    attach(policy, torch.optim.SGD(policy.parameters(), lr=0.1), run_dir=tmp_path / "run", watch=False)
    compiled = torch.compile(policy.forward, backend="eager", fullgraph=True)
    torch.manual_seed(0)
    _, score = compiled(torch.ones(4))
    detach()
    torch.manual_seed(0)
    assert torch.equal(score, policy(torch.ones(4))[1])
