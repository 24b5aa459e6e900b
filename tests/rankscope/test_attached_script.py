"""What a script that `rankscope run` starts finds: torch is imported before it."""

from __future__ import annotations

import builtins
import json.decoder
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rankscope import attached_script
from rankscope.attached_script import follow_environment


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The settings of this process, which a test changes."""
    threads = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCH_DISTRIBUTED_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    yield
    monkeypatch.undo()
    torch.set_num_threads(threads)
    dist.set_debug_level_from_env()


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_threads_that_the_script_sets_before_it_imports_torch_apply(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, real = torch.get_num_threads(), builtins.__import__
    follow_environment()
    monkeypatch.setenv(name, str(threads + 1))
    exec("import json")
    assert torch.get_num_threads() == threads
    exec("from torch import nn")
    assert torch.get_num_threads() == threads + 1
    assert builtins.__import__ is real
    monkeypatch.setenv(name, str(threads + 2))  # as without Rankscope, too late
    exec("import torch")
    assert torch.get_num_threads() == threads + 1


def test_the_debug_level_of_collectives_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    follow_environment()
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert __import__("json.decoder", fromlist=["JSONDecoder"]) is json.decoder
    exec("import torch.distributed")
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL


def test_settings_stay_where_the_script_sets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads() + 1))  # of the launch, known to torch already
    torch.set_num_threads(threads := torch.get_num_threads() + 2)
    follow_environment()
    exec("import torch")
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(("text", "is_named"), [("os.environ['OMP_NUM_THREADS'] = '1'", True), ("import torch", False)])
def test_imports_are_followed_only_for_a_script_that_names_a_variable(
    tmp_path: Path, text: str, is_named: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert attached_script._names_variables(str(script)) is is_named
    assert not attached_script._names_variables(str(tmp_path))
