"""Section `profiler` of the configuration: when torch.profiler records steps, and of which ranks."""

from __future__ import annotations

from pydantic import Field

from probes.profiling.settings import MAX_STEPS
from trainer.config.section import Section

__all__ = ["ProfilerConfig"]


class ProfilerConfig(Section):
    """Steps that are recorded with torch.profiler, each capture a Chrome trace in `traces/` of the run's folder. How to
    read them is in [profiling](profiling.md)."""

    interval: int = Field(default=0, ge=0)
    """Steps between scheduled captures; 0 = none."""
    active_steps: int = Field(default=3, ge=1, le=MAX_STEPS)
    """Steps of a scheduled capture."""
    ranks: list[int] = Field(default_factory=lambda: [0])
    """Ranks of scheduled captures; empty = all."""
    on_request: bool = True
    """Ranks profile their next steps when `rankscope profile` or `watch` asks."""
    on_anomaly: bool = False
    """`watch` asks a suspect (straggler, slower steps, loss spike) and one peer to profile their next steps."""
    anomaly_steps: int = Field(default=5, ge=1, le=MAX_STEPS)
    """Steps of such a capture."""
    cooldown_s: float = Field(default=300.0, ge=0)
    """Least time between two such captures (seconds)."""
    max_captures: int = Field(default=8, ge=0)
    """Such captures in a run at most."""
    ranges: bool = False
    """Ranges around phases in every step, for Nsight (NVTX on CUDA) and profilers of your own; a capture has them
    anyway."""
    record_shapes: bool = False
    """Traces hold the shapes of operators' inputs."""
    with_stack: bool = False
    """Traces hold Python stacks; several times as large and slow."""
    budget_mb: float = Field(default=256.0, gt=0)
    """MB of traces that a rank keeps; older ones are removed, those of the schedule first."""
    memory_history: int = Field(default=0, ge=0)
    """Allocations and frees on CUDA that a rank remembers, with Python stacks, for its snapshot when memory runs out;
    0 = none. Costs about 2 µs an allocation (torch's number)."""
