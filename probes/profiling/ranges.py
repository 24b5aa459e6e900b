"""Ranges around the phases of a step, for torch.profiler and, on a GPU, for Nsight Systems.

    recorder.ranges = Ranges(nvtx=torch.cuda.is_available())
    with recorder.span("forward"): ...          # a range `rankscope.forward` in the trace, NVTX range `forward`

A range of torch.profiler costs microseconds even without a running profiler. So ranges are on only during a capture, or
if `profiler.ranges` is set.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.profiler import record_function

__all__ = ["PREFIX", "Ranges"]

PREFIX = "rankscope."
"""Prefix of phase names in a trace."""


class Ranges:
    """Opens ranges of one process. `nvtx`: in Nsight's format too, which needs CUDA."""

    def __init__(self, *, nvtx: bool) -> None:
        self._nvtx = nvtx

    def enter(self, kind: str) -> Callable[[], None]:
        """Open a range; returns a function that closes it, to be called from the same thread."""
        opened = record_function(PREFIX + kind)
        opened.__enter__()  # type: ignore[no-untyped-call]  # torch: no types
        if self._nvtx:
            torch.cuda.nvtx.range_push(kind)  # type: ignore[no-untyped-call]  # torch: no types

        def leave() -> None:
            if self._nvtx:
                torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]  # torch: no types
            opened.__exit__(None, None, None)

        return leave
