"""No process that has touched a GPU's driver is forked, a rank that was starts over, and its threads are as asked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from trainer.config.load import load_config
from trainer.host_threads import set_host_threads, threads_of_rank
from trainer.launcher.processes.zygote import driver_is_open, one_thread
from trainer.rank.forked import FORKED, use_device


def test_an_open_device_file_makes_a_fork_unsafe(tmp_path: Path) -> None:
    """Counting devices opens the driver, while torch says that CUDA is not initialised."""
    (tmp_path / "0").symlink_to("/dev/null")
    (tmp_path / "1").symlink_to("/dev/fuse")
    assert not driver_is_open(tmp_path)
    (tmp_path / "7").symlink_to("/dev/nvidiactl")
    assert driver_is_open(tmp_path)
    assert not driver_is_open()  # this process


def test_a_failed_import_leaves_the_number_of_threads_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are then started as new interpreters, with this process's environment."""
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    with pytest.raises(ImportError), one_thread():
        raise ImportError
    assert os.environ["OMP_NUM_THREADS"] == "8"
    assert "OPENBLAS_NUM_THREADS" not in os.environ


def test_a_forked_rank_whose_device_refuses_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def refuse(device: object) -> None:
        raise RuntimeError("CUDA error: initialization error")

    def replaced(path: str, command: list[str], environment: dict[str, str]) -> None:
        assert FORKED not in environment
        started.append(command)

    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    monkeypatch.setattr(os, "execve", replaced)
    monkeypatch.setenv(FORKED, "1")
    use_device(torch.device("cuda", 0), ["my.toml"])
    assert started[0][-3:] == ["-m", "trainer.rank.worker", "my.toml"]
    with pytest.raises(RuntimeError, match="initialization error"):  # it was an interpreter of its own
        use_device(torch.device("cuda", 0), ["my.toml"])
    assert len(started) == 1


@pytest.mark.parametrize(
    ("device", "given", "expected"), [("cuda", "1", 1), ("cuda", "3", 3), ("cuda", "", 1), ("cpu", "3", 1)]
)
def test_a_ranks_threads_are_its_own_not_the_launchers(
    monkeypatch: pytest.MonkeyPatch, device: str, given: str, expected: int
) -> None:
    """A rank forked from a launcher whose OpenMP has two threads; the variable was set after it had been read."""
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        set_host_threads(torch.device(device))
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("offload", "num_ranks", "expected"), [("none", 1, 1), ("optimizer", 2, 4), ("all", 32, 1)])
def test_an_optimizer_on_the_host_gets_threads_there(
    monkeypatch: pytest.MonkeyPatch, offload: str, num_ranks: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16))
    config = load_config(None, [f"parallel.cpu_offload={offload}"])
    assert threads_of_rank(config, num_ranks) == expected
