"""One capture of torch's profiler: a few steps of one rank, as a Chrome trace.

    trace = Trace(on_cuda=False, record_shapes=False, with_stack=False)
    trace.begin_step(40); ...; trace.end_step()
    trace.stop()
    trace.save(Path("rank-3.json"))

Steps are marked `ProfilerStep#<training step>`, and the trace has the process groups (`distributedInfo`), as with
torch.profiler.profile. That class is not used because it imports the compiler, which takes seconds in the middle of a
run, and numbers steps from 0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.autograd.profiler import profile, record_function

from ..torch_compat import add_trace_metadata, experimental_profiler_config, group_configs, is_profiler_enabled

__all__ = ["Trace"]


class Trace:
    """Records as soon as it is constructed. Raises RuntimeError if another profiler runs in this process."""

    def __init__(self, *, on_cuda: bool, record_shapes: bool = False, with_stack: bool = False) -> None:
        if is_profiler_enabled():
            raise RuntimeError("another profiler runs in this process, and starting a second one would stop it")
        self._profile = profile(
            use_cpu=True,
            use_device="cuda" if on_cuda else None,
            record_shapes=record_shapes,
            with_stack=with_stack,
            use_kineto=True,
            **({} if with_stack else _trace_only()),
        )
        self._mark: record_function | None = None
        self._profile.__enter__()  # type: ignore[no-untyped-call]  # torch: no types
        if about := _distributed_info():
            add_trace_metadata("distributedInfo", json.dumps(about))

    def begin_step(self, number: int) -> None:
        """Mark the start of a step."""
        self._mark = record_function(f"ProfilerStep#{number}")
        self._mark.__enter__()  # type: ignore[no-untyped-call]  # torch: no types

    def end_step(self) -> None:
        """Mark the end of the step."""
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None

    def stop(self) -> None:
        """Stop recording; on a GPU this waits for the device."""
        self.end_step()
        self._profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch: no types

    def save(self, path: Path) -> None:
        """Write the trace as JSON."""
        self._profile.export_chrome_trace(str(path))  # type: ignore[no-untyped-call]  # torch: no types


def _trace_only() -> dict[str, Any]:
    """Option that creates no Python event objects, which halves the time to stop. torch before 2.13 lacks it, and
    stacks need those objects."""
    try:
        return {"experimental_config": experimental_profiler_config(trace_only=True)}
    except TypeError:
        return {}


def _distributed_info() -> dict[str, Any]:
    """Process groups as torch.profiler.profile writes them; empty without torch.distributed."""
    if not dist.is_available() or not dist.is_initialized():
        return {}
    return {
        "backend": dist.get_backend(),
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "pg_count": dist.get_pg_count(),
        "pg_config": group_configs(),
    }
