"""Locking shared memory for a GPU: a refusal is no success, and what is truncated is unlocked first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.checkpoint.memory_tier.slots import Slot


class Runtime:
    """CUDA's runtime as far as pages are locked with it: it refuses what is locked already."""

    def __init__(self) -> None:
        self.locked: set[int] = set()
        self.log: list[str] = []
        self.refuses = False

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.log.append("lock")
        if self.refuses or address in self.locked:
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self.locked.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.log.append("unlock")
        self.locked.remove(address)
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def _on_a_gpu(size: int) -> Any:
    return SimpleNamespace(dtype=torch.float32, shape=(size,), nbytes=4 * size, is_cuda=True)


def test_pages_are_unlocked_before_they_are_truncated(tmp_path: Path, runtime: Runtime) -> None:
    slot = Slot(tmp_path / "slot-0")
    slot.allocate({"w": _on_a_gpu(100)})
    assert slot.locked
    slot.allocate({"w": _on_a_gpu(200_000)})
    assert (slot.locked, runtime.log, len(runtime.locked)) == (True, ["lock", "unlock", "lock"], 1)


def test_a_driver_that_refuses_is_no_locked_memory(
    tmp_path: Path, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.refuses = True
    slot = Slot(tmp_path / "slot-0")
    assert slot.allocate({"w": _on_a_gpu(10)})["w"].shape == (10,)
    assert not slot.locked
    assert "cannot be locked" in caplog.text
