"""Copies of this rank's shard in host memory: the first thing to roll back to.

    copies = MemoryCopies(training, healthy_steps=3, interval=10)
    copies.take(values, vetted=True)
    copies.promote(step)                    # steps up to here were healthy
    values = copies.restore(before_step=40)  # newest vetted copy taken before step 40; None if there is none

Each rank keeps its own copies, and all ranks take, promote and restore them at the same steps, so nothing has to be
agreed upon. A copy is vetted once `healthy_steps` steps after it were healthy; there are just enough copies that one
is always vetted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.checkpoint.state import (
    Values,
    allocate_optimizer_state,
    local_tensors,
    restore_rng,
    rng_state,
    training_tensors,
)
from trainer.training import Training

__all__ = ["MemoryCopies"]


@dataclass(slots=True)
class _Copy:
    values: Values
    vetted: bool
    tensors: dict[str, Tensor] = field(default_factory=dict)
    rng: dict[str, Tensor] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return self.values.position.step


class MemoryCopies:
    """The copies of one rank, oldest first."""

    def __init__(self, training: Training, *, healthy_steps: int, interval: int) -> None:
        self.training = training
        self.healthy_steps = healthy_steps
        self._limit = 1 + -(-healthy_steps // max(1, interval))
        self._copies: list[_Copy] = []

    @property
    def steps(self) -> list[int]:
        """Steps of the copies that there are, oldest first."""
        return [copy.step for copy in self._copies]

    @torch.no_grad()
    def take(self, values: Values, *, vetted: bool = False) -> int:
        """Copy the state as it is now; returns the size in bytes."""
        live = local_tensors(training_tensors(self.training))
        buffers = self._copies.pop(0).tensors if len(self._copies) >= self._limit else {}
        pinned = self.training.device.type == "cuda"
        tensors = {
            name: buffers[name] if name in buffers else torch.empty_like(value, device="cpu", pin_memory=pinned)
            for name, value in live.items()
        }
        _copy(list(tensors.values()), list(live.values()))
        self._copies.append(_Copy(values, vetted, tensors, rng_state(self.training.device)))
        return sum(tensor.nbytes for tensor in tensors.values())

    def promote(self, step: int) -> list[int]:
        """Vet the copies that `healthy_steps` steps up to `step` have followed; returns their steps."""
        fresh = [copy for copy in self._copies if not copy.vetted and copy.step + self.healthy_steps <= step]
        for copy in fresh:
            copy.vetted = True
        return [copy.step for copy in fresh]

    def forget_from(self, step: int) -> list[int]:
        """Drop the copies that hold the update of `step` or a later one; returns their steps."""
        gone = [copy.step for copy in self._copies if copy.step >= step]
        self._copies = [copy for copy in self._copies if copy.step < step]
        return gone

    @torch.no_grad()
    def restore(self, before_step: int) -> Values | None:
        """Put back the newest vetted copy that lacks the update of `before_step`, and forget the later ones."""
        candidates = [copy for copy in self._copies if copy.vetted and copy.step < before_step]
        if not candidates:
            return None
        copy = candidates[-1]
        self.forget_from(copy.step + 1)
        self.training.discard()
        if training_tensors(self.training).keys() != copy.tensors.keys():
            allocate_optimizer_state(self.training, copy.tensors)
        live = local_tensors(training_tensors(self.training))
        _copy([live[name] for name in copy.tensors], list(copy.tensors.values()))
        restore_rng(copy.rng, self.training.device)
        return copy.values


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensor by tensor; on CUDA all copies are queued first and waited for once."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
    if any(tensor.is_cuda for tensor in (*targets[:1], *sources[:1])):
        torch.cuda.synchronize()
