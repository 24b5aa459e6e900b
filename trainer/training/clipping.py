"""The global gradient norm over every mesh dimension, and clipping by it.

    shards = LocalGradients(parameters, ranks_per_stage=4)      # once
    gradients = shards.by_copies()                              # after each backward
    (norm,) = gradient_norm(gradients, device)                  # one all-reduce of one number
    norm, *sums = gradient_norm(gradients, device, (row,))      # the same all-reduce sums the numbers in `row` too
    scale_gradients(gradients, clip_factor(norm, 1.0))

Each rank adds up the squares of the shards that it holds, divided by the number of ranks that hold the same shard; one
sum over all ranks then gives the square of the norm, whatever the mix of replicated, sharded and pipelined parameters.
All ranks get the same number, and therefore the same verdict. A NaN or Inf on any rank reaches all ranks; nothing is
raised here, because recovery decides the response.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from probes.step_scalars import read_back
from trainer.torch_compat import foreach_mul, foreach_norm

__all__ = [
    "ClipNumbers",
    "ClipResult",
    "LocalGradients",
    "clip_factor",
    "gradient_norm",
    "scale_gradients",
    "settle_gradients",
]


class ClipResult(NamedTuple):
    """The gradient norm, and the numbers that were reduced or read back with it."""

    norm: float
    """Global norm before clipping, equal on all ranks. With fp16, the loss scale is divided out. NaN or Inf if any
    gradient is."""
    sums: list[float]
    """Sums over all ranks of the rows passed as `summed`."""
    own: list[float]
    """This rank's own numbers, unreduced."""


@dataclass(slots=True)
class ClipNumbers:
    """A `ClipResult` that is still on the device: the norm, the sums and this rank's own numbers as one float64 row."""

    row: Tensor
    num_sums: int
    _arrived: Any = None  # the CUDA event after the copy

    def add(self, number: Tensor) -> None:
        """Append one of this rank's own numbers."""
        self.row = torch.cat((self.row, number.to(self.row.dtype).view(1)))

    def send(self) -> None:
        """Start the copy to the host. `read` then waits only for this copy, not for later work of the device."""
        if self.row.is_cuda:
            self.row, self._arrived = read_back(self.row)

    def wait(self) -> None:
        """Bring the numbers to the host now."""
        self.row = self.row.cpu()

    def read(self) -> ClipResult:
        """The numbers; waits for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        norm, *numbers = self.row.tolist()
        return ClipResult(norm, numbers[: self.num_sums], numbers[self.num_sums :])


def settle_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Give every gradient its parameter's placement on the tensor-parallel ranks.

    Under sequence parallelism, DTensor leaves the gradients of normalization layers as partial sums. It leaves the
    gradient of the vocabulary-parallel embedding whole on every rank. FSDP2 handles this itself. Without FSDP the
    optimizer would redistribute in each of its operations, and code that reads the local part would see a partial sum.
    """
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)


class LocalGradients:
    """This rank's part of every gradient, grouped by the number of ranks that hold the same part, so that a norm does
    not count it twice. The part of a parameter that a rank holds never changes, so it is determined once.
    `ranks_per_stage`: number of ranks of one pipeline stage, which are the ranks that may hold a given parameter.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], ranks_per_stage: int) -> None:
        self._parameters: dict[int, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            copies = ranks_per_stage
            if isinstance(parameter, DTensor):
                for dim, placement in enumerate(parameter.placements):
                    if placement.is_shard() or type(placement).__name__ == "_StridedShard":
                        copies //= parameter.device_mesh.size(dim)
            self._parameters.setdefault(copies, []).append(parameter)

    def by_copies(self) -> list[tuple[int, list[Tensor]]]:
        """Return (number of ranks that hold the same part, gradients) pairs, without parameters that have no gradient
        here."""
        found = []
        for copies, parameters in sorted(self._parameters.items()):
            grads: list[Any] = [parameter.grad for parameter in parameters if parameter.grad is not None]
            # The attribute is faster than `to_local()`, which makes a dozen checks first.
            local = [getattr(grad, "_local_tensor", grad) for grad in grads]
            if local := [grad for grad in local if grad.numel()]:
                found.append((copies, local))
        return found


@torch.no_grad()
def gradient_norm(
    gradients: Sequence[tuple[int, list[Tensor]]], device: torch.device, summed: Sequence[Tensor] = ()
) -> Tensor:
    """Global L2 norm of `LocalGradients.by_copies()`, then the sums of `summed`: a row of float64, equal on all ranks.

    `summed` are rows of float64 on `device`, reduced together with the norm, because each further reduction would wait
    for the slowest rank again. Collective.
    """
    squares = []
    for copies, local in gradients:
        # In float64 the sum over all ranks is the same in every layout, to the last bit of float32.
        norms = torch.stack(foreach_norm(local)).double()
        square = norms.dot(norms).to(device)  # offloaded gradients are on the host
        # Dividing each group by a Python number copies nothing to the device and does not wait for it.
        squares.append(square if copies == 1 else square / copies)
    total = sum(squares[1:], start=squares[0]) if squares else torch.zeros((), dtype=torch.float64, device=device)
    row = torch.cat((total.view(1), *summed))
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(row)
    row[0].sqrt_()
    return row


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Factor for the gradients so that their norm is at most `max_norm`; stays on the device.

    The factor is 1 for a non-finite norm, because a NaN factor would reach every gradient and hide which one was bad.
    """
    finite = norm.nan_to_num(nan=0.0, posinf=0.0)
    return (max_norm / (finite + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def scale_gradients(gradients: Sequence[tuple[int, list[Tensor]]], factor: Tensor) -> None:
    """Multiply all gradients in place."""
    if factor.is_cpu and factor.item() == 1.0:
        return  # scaling by 1 is needless; on a GPU this is not checked, because the host would wait for the device
    for _, local in gradients:
        # Offloaded gradients are on the host, so the host waits for the factor.
        foreach_mul(local, factor.to(local[0].device, torch.float32))
