"""Set up profiling for a recorder, as configured in section `profiler`.

profile_steps(run, recorder, {"profiler": {"interval": 100}}, node_rank=0)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..fail_open import failing_open
from ..settings.section import read_config
from ..settings.sections import ProfilerSettings
from ..tape.rundir import RunDir
from ..tape_recorder import TapeRecorder
from .step_profiler import StepProfiler

__all__ = ["profile_steps"]


def profile_steps(run: RunDir, recorder: TapeRecorder, config: Mapping[str, Any], *, node_rank: int) -> None:
    """Profile steps on schedule and on request, open ranges and keep the memory history, as configured."""
    with failing_open("profiler"):
        settings = read_config(ProfilerSettings, config)
        on_cuda = torch.cuda.device_count() > 0  # counted by NVML, without initialising CUDA
        if settings.interval or settings.on_request:
            recorder.profiling = StepProfiler(run, recorder, settings, node_rank=node_rank, on_cuda=on_cuda)
        if settings.ranges:
            from .ranges import Ranges

            recorder.ranges = Ranges(nvtx=on_cuda)
        if on_cuda:
            from .memory_snapshots import MemorySnapshots

            recorder.memory = MemorySnapshots(run, recorder, history=settings.memory_history)
