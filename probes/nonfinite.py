"""Does a tensor hold NaN or Inf? One pass over memory, on the host.

    holds_nonfinite([bucket])        # True, False, or UNSET where that is not asked of such a tensor
    nonfinite_and_peak([bucket])     # the same, and the largest absolute value: of gradients before the reduction

A sum of finite numbers may overflow, but a sum is never finite with a NaN or an Inf in it. So the sum, the fastest pass
that there is, clears a tensor, and only a sum that is not finite pays for a second look.
(Measured at 4 MB of float32 on one core: sum 59 us, aminmax 119 us, the maximum norm 2980 us.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .tape.schema import UNSET

__all__ = ["holds_nonfinite", "nonfinite_and_peak"]

_UNKNOWN = int(UNSET["bool"])
_strided = torch.strided
_isfinite = math.isfinite


def holds_nonfinite(tensors: Sequence[torch.Tensor]) -> int:
    """Return 1 if any of `tensors` holds NaN or Inf, else 0; UNSET for integers, sparse tensors and other devices."""
    found = _UNKNOWN
    for tensor in tensors:
        if not tensor.is_floating_point() or not tensor.is_cpu or tensor.layout is not _strided:
            continue
        if tensor.requires_grad:
            tensor = tensor.detach()
        if not _isfinite(tensor.sum().item()) and tensor.numel():
            low, high = torch.aminmax(tensor)
            if not (_isfinite(low.item()) and _isfinite(high.item())):
                return 1
        found = 0
    return found


def nonfinite_and_peak(tensors: Sequence[torch.Tensor]) -> tuple[int, float]:
    """Return `holds_nonfinite` and the largest absolute value of tensors on the host, in one pass over memory.

    The value is NaN where a tensor holds NaN or Inf, 0 where nothing is known.
    """
    highest = 0.0
    for tensor in tensors:
        if not tensor.is_floating_point() or not tensor.is_cpu or tensor.layout is not _strided:
            return holds_nonfinite(tensors), 0.0
        if tensor.numel():
            extremes = torch.aminmax(tensor.detach() if tensor.requires_grad else tensor)
            low, high = extremes.min.item(), extremes.max.item()
            if not (_isfinite(low) and _isfinite(high)):
                return 1, math.nan
            highest = max(highest, -low, high)
    return (0 if tensors else _UNKNOWN), highest
