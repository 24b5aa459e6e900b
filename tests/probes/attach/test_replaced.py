"""Functions that are replaced while a run is recorded, in other hands than the loop's."""

from __future__ import annotations

import importlib
import multiprocessing
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from probes.attach.attach import attach, detach


@pytest.mark.parametrize(
    "path",
    [
        "torch.save", "torch.serialization.save", "torch.jit.script", "torch.autograd.backward",
        "torch.nn.utils.get_total_norm", "torch.nn.utils.clip_grad._get_total_norm", "sys.exit",
    ],
)  # fmt: skip
def test_a_replaced_function_can_be_pickled(path: str, tmp_path: Path) -> None:
    module, _, name = path.rpartition(".")
    place = importlib.import_module(module)
    real = getattr(place, name)
    model = nn.Linear(2, 1)
    attach(model, torch.optim.SGD(model.parameters()), run_dir=tmp_path / "run", watch=False)
    replaced = getattr(place, name)
    assert replaced is not real
    pickled = pickle.dumps(replaced)
    detach()
    assert pickle.loads(pickled) is real  # noqa: S301


def test_another_process_can_save_a_checkpoint(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    attach(model, torch.optim.SGD(model.parameters()), run_dir=tmp_path / "run", watch=False)
    arguments = (model.state_dict(), tmp_path / "model.pt")
    saving = multiprocessing.get_context("spawn").Process(target=torch.save, args=arguments)
    saving.start()
    saving.join()
    detach()
    assert saving.exitcode == 0
    assert torch.load(tmp_path / "model.pt").keys() == model.state_dict().keys()
