"""One rank's state copied to host memory, for rollbacks and for saves to disk.

    copy = HostCopy()
    copy.fill(training, values)                 # the only part that blocks training
    copy.restore(training)

Buffers are reused: fresh memory costs a page fault every 4 KiB, which takes longer than the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch
from torch import Tensor

from trainer.checkpoint.memory_tier.copy_stream import Arrival, Copying
from trainer.checkpoint.memory_tier.slots import Slot
from trainer.checkpoint.state import (
    Position,
    Values,
    allocate_optimizer_state,
    local_tensors,
    restore_rng,
    rng_state,
    training_tensors,
)
from trainer.torch_compat import foreach_copy
from trainer.training.rank_training import Training

__all__ = ["Allocate", "HostCopy", "private_memory"]

Allocate = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""Allocates host tensors with the names, shapes and types of the given tensors."""


def private_memory(live: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Allocate memory of this process, page-locked for tensors on a GPU."""
    return {name: torch.empty_like(value, device="cpu", pin_memory=value.is_cuda) for name, value in live.items()}


class HostCopy:
    """Buffers and their contents. `borrowers`: number of background tasks that read them."""

    def __init__(
        self, allocate: Allocate = private_memory, slot: Slot | None = None, stream: Copying | None = None
    ) -> None:
        self.values = Values(position=Position())
        self.vetted = False
        self.tensors: dict[str, Tensor] = {}
        self.rng: dict[str, Tensor] = {}
        self.borrowers = 0
        self.slot = slot
        """Folder of the buffers if they outlive the process."""
        self.sealing: Future[None] | None = None
        """Background task that hashes the slot."""
        self.sending: Future[None] | None = None
        """Background task that sends the hashed slot to another node."""
        self.allocate = allocate
        self._stream = stream
        self._arrival: Arrival | None = None

    @property
    def in_use(self) -> bool:
        """True while the buffers are read in the background."""
        at_work = (future for future in (self.sealing, self.sending) if future is not None)
        return self.borrowers > 0 or any(not future.done() for future in at_work)

    @property
    def step(self) -> int:
        """Number of optimizer steps in the copied state."""
        return self.values.position.step

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes, without random generators."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @torch.no_grad()
    def fill(self, training: Training, values: Values, *, vetted: bool = False) -> None:
        """Copy the current state."""
        assert not self.in_use, "the buffers are still being read"
        if self.slot is not None:
            self.slot.invalidate()
        live = local_tensors(training_tensors(training))
        if not _same_layout(self.tensors, live):
            self.tensors = self.allocate(live)
        targets, sources = list(self.tensors.values()), list(live.values())
        if self._stream is not None:
            self._arrival = self._stream.copy(targets, sources)
            if training.compressions:
                self._stream.join()  # the next backward pass writes to the compression errors
        else:
            _copy(targets, sources)
        self.rng = rng_state(training.device)
        self.values, self.vetted = values, vetted

    def wait(self) -> None:
        """Wait until the host may read the tensors; normally called in the background."""
        if self._arrival is not None:
            self._arrival.synchronize()

    @torch.no_grad()
    def restore(self, training: Training) -> Values:
        """Restore tensors and random generators. Returns the other values; the caller has to set these."""
        self.wait()
        training.discard()
        if training_tensors(training).keys() != self.tensors.keys():
            allocate_optimizer_state(training, self.tensors)
        live = local_tensors(training_tensors(training))
        _copy([live[name] for name in self.tensors], list(self.tensors.values()))
        restore_rng(self.rng, training.device)
        return self.values


def _same_layout(buffers: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> bool:
    return list(buffers) == list(live) and all(
        buffer.shape == value.shape and buffer.dtype == value.dtype
        for buffer, value in zip(buffers.values(), live.values(), strict=True)
    )


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy all tensors; on CUDA, queue all copies and then wait once."""
    if targets:
        foreach_copy(targets, sources, non_blocking=True)
    if any(tensor.is_cuda for tensor in (*targets[:1], *sources[:1])):
        torch.cuda.synchronize()
