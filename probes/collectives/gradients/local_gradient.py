"""Norm of a rank's local gradient, measured on the inputs of the gradient reductions in a backward pass.

    unreduced = unreduced_gradients()               # of the groups that `probes.collectives.wrapped.install` records
    unreduced.begin(device)                         # before the forward pass
    loss.backward()                                 # DDP's all-reduces, FSDP2's reduce-scatters
    (square,) = unreduced.end().tolist()            # |g|^2 of this rank's part of the batch; NaN if nothing was reduced

After the reduction every rank has the mean gradient, and the differences between ranks, which are the gradient's noise
(`analyzers.numerics.gradient_noise`), are lost. The sum stays on the device and is read back with the other values of
the step. It costs no communication, and one additional pass over the gradients in each measured step.

Scale: DDP divides gradients by the number of ranks and then sums them; FSDP2 reduces undivided gradients with a mean.
Where shards are scattered and then reduced over replicas (HSDP) the first of the two calls counts. Loops that also
reduce activations (tensor parallelism) must not use it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["UnreducedNorm"]


class UnreducedNorm:
    """Sums squares between `begin` and `end`; autograd's threads call `add`, one at a time."""

    def __init__(self) -> None:
        self.is_on = False
        self._sums: dict[str, torch.Tensor] = {}
        self._num_calls = dict.fromkeys(("all_reduce", "reduce_scatter"), 0)

    def begin(self, device: torch.device) -> None:
        """Start a sum. Until `end`, every all-reduce and reduce-scatter is taken for a reduction of gradients."""
        if not self._sums or self._sums["all_reduce"].device != device:
            self._sums = {op: torch.zeros(1, dtype=torch.float64, device=device) for op in self._num_calls}
        for op, total in self._sums.items():
            total.zero_()
            self._num_calls[op] = 0
        self.is_on = True

    def add(self, op: str, tensors: Sequence[torch.Tensor], reduce_op: object, num_members: int) -> None:
        """Add the input of a call that is about to be made. `reduce_op`: torch's, None for a call without one."""
        total = self._sums.get(op)
        if total is None:
            return
        if reduce_op == dist.ReduceOp.AVG:
            factor = 1.0
        elif reduce_op == dist.ReduceOp.SUM:
            factor = float(num_members) ** 2
        else:
            factor = math.nan  # for other operations, the factor between input and reduced gradient is unknown
        with torch.no_grad():
            for tensor in tensors:
                if tensor.is_floating_point() and tensor.layout is torch.strided and tensor.device == total.device:
                    total.add_(_square(tensor.detach()), alpha=factor)
        self._num_calls[op] += 1

    def end(self) -> torch.Tensor:
        """Square of the norm since `begin`: a float64 tensor with one element, on the device."""
        self.is_on = False
        op = "reduce_scatter" if self._num_calls["reduce_scatter"] else "all_reduce"
        total = self._sums[op]
        return total if self._num_calls[op] else total.fill_(math.nan)


def _square(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cpu:
        # `vector_norm` takes 1.5 times as long as BLAS on float32, and a thousand times as long on bfloat16.
        flat = tensor.reshape(-1).float() if tensor.dtype != torch.float64 else tensor.reshape(-1)
        return torch.dot(flat, flat).double()
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32)
    return norm.double().square()
