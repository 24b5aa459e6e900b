"""Gradient compression of DDP: fp16, bf16 or PowerSGD with torch's own hooks, int8 or top-k with error feedback.

    compression = GradientCompression(module, config.parallel, group, rank=rank, seed=seed)
    compression.attach(ddp)
    compression.sample = True          # the next backward also reduces the uncompressed gradients, for comparison
    ...backward...
    errors = compression.squares()     # (sum of squared errors, sum of squares) of the mean gradient, or None

fp16 and bf16 keep no state between steps. PowerSGD (Vogels et al. 2019) does: each rank adds the error of a step to its
next gradient, and the factors of a matrix start from the previous step's factors. torch keeps errors and factors per
bucket, but DDP rebuilds its buckets after the first step of a process. So they are exposed per parameter here
(`tensors`), are part of copies, rollbacks and checkpoints like the optimizer's state, and are reassembled for the
current buckets. int8 and top-k also keep errors (`ErrorFeedback`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from trainer.config.parallel import ParallelConfig
from trainer.parallel.sparse_hooks import reduce_int8, reduce_largest
from trainer.torch_compat import GradBucket

__all__ = ["GradientCompression"]

_CASTS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
_FED_BACK = ("int8", "topk")
MIN_COMPRESSION = 2
"""A matrix is compressed only if its two factors have less than half of its elements (torch's default)."""


class GradientCompression:
    """The communication hook of one DDP module and its state between steps."""

    def __init__(
        self, module: nn.Module, config: ParallelConfig, group: dist.ProcessGroup, *, rank: int, seed: int
    ) -> None:
        self.kind = config.gradient_compression
        self.active = True
        """False: reduce uncompressed gradients and keep no state, for a replayed step."""
        self.sample = False
        """True: also measure the error in the next backward, at the cost of another reduction."""
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._group, self._rank, self._seed = group, rank, seed
        self._exact: list[tuple[list[Tensor], Tensor, dist.Work]] = []
        self._count = torch.zeros((), dtype=torch.int64)
        self._layouts: dict[int, list[Tensor]] = {}
        self._kept: dict[str, Tensor] = {}
        self._rank_of_matrices = config.powersgd_rank
        self._ratio = config.topk_ratio
        self._feedback = ErrorFeedback(module, rank)
        self._power = PowerSGDState(
            group,
            matrix_approximation_rank=config.powersgd_rank,
            start_powerSGD_iter=config.powersgd_start,
            min_compression_rate=MIN_COMPRESSION,
            # Avoids a division by zero for columns of zeros.
            orthogonalization_epsilon=1e-8,
        )

    def attach(self, ddp: DistributedDataParallel) -> None:
        ddp.register_comm_hook(self, _hook)

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce a bucket. DDP's reducer calls this for each bucket when its gradients are ready."""
        if not self.active:
            return default_hooks.allreduce_hook(self._group, bucket)
        if self.sample:
            exact = bucket.buffer().div(self._group.size())
            work = dist.all_reduce(exact, group=self._group, async_op=True)
            self._exact.append((bucket.parameters(), exact, work))
        if self.kind in _CASTS:
            return _CASTS[self.kind](self._group, bucket)
        if self.kind in _FED_BACK:
            return self._with_feedback(bucket)
        self._power.iter = int(self._count)
        if self._power.iter >= self._power.start_powerSGD_iter:
            self._assemble(bucket)
        future = powerSGD_hook(self._power, bucket)
        if not bucket.buffer().is_cuda:
            # torch reduces the factors in callbacks. On a GPU these run immediately; with gloo they run in other
            # threads, between the calls of the next bucket, in a different order on each rank.
            future.wait()
        if bucket.is_last():
            self._count += 1
        return future

    def _with_feedback(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if self.kind == "int8":
            sizes = [parameter.numel() for parameter in bucket.parameters()]
            mean, error = reduce_int8(self._feedback.corrected(bucket), sizes, self._group)
        else:
            mean, error = reduce_largest(self._feedback.corrected(bucket), self._group, ratio=self._ratio)
        self._feedback.keep(bucket, error)
        device = mean.device
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        done.set_result(bucket.buffer().copy_(mean))
        return done

    def squares(self) -> Tensor | None:
        """Return (2,) float64 on the device: the squared error of the mean gradient in the last backward, and its
        squared norm.

        All replicas get the same numbers. None if `sample` was not set in that backward.
        """
        sampled, self._exact = self._exact, []
        sums = []
        for parameters, exact, work in sampled:
            work.wait()
            reduced = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
            sums.append(torch.stack(((reduced - exact).double().square().sum(), exact.double().square().sum())))
        return torch.stack(sums).sum(0) if sums else None

    # State that is kept between steps.

    def tensors(self) -> dict[str, Tensor]:
        """The hook's state by name; tensors are not copied. Errors are specific to this rank, other tensors are equal
        on all replicas.
        """
        if self.kind != "powersgd":
            return self._feedback.tensors()
        found = {"compression.count": self._count, **self._kept}
        for index, parameters in self._layouts.items():
            errors = torch.split(self._power.error_dict[index], [p.numel() for p in parameters])
            found |= {self._error_name(p): part for p, part in zip(parameters, errors, strict=True)}
            matrices = list(_compressed(parameters, self._rank_of_matrices))
            parts = torch.split(self._power.q_memory_dict[index], [size for _, size in matrices])
            found |= {self._matrix_name(p): part for (p, _), part in zip(matrices, parts, strict=True)}
        return dict(sorted(found.items()))

    def allocate(self, saved: Container[str]) -> None:
        """Allocate the tensors named in `saved` that belong to this rank; the caller fills them."""
        self.forget()
        if self.kind in _FED_BACK:
            self._feedback.allocate(saved)
            return
        for parameter in self._names:
            if (name := self._error_name(parameter)) in saved:
                self._kept[name] = torch.zeros_like(parameter).flatten()
        for compressed, size in _compressed([*self._names], self._rank_of_matrices):
            if (name := self._matrix_name(compressed)) in saved:
                self._kept[name] = compressed.new_zeros(size)

    def forget(self) -> None:
        """Drop all state, because a NaN in it would spread to all later gradients."""
        self._exact.clear()
        self._feedback.forget()
        self._kept, self._layouts = {}, {}
        for by_bucket in (self._power.error_dict, self._power.p_memory_dict, self._power.q_memory_dict):
            by_bucket.clear()

    def _assemble(self, bucket: GradBucket) -> None:
        """If a bucket's parameters have changed, pass torch the errors and matrices for the new ones."""
        index, parameters, power = bucket.index(), bucket.parameters(), self._power
        before = self._layouts.get(index, [])
        if [id(p) for p in before] == [id(p) for p in parameters]:
            return
        kept = self.tensors()
        self._kept = {name: value for name, value in kept.items() if name != "compression.count"}
        self._layouts[index] = parameters
        zeros = (torch.zeros_like(p).flatten() for p in parameters)
        errors = [self._kept.pop(self._error_name(p), zero) for p, zero in zip(parameters, zeros, strict=True)]
        power.error_dict[index] = torch.cat(errors)
        names = [self._matrix_name(p) for p, _ in _compressed(parameters, self._rank_of_matrices)]
        power.p_memory_dict.pop(index, None)
        # If no right factors were kept, torch draws new ones from `rng`, the same on all replicas.
        power.rng = np.random.RandomState((self._seed, int(self._count), index))
        if all(name in self._kept for name in names):
            numbers = [self._kept.pop(name) for name in names]
            power.q_memory_dict[index] = torch.cat(numbers) if numbers else errors[0].new_zeros(0)
            power.p_memory_dict[index] = _left_factors(parameters, self._rank_of_matrices)

    def _error_name(self, parameter: Tensor) -> str:
        return error_name(self._rank, self._names[parameter])  # type: ignore[index]

    def _matrix_name(self, parameter: Tensor) -> str:
        return f"compression.q{self._rank_of_matrices}.{self._names[parameter]}"  # type: ignore[index]


def _hook(state: GradientCompression, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.reduce(bucket)


# DDP checks the annotations, and needs types instead of strings.
_hook.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[Tensor]}


def _matrix(tensor: Tensor, rank: int) -> tuple[int, int, int]:
    """Return (rows, columns, rank of the factors) of a parameter as a matrix for PowerSGD. Rank 0: the parameter is
    sent uncompressed."""
    rows, columns = tensor.shape[0], math.prod(tensor.shape[1:])
    rank = min(rows, columns, rank)
    pays = (rows + columns) * rank * MIN_COMPRESSION < rows * columns
    return rows, columns, rank if pays else 0


def _compressed(parameters: list[Tensor], rank: int) -> Iterator[tuple[Tensor, int]]:
    """Yield each compressed parameter with the number of elements of its right factor, in the order of torch's buffer:
    grouped by shape, shapes in order of first occurrence."""
    by_shape: dict[tuple[int, int], list[tuple[Tensor, int]]] = {}
    for parameter in parameters:
        rows, columns, own = _matrix(parameter, rank)
        if own:
            by_shape.setdefault((rows, columns), []).append((parameter, columns * own))
    return itertools.chain.from_iterable(by_shape.values())


def _left_factors(parameters: list[Tensor], rank: int) -> Tensor:
    sizes = [rows * own for rows, _, own in (_matrix(parameter, rank) for parameter in parameters)]
    return parameters[0].new_empty(sum(sizes))


def error_name(rank: int, parameter: str) -> str:
    """Name in copies and checkpoints of a rank's error for a parameter."""
    return f"compression.error.{rank}.{parameter}"


class ErrorFeedback:
    """The part of each gradient that compression did not send, by parameter. It is added to the next gradient.

    DDP rebuilds its buckets after the first step of a process, so errors are stored by parameter (`tensors`), under
    each rank's number, and concatenated for the current buckets. Top-k sends the largest numbers of a bucket, so the
    first step after a restart sends different numbers than the same step of an uninterrupted run.
    """

    def __init__(self, module: nn.Module, rank: int) -> None:
        self._names: dict[Tensor, str] = {
            parameter: error_name(rank, name) for name, parameter in module.named_parameters()
        }
        self._errors: dict[str, Tensor] = {}

    def corrected(self, bucket: GradBucket) -> Tensor:
        """The bucket's gradients plus the errors of the previous step, in float32."""
        flat = bucket.buffer().float()
        known = [self._errors.get(self._names[p]) for p in bucket.parameters()]
        if all(error is None for error in known):
            return flat.clone() if flat is bucket.buffer() else flat
        errors = [
            flat.new_zeros(p.numel()) if e is None else e for p, e in zip(bucket.parameters(), known, strict=True)
        ]
        return torch.cat(errors).add_(flat)

    def keep(self, bucket: GradBucket, error: Tensor) -> None:
        """Keep the error of a bucket for the next step, as views into `error`."""
        parts = torch.split(error, [p.numel() for p in bucket.parameters()])
        self._errors |= {self._names[p]: part for p, part in zip(bucket.parameters(), parts, strict=True)}

    def tensors(self) -> dict[str, Tensor]:
        """Errors by name, not copied."""
        return dict(sorted(self._errors.items()))

    def allocate(self, saved: Container[str]) -> None:
        """Allocate the tensors named in `saved` that belong to this rank; the caller fills them."""
        self.forget()
        for parameter, name in self._names.items():
            if name in saved:
                self._errors[name] = torch.zeros_like(parameter, dtype=torch.float32).flatten()

    def forget(self) -> None:
        self._errors = {}
