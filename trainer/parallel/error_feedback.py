"""Error feedback: what compression did not send in a step is kept by parameter and added to the next gradient.

    errors = ErrorFeedback(module, rank)
    corrected = errors.corrected(bucket)       # gradient and error of a bucket, flat: a new tensor
    errors.keep(bucket, corrected - sent)

DDP cuts its buckets again after the first step of a process; so errors are handed out by parameter (`tensors`), each
rank's under its own number, and put together for whatever buckets there are.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, nn

from trainer.torch_compat import GradBucket

__all__ = ["ErrorFeedback", "error_name"]


def error_name(rank: int, parameter: str) -> str:
    """Name of the error of a rank, in copies and checkpoints."""
    return f"compression.error.{rank}.{parameter}"


class ErrorFeedback:
    """The errors of one rank."""

    def __init__(self, module: nn.Module, rank: int) -> None:
        self._names: dict[Tensor, str] = {
            parameter: error_name(rank, name) for name, parameter in module.named_parameters()
        }
        self._errors: dict[str, Tensor] = {}

    def corrected(self, bucket: GradBucket) -> Tensor:
        """The bucket's gradients with what they lack of before, in float32."""
        flat = bucket.buffer().float()
        lacking = [self._errors.get(self._names[p]) for p in bucket.parameters()]
        if all(error is None for error in lacking):
            return flat.clone() if flat is bucket.buffer() else flat
        errors = [
            flat.new_zeros(p.numel()) if e is None else e for p, e in zip(bucket.parameters(), lacking, strict=True)
        ]
        return flat + torch.cat(errors)

    def keep(self, bucket: GradBucket, error: Tensor) -> None:
        """Remember the error of a bucket for the next step; views into `error`."""
        parts = torch.split(error, [p.numel() for p in bucket.parameters()])
        self._errors |= {self._names[p]: part for p, part in zip(bucket.parameters(), parts, strict=True)}

    def tensors(self) -> dict[str, Tensor]:
        """By name, live."""
        return dict(sorted(self._errors.items()))

    def allocate(self, saved: Container[str]) -> None:
        """Make room for what of `saved` belongs here, to be filled by the caller."""
        self.forget()
        for parameter, name in self._names.items():
            if name in saved:
                self._errors[name] = torch.zeros_like(parameter, dtype=torch.float32).flatten()

    def forget(self) -> None:
        self._errors = {}
