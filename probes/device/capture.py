"""Detect that a CUDA graph is being captured on this stream; probes must not touch the device then.

Our kernels or events would become part of the graph, and a query or an allocation would end the capture.
"""

from __future__ import annotations

import torch

__all__ = ["is_capturing"]


def is_capturing() -> bool:
    """Return True inside a capture of a CUDA graph. If CUDA is not initialised, return False and do not touch the
    driver."""
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
