"""Copy a GPU's state to the host on a separate stream, joined before the next optimizer step overwrites it.

    stream = CopyStream(device)
    arrived = stream.copy(host_tensors, parameters)     # queued after the work so far, without waiting
    stream.join()                                       # before the optimizer writes: the device waits, not the host
    arrived.synchronize()                               # in the background, before the host reads them

Meanwhile the device computes the next forward and backward pass, which only read the state.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from trainer.torch_compat import foreach_copy

__all__ = ["Arrival", "CopyStream", "Copying"]


class Arrival(Protocol):
    """CUDA event that completes when the copies are on the host."""

    def synchronize(self) -> None: ...


class Copying(Protocol):
    """Protocol of a queue of copies: `CopyStream`, or its fake in tests."""

    def copy(self, targets: list[Tensor], sources: list[Tensor]) -> Arrival: ...

    def join(self) -> None: ...


class CopyStream:
    """The stream of one device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch: no types
        self._newest: torch.cuda.Event | None = None

    def copy(self, targets: list[Tensor], sources: list[Tensor]) -> Arrival:
        """Queue the copies; returns an event for their arrival."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            foreach_copy(targets, sources, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        self._newest = arrived
        return arrived

    def join(self) -> None:
        """Make the current stream wait until all copies have read their sources."""
        if self._newest is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._newest)
            self._newest = None
