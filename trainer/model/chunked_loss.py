"""Fused output layer and cross-entropy in chunks of tokens, so that the logits of a whole batch never exist.

    loss, token_losses = chunked_loss(hidden, weight, targets, chunk=8192)      # mean in nats per token, float32
    chunked_loss(hidden, weight, targets, chunk=8192, group=tp_group)     # `weight`: this rank's part of the vocabulary

For each chunk the logits are computed in the dtype of `hidden` and the softmax in float32. The gradients of hidden
states and weight are computed at once, while the logits exist, so that nothing is computed twice. They are gradients of
the summed loss; backward scales them by the gradient of the mean. At a vocabulary of 50,304 and 16,384 tokens the
logits of the whole batch in float32 and their gradient would take 6.6 GB.

With `group` each rank has a part of the vocabulary: ranks exchange a maximum, a sum and the target's logit per token,
and the gradient of `hidden` is a partial sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Softmax", "chunked_loss"]


@dataclass(frozen=True, slots=True)
class Softmax:
    """Computations on a chunk's logits, compiled if the blocks are, so that each is one pass over the logits."""

    whole: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """(logits, targets) -> losses and gradient of the logits, if this rank has the whole vocabulary."""
    peak: Callable[[Tensor], Tensor]
    """logits -> largest logit of each token."""
    sums: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(logits, peak, targets) -> (2, tokens), to be summed over the ranks: see `_sums`."""
    gradient: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(logits, log-sum-exp, targets) -> gradient of this rank's logits."""

    @classmethod
    def eager(cls) -> Softmax:
        return cls(whole=_whole, peak=_peak, sums=_sums, gradient=_gradient)

    @classmethod
    def compiled(cls, backend: str) -> Softmax:
        """Compile once for any number of tokens, since the last chunk may be smaller, and evaluation has other
        sizes.
        """
        compiled: Any = functools.partial(torch.compile, backend=backend, dynamic=None)
        return cls(whole=compiled(_whole), peak=compiled(_peak), sums=compiled(_sums), gradient=compiled(_gradient))


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk: int,
    group: dist.ProcessGroup | None = None,
    softmax: Softmax | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy, and the cross-entropy of each token, which has no gradient. `hidden`:
    (tokens, dim), `targets`: (tokens).

    Under autocast the matrix products are computed in autocast's dtype.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    wants = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    job = _Job(chunk=chunk, group=group, softmax=softmax or Softmax.eager(), wants_gradients=wants)
    # torch: no types
    mean, token_losses = _ChunkedLoss.apply(hidden, weight, targets, job)  # type: ignore[no-untyped-call]
    return mean, token_losses


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    chunk: int
    group: dist.ProcessGroup | None
    softmax: Softmax
    wants_gradients: bool


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, job: _Job) -> tuple[Tensor, Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            losses, grad_hidden, grad_weight = _compute(hidden, weight, targets, job)
        ctx.gradients, ctx.count, ctx.dtypes = (grad_hidden, grad_weight), len(targets), (hidden.dtype, weight.dtype)
        ctx.mark_non_differentiable(losses)
        return losses.mean(), losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if ctx.gradients is None:
            raise RuntimeError("the chunked loss allows one backward pass per forward pass: it has freed its gradients")
        (grad_hidden, grad_weight), ctx.gradients = ctx.gradients, None
        scale = grads[0].float() / ctx.count
        return grad_hidden.mul_(scale).to(ctx.dtypes[0]), grad_weight.mul_(scale).to(ctx.dtypes[1]), None, None


def _compute(hidden: Tensor, weight: Tensor, targets: Tensor, job: _Job) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, and the gradients of their sum with respect to `hidden` and `weight`. A gradient that is not needed is
    empty."""
    low, count = weight.to(hidden.dtype), len(targets)
    losses = torch.empty(count, dtype=torch.float32, device=hidden.device)
    grad_hidden = torch.empty_like(hidden if job.wants_gradients else hidden[:0])
    grad_weight = torch.zeros_like(weight if job.wants_gradients else weight[:0], dtype=torch.float32)
    for rows in _equal_parts(count, job.chunk):
        losses[rows], grad_logits = _chunk_losses(hidden[rows] @ low.T, targets[rows], len(weight), job)
        if job.wants_gradients:
            torch.mm(grad_logits, low, out=grad_hidden[rows])
            _add_product(grad_weight, grad_logits.T, hidden[rows])
    return losses, grad_hidden, grad_weight


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product to the float32 `total`. On CUDA the matrix product adds it, which avoids rounding to 16 bits."""
    if total.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _equal_parts(count: int, most: int) -> Iterator[slice]:
    """Slices of at most `most` out of `count` rows, as equal as possible, so that few sizes are compiled."""
    size = -(-count // -(-count // most))
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _chunk_losses(logits: Tensor, targets: Tensor, size: int, job: _Job) -> tuple[Tensor, Tensor]:
    """Losses of a chunk and the gradient of its logits. `size`: vocabulary entries on each rank of the group."""
    softmax, group = job.softmax, job.group
    if group is None:
        return softmax.whole(logits, targets)
    targets = targets - dist.get_rank(group) * size  # index within this rank's part; out of range on all ranks but one
    peak = softmax.peak(logits)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    sums = softmax.sums(logits, peak, targets)
    dist.all_reduce(sums, group=group)
    lse = peak + sums[0].log()
    return lse - sums[1], softmax.gradient(logits, lse, targets)


def _whole(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_probabilities = F.log_softmax(logits, -1, dtype=torch.float32)
    losses = -log_probabilities.gather(1, targets.unsqueeze(1)).squeeze(1)
    return losses, _minus_one_hot(log_probabilities.exp(), targets).to(logits.dtype)


def _peak(logits: Tensor) -> Tensor:
    return logits.amax(-1).float()


def _sums(logits: Tensor, peak: Tensor, targets: Tensor) -> Tensor:
    """Return (2, tokens): sum of the exponentials, and the target's logit if the target is in this part."""
    exponentials = (logits.float() - peak.unsqueeze(1)).exp().sum(-1)
    is_here = (targets >= 0) & (targets < logits.shape[1])
    logit = logits.gather(1, targets.where(is_here, 0).unsqueeze(1)).squeeze(1).float()
    return torch.stack((exponentials, logit.where(is_here, 0.0)))


def _gradient(logits: Tensor, lse: Tensor, targets: Tensor) -> Tensor:
    return _minus_one_hot((logits.float() - lse.unsqueeze(1)).exp(), targets).to(logits.dtype)


def _minus_one_hot(probabilities: Tensor, targets: Tensor) -> Tensor:
    """Gradient of cross-entropy: the probabilities minus 1 at each target. Targets of other ranks match no column."""
    columns = torch.arange(probabilities.shape[1], device=probabilities.device)
    return torch.where(columns == targets.unsqueeze(1), probabilities - 1.0, probabilities)
