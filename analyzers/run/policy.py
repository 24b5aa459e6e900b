"""Stall limits: how long a run may make no progress, by its current phase, before it counts as stalled.

stall_policy(run.manifest()).floor_s        # 5.0, or what the run was configured with
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from probes.settings.section import read
from probes.settings.sections import RecoverySettings

__all__ = ["StallPolicy", "stall_policy"]


_DEFAULT = RecoverySettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class StallPolicy:
    """When silence is a stall. Limits depend on the phase; other tools have one timeout of several minutes."""

    floor_s: float = _DEFAULT.hang_floor_s
    """Shortest silence that counts (seconds); `recovery.hang_floor_s`. Source: above a full garbage collection."""
    step_factor: float = 5.0
    """Shortest silence that counts, in median steps (ratio). Source: convention; a step writes dozens of records, so a
    silence of one step is long."""
    startup_s: float = _DEFAULT.startup_s
    """Limit before an attempt's first finished step and outside of steps (seconds); `recovery.startup_s`. Source:
    convention; imports, compilation, first batch, rendezvous, teardown."""
    startup_at_work_s: float = 1800.0
    """Limit of a start in which `watch` sees a rank compute or read files outside of any collective (seconds). In such
    a start, `startup_s` counts from the last sign of work. Once a step has ended, a silence in which all ranks work may
    last up to `startup_s`. Source: convention; first builds of large kernels take tens of minutes.
    """
    busy_ratio: float = 0.05
    """CPU time / wall time from which a silent rank and its children count as working (ratio). Source: measured, a rank
    of `rankscope train` that waits takes below 0.01, and a compiler on a busy machine some tenths of a core.
    """
    busy_read_bytes_per_s: float = 1 << 20
    """Rate of reading files from which a silent rank and its children also count as working (bytes per second).
    Source: convention; imports from a slow disk take little CPU time.
    """
    compile_s: float = 600.0
    """Limit in a span `compile` (seconds). Source: convention; torch.compile of a large model takes minutes."""
    span_s: float = 120.0
    """Limit in a span `checkpoint`, `evaluate` (which may leave no record inside), `replay` or `profile` (seconds).
    Source: convention; a slow file system is another fault, not a hang. A replay, which checks every operation, takes
    several times as long as a step. On a busy machine torch.profiler needs 10 us per event when it stops, and a capture
    may have millions of events."""
    unwatched_s: float = 60.0
    """Silence (seconds) after which a run without a `watch` counts as dead, and the shortest gap in a host's readings,
    while steps continue, which shows that the host's `watch` was gone. Source: convention; with a `watch`, the
    processes themselves are checked, and a launcher replaces a silent one within 15 s."""
    watch_late_s: float = 15.0
    """Longest lag of a `watch` behind the ranks that is not reported, and longest time until all ranks are silent after
    a node is lost (seconds). A standstill that began earlier has another cause, and if ranks continue for longer, no
    node was lost. Source: twice the longest pause of a `watch` on a busy machine."""
    sign_of_life_s: float = 5.0
    """A gap shows that a host's `watch` was gone only if its readings are usually at most this far apart (seconds).
    Source: convention; five times the usual interval of 1 s."""

    def of_phase(self, phase: str) -> float:
        """Limit for a kind of span (seconds); 0 if the kind has no limit."""
        if phase == "compile":
            return self.compile_s
        return self.span_s if phase in ("checkpoint", "evaluate", "eval", "replay", "profile") else 0.0


def stall_policy(manifest: Mapping[str, Any]) -> StallPolicy:
    """The stall limits with which the run was configured."""
    given = read(RecoverySettings, manifest)
    return StallPolicy(floor_s=given.hang_floor_s, startup_s=given.startup_s)
