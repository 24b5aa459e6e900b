"""Section `profiler` of the configuration: when torch.profiler records steps, and on which ranks."""

from __future__ import annotations

from pydantic import Field

from probes.settings.sections import ProfilerSettings
from trainer.config.section import Section, shared_default

__all__ = ["ProfilerConfig"]


class ProfilerConfig(Section):
    """Captures of steps with torch.profiler ([profiling](profiling.md))."""

    interval: int = shared_default(ProfilerSettings, "interval")
    """Steps between scheduled captures; 0 = none."""
    active_steps: int = shared_default(ProfilerSettings, "active_steps")
    """Steps of a scheduled capture."""
    ranks: list[int] = Field(default_factory=lambda: [0])
    """Ranks of scheduled captures; empty = all."""
    on_request: bool = shared_default(ProfilerSettings, "on_request")
    """Ranks profile their next steps when `rankscope profile` or `watch` asks."""
    on_anomaly: bool = shared_default(ProfilerSettings, "on_anomaly")
    """`watch` asks a suspect (straggler, slower steps, loss spike) and one peer to profile their next steps."""
    anomaly_steps: int = shared_default(ProfilerSettings, "anomaly_steps")
    """Steps of a capture for a finding."""
    cooldown_s: float = shared_default(ProfilerSettings, "cooldown_s")
    """Minimum time between two captures for findings (seconds)."""
    max_captures: int = shared_default(ProfilerSettings, "max_captures")
    """Maximum number of captures for findings per run."""
    ranges: bool = shared_default(ProfilerSettings, "ranges")
    """Ranges around phases in every step, for Nsight (NVTX on CUDA) and other profilers; captures always have them."""
    record_shapes: bool = shared_default(ProfilerSettings, "record_shapes")
    """Record the shapes of operators' inputs in traces."""
    with_stack: bool = shared_default(ProfilerSettings, "with_stack")
    """Record Python stacks in traces, which makes these several times as large and slow."""
    budget_mb: float = shared_default(ProfilerSettings, "budget_mb")
    """MB of traces that a rank keeps."""
    memory_history: int = shared_default(ProfilerSettings, "memory_history")
    """Number of CUDA allocations and frees that a rank records, with Python stacks, for its snapshot when memory runs
    out; 0 = none."""
