"""Section `recovery` of the configuration: automatic actions on findings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from probes.settings.sections import DeviceResponse, RecoverySettings
from trainer.config.section import Section, shared_default

__all__ = ["RecoveryConfig"]


class RecoveryConfig(Section):
    enabled: bool = shared_default(RecoverySettings, "enabled")
    """Act on findings: skip, roll back, restart."""
    verdict: Literal["auto", "at_once", "late"] = "auto"
    """`late`: read a step's numbers while the next one is computed; the device skips the update of a bad step. `auto`:
    late on GPUs, if the layout allows it."""
    max_restarts: int = Field(default=3, ge=0)
    """Restarts of the worker group before the run gives up."""
    max_rollbacks: int = Field(default=8, ge=0)
    """Rollbacks before the run stops with a report."""
    max_replays: int = Field(default=8, ge=0)
    """Refused steps per attempt that are replayed to see whether the fault recurs; 0 = none."""
    hang_floor_s: float = shared_default(RecoverySettings, "hang_floor_s")
    """A silence shorter than this is never called a hang (seconds)."""
    startup_s: float = shared_default(RecoverySettings, "startup_s")
    """Before the first step, this time without a record is a hang, unless a rank computes or reads files (seconds)."""
    grace_s: float = shared_default(RecoverySettings, "grace_s")
    """Time limit for all processes after SIGTERM or Ctrl-C (seconds). Ranks have 7 s less to finish their step and save
    a checkpoint; after that they exit without one."""
    rejoin_s: float = Field(default=30.0, ge=0)
    """How long a restart waits for more nodes once the minimum has joined (seconds)."""
    max_failures_per_device: int = Field(default=-1, ge=-1)
    """Deaths by a signal, hangs included, before a device is excluded; 0 = never, -1 = 3 on GPUs and never on CPUs."""
    max_failures_per_node: int = Field(default=-1, ge=-1)
    """Deaths over all devices of a node, and losses of the node, before it is excluded; 0 = never, -1 = 6 on GPUs
    only."""
    max_corruptions_per_device: int = Field(default=2, ge=1)
    """Corruptions of state or gradients by one device after which the run ends."""
    on_straggler: DeviceResponse = shared_default(RecoverySettings, "on_straggler")
    """Action on a rank that is slow because of its device: report it; exclude the device if the run gains more than it
    loses; exclude it only if a spare device or node can replace it."""
    straggler_after_s: float = shared_default(RecoverySettings, "straggler_after_s")
    """How long a rank must have been reported as slow before it is excluded or replaced (seconds)."""
    straggler_speedup: float = shared_default(RecoverySettings, "straggler_speedup")
    """Minimum ratio of the step time with the slow rank to that without it."""
    on_xid: DeviceResponse = "exclude"
    """Action on an XID for which NVIDIA's catalogue recommends replacing the device."""
    exclusion_cooldown_s: float = shared_default(RecoverySettings, "exclusion_cooldown_s")
    """Seconds between two exclusions or replacements."""
    exclusion_dry_run: bool = shared_default(RecoverySettings, "exclusion_dry_run")
    """Only record as events what these settings would do."""
