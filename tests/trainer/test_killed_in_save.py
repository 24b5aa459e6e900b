"""SIGKILL at any moment of a save: what is loaded next is whole, and the run ends with the same bits."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.processes import _PRELOADED
from tests.trainer.training_runs import assert_same_bits, run_loop, small, with_steps

STEPS = 40
NUM_KILLS = 6


def _train(folder: Path, attempt: int) -> None:
    import torch

    torch.set_num_threads(1)
    run_loop(_config(), folder, rank=0, world_size=1, attempt=attempt)


def _config() -> Any:
    return with_steps(small(checkpoint={"interval": 1, "memory_interval": 0}), STEPS)


@pytest.mark.slow
def test_killed_inside_a_save(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    moments = random.Random(7)
    folder = tmp_path / "killed"
    reached = 0
    for attempt in range(NUM_KILLS):
        process = context.Process(target=_train, args=(folder, attempt), daemon=True)
        process.start()
        _wait_for_a_save_beyond(folder / "checkpoints", reached + 2, process)
        time.sleep(moments.uniform(0, 0.02))  # a save takes about so long
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
        assert process.exitcode == -signal.SIGKILL, "it must not have come to its end"
        reached = max(_saved(folder / "checkpoints"), default=0)
    last = run_loop(_config(), folder, rank=0, world_size=1, attempt=NUM_KILLS)
    assert min(last.losses) == reached + 1, "the newest finished checkpoint was good, and it was used"
    assert not list((folder / "checkpoints").glob("*.tmp"))
    assert not list((folder / "checkpoints").glob("*.condemned")), "none was half there"
    whole = run_loop(_config(), tmp_path / "whole", rank=0, world_size=1)
    assert_same_bits(last, whole, steps=range(reached + 1, STEPS + 1))


def _saved(folder: Path) -> list[int]:
    names = [path.name.removeprefix("step-") for path in folder.glob("step-*")]
    return [int(name) for name in names if name.isdigit()]


def _wait_for_a_save_beyond(folder: Path, step: int, process: Any) -> None:
    """Until a folder of a later step is being written."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.is_alive():
        names = [path.name for path in folder.glob("step-*.tmp")]
        if any(int(name[5:13]) >= step for name in names):
            return
        time.sleep(0.0005)
    raise AssertionError("no save was seen")
