"""Copies on a stream of their own, played: they happen as late as a device may, and hold the same bits."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.trainer.training_runs import assert_same_bits, run_loop, small, with_steps
from trainer.checkpoint.memory_tier.copies import MemoryCopies
from trainer.rank.loop import Session


class LateStream:
    """A device that copies only when something waits for it."""

    def __init__(self) -> None:
        self.pending: list[tuple[list[Tensor], list[Tensor]]] = []
        self.num_joined = self.num_copies = 0
        self._lock = threading.Lock()

    def copy(self, targets: list[Tensor], sources: list[Tensor]) -> LateStream:
        self.synchronize()  # copies of one stream happen in order
        self.pending.append((targets, sources))
        self.num_copies += 1
        return self

    def synchronize(self) -> None:
        with self._lock, torch.no_grad():
            while self.pending:
                torch._foreach_copy_(*self.pending.pop())

    def join(self) -> None:
        self.num_joined += bool(self.pending)
        self.synchronize()


def _with(stream: LateStream, *, joins: bool = True) -> Any:
    def change(session: Session) -> None:
        copies = session.recovery.copies
        copies.memory = MemoryCopies(
            session.training,
            healthy_steps=copies.guard.policy.healthy_steps,
            interval=copies.config.memory_interval,
            stream=stream,
        )
        if not joins:
            session.training.optimizer._optimizer_step_pre_hooks.clear()

    return change


def test_a_rollback_from_late_copies_gives_the_same_bits(tmp_path: Path) -> None:
    config = with_steps(small(checkpoint={"memory_survives": False}), 16)
    fault = ["failing_batch@batch=10"]
    plain = run_loop(config, tmp_path / "plain", rank=0, world_size=1, faults=fault)
    stream = LateStream()
    late = run_loop(config, tmp_path / "late", rank=0, world_size=1, faults=fault, change=_with(stream))
    assert late.skipped == plain.skipped
    assert len(late.skipped) == 1
    assert_same_bits(late, plain)
    assert stream.num_joined >= 2  # the step before the optimizer's was what the copies had time for

    torn = run_loop(
        config, tmp_path / "torn", rank=0, world_size=1, faults=fault, change=_with(LateStream(), joins=False)
    )
    assert any(not torch.equal(torn.tensors[name], plain.tensors[name]) for name in plain.tensors)
