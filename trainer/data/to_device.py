"""Copy batches to a GPU on a separate stream.

    to_device = ToDevice(device)
    batch = to_device(batch)            # returns immediately; operations enqueued later wait for the copy

The host runs one step ahead of the device, so a batch is copied from pinned memory while the device still computes the
previous step. On a CPU the batch is returned unchanged.
"""

from __future__ import annotations

import torch

from trainer.data.batches import Batch

__all__ = ["ToDevice"]


class ToDevice:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch: no types

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch on the device, usable on the current stream."""
        if self._stream is None:
            return batch.to(self._device)
        reader = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = batch.to(self._device)
        reader.wait_stream(self._stream)
        for tensor in (moved.inputs, moved.targets):
            tensor.record_stream(reader)  # the memory of the batch was allocated on the copy stream
        return moved
