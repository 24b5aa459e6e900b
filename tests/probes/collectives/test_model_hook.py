"""Copies, files and scripts that a loop makes of its attached model hold nothing of ours, and work without us."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import stack_module_state
from torch.optim.swa_utils import AveragedModel

from probes.attach.attach import attach, current, detach
from probes.collectives.gradients.input_gradient import on_input_gradient
from probes.collectives.gradients.model_hook import ModelHook

Make = Callable[[nn.Module, Path], object]


def saved(model: nn.Module, folder: Path) -> object:
    torch.save(model, folder / "model.pt")
    return torch.load(folder / "model.pt", weights_only=False)


MAKES: dict[str, Make] = {
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "averaged": lambda model, _: AveragedModel(model),
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)),  # noqa: S301
    "save": saved,
    "script": lambda model, _: torch.jit.script(model),
    "stacked": lambda model, _: stack_module_state([copy.deepcopy(model), model]),
    "traced": lambda model, _: torch.jit.trace(model.eval(), torch.zeros(2, 4)),  # type: ignore[no-untyped-call]
}


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[nn.Module]:
    """A model that is attached and has trained a step."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, run_dir=tmp_path / "run", watch=False)
    on_input_gradient(model, lambda gradient: None)
    train(model, optimizer)
    yield model
    detach()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", MAKES)
def test_what_is_made_of_the_model_works_and_is_not_recorded(name: str, trained: nn.Module, tmp_path: Path) -> None:
    attached = current()
    assert attached is not None
    hooks = [dict(module._forward_hooks) for module in trained.modules()]
    made = MAKES[name](trained, tmp_path)
    assert [dict(module._forward_hooks) for module in trained.modules()] == hooks
    assert any(isinstance(hook, ModelHook) for hook in hooks[0].values())
    if isinstance(made, nn.Module):
        step = attached.recorder.step_number
        assert isinstance(made.train()(torch.ones(2, 4)), Tensor)
        assert attached.recorder.step_number == step  # a forward pass of the model itself would begin the next
        assert not any(isinstance(hook, ModelHook) for module in made.modules() for hook in hooks_of(module))


def hooks_of(module: nn.Module) -> list[object]:
    return [] if isinstance(module, torch.jit.ScriptModule) else list(module._forward_hooks.values())


def test_a_saved_model_has_no_flag_of_a_hook_that_is_not_saved(trained: nn.Module, tmp_path: Path) -> None:
    """Another process may give its own hook that number: it would get keyword arguments."""
    kept = dict(trained._forward_pre_hooks_with_kwargs)
    loaded = saved(trained, tmp_path)
    assert isinstance(loaded, nn.Module)
    assert not loaded._forward_pre_hooks_with_kwargs
    assert not loaded._forward_hooks_always_called
    assert trained._forward_pre_hooks_with_kwargs == kept != {}


_LOADS = """
import pickle, sys, torch
from torch import nn

with open("model.pickle", "rb") as file:
    pickled = pickle.load(file)
torch.serialization.add_safe_globals([nn.Sequential, nn.Linear, nn.ReLU, set])  # all that this needs without us
for model in (pickled, torch.load("model.pt")["model"]):
    model(torch.ones(2, 4)).sum().backward()
assert not {"probes", "rankscope"} & set(sys.modules)
"""


def test_a_saved_model_loads_where_rankscope_is_not_installed(trained: nn.Module, tmp_path: Path) -> None:
    torch.save({"model": trained}, tmp_path / "model.pt")
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(trained))
    command = [sys.executable, "-I", "-c", _LOADS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
