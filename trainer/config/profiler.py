"""Section `profiler` of the configuration: when torch.profiler records steps, and on which ranks."""

from __future__ import annotations

from pydantic import Field

from probes.settings.sections import ProfilerSettings
from trainer.config.section import Section, taken

__all__ = ["ProfilerConfig"]


class ProfilerConfig(Section):
    """Captures of steps with torch.profiler ([profiling](profiling.md))."""

    interval: int = taken(ProfilerSettings, "interval")
    """Steps between scheduled captures; 0 = none."""
    active_steps: int = taken(ProfilerSettings, "active_steps")
    """Steps of a scheduled capture."""
    ranks: list[int] = Field(default_factory=lambda: [0])
    """Ranks of scheduled captures; empty = all."""
    on_request: bool = taken(ProfilerSettings, "on_request")
    """Ranks profile their next steps when `rankscope profile` or `watch` asks."""
    on_anomaly: bool = taken(ProfilerSettings, "on_anomaly")
    """`watch` asks a suspect (straggler, slower steps, loss spike) and one peer to profile their next steps."""
    anomaly_steps: int = taken(ProfilerSettings, "anomaly_steps")
    """Steps of a capture for a finding."""
    cooldown_s: float = taken(ProfilerSettings, "cooldown_s")
    """Minimum time between two captures for findings (seconds)."""
    max_captures: int = taken(ProfilerSettings, "max_captures")
    """Maximum number of captures for findings per run."""
    ranges: bool = taken(ProfilerSettings, "ranges")
    """Ranges around phases in every step, for Nsight (NVTX on CUDA) and other profilers; captures always have them."""
    record_shapes: bool = taken(ProfilerSettings, "record_shapes")
    """Record the shapes of operators' inputs in traces."""
    with_stack: bool = taken(ProfilerSettings, "with_stack")
    """Record Python stacks in traces, which makes these several times as large and slow."""
    budget_mb: float = taken(ProfilerSettings, "budget_mb")
    """MB of traces that a rank keeps."""
    memory_history: int = taken(ProfilerSettings, "memory_history")
    """Number of CUDA allocations and frees that a rank records, with Python stacks, for its snapshot when memory runs
    out; 0 = none."""
