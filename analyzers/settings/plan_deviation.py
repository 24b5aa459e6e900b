"""Plan against measurement: memory of a rank, and the bytes of its collectives in a step.

    for item in plan_deviations(source, run.manifest()):
        item.what, item.planned_bytes, item.measured_bytes, item.ratio

The trainer keeps its plan in `run.json`. Memory is compared on devices only, by the count of torch's allocator. It is
not compared for small models, because libraries take most of their memory. Step time is compared only if no other job
uses the ranks' devices and the device is the bottleneck. A step does not test the plan if it waits mostly for its host,
or if its kernels cannot be launched within the planned time. Traffic is the median over steps, which excludes
evaluations and checkpoints; both sides ignore calls of a few bytes (loss, norm, verdicts).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from analyzers.account.time_classes import GAPS, OWN_PHASES, late
from analyzers.policy import SHARED
from analyzers.run.records.event_log import EventLog
from analyzers.run.records.shared_devices import devices_are_shared
from analyzers.settings.policy import PlanPolicy
from analyzers.source import Source, lacking
from analyzers.wording import is_number
from probes.settings.described import ModelFacts, ParallelFacts
from probes.settings.section import read
from probes.tape import event_kinds

__all__ = ["PlanDeviation", "plan_deviations", "planned_step_s"]

_MAX_STEPS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDeviation:
    """One planned number and its measurement."""

    what: str
    """"memory", or an operation: "all_gather", "all_reduce", ..."""
    planned_bytes: int
    measured_bytes: int

    @property
    def ratio(self) -> float:
        """Measured value / planned value."""
        return self.measured_bytes / self.planned_bytes

    @property
    def as_planned(self) -> bool:
        """True if the two differ by at most `SHARED.equal_ratio`."""
        return abs(self.ratio - 1) <= SHARED.equal_ratio


def plan_deviations(source: Source, manifest: Mapping[str, Any]) -> list[PlanDeviation]:
    """Compare plan and run; empty if there is no plan, or none of its quantities was recorded."""
    plan = manifest.get("planned")
    if not isinstance(plan, Mapping) or not isinstance(plan.get("rank"), int):
        return []
    rank = plan["rank"]
    found = []
    memory = plan.get("allocated_bytes")
    least = SHARED.smallest_memory_bytes
    if plan.get("device") == "cuda" and isinstance(memory, int) and memory >= least:
        # The plan gives the peak within a step. `steps.memory_bytes` is read between steps, so it lacks all
        # activations.
        peaks = EventLog.load(source, (event_kinds.MEMORY_PEAK,)).of(event_kinds.MEMORY_PEAK)
        most = max((event.integer("allocated_bytes") for event in peaks if event.rank == rank), default=-1)
        if most > 0:
            found.append(PlanDeviation(what="memory", planned_bytes=memory, measured_bytes=most))
    traffic = plan.get("bytes_per_step")
    if isinstance(traffic, Mapping) and source.has("collectives"):
        measured = _bytes_per_step(source, rank)
        found += [
            PlanDeviation(what=str(op), planned_bytes=num_bytes, measured_bytes=measured[op])
            for op, num_bytes in traffic.items()
            if _is_size(num_bytes) and op in measured
        ]
    return found


def planned_step_s(source: Source, manifest: Mapping[str, Any]) -> float | None:
    """Planned step time (seconds); None without a plan, or if the device is not the bottleneck."""
    if devices_are_shared(source) or _waits_for_host_ratio(source) > SHARED.equal_ratio:
        return None
    planned = _number(manifest, "planned", "step_s")
    of_rank = (read(ModelFacts, manifest).num_layers or 0.0) / max(1.0, read(ParallelFacts, manifest).pp or 1.0)
    is_compared = planned is not None and planned > of_rank * PlanPolicy().launches_of_block_s
    return planned if is_compared else None


def _waits_for_host_ratio(source: Source) -> float:
    """Share of a step's time for which the device waited for its host: the median over the steps timed by CUDA events.
    0 if there are none."""
    places = (*OWN_PHASES, *GAPS)
    if lacking(source, steps=("stamped_steps", "duration_ns")):
        return 0.0
    total = " + ".join(late(place) for place in places)
    ((share,),) = source.rows(
        f"SELECT median(({total}) / duration_ns) FROM steps WHERE stamped_steps > 0 AND duration_ns > 0 AND rank >= 0"
    )
    return float(share or 0.0)


def _number(value: Any, *names: str) -> float | None:
    """The number at this path in a manifest; None if any part of the path is missing."""
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return float(value) if is_number(value) else None


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _bytes_per_step(source: Source, rank: int) -> dict[str, int]:
    rows = source.rows(
        """
        WITH newest AS (SELECT max(attempt) AS attempt FROM collectives WHERE rank = $1),
             own AS (SELECT op, step, bytes FROM collectives, newest
                     WHERE rank = $1 AND collectives.attempt = newest.attempt AND step > 1 AND bytes > $2),
             steps_seen AS (SELECT DISTINCT step FROM own ORDER BY step LIMIT $3),
             sums AS (SELECT op, step, sum(bytes) AS num_bytes FROM own SEMI JOIN steps_seen USING (step) GROUP BY ALL)
        SELECT op, median(num_bytes)::BIGINT FROM sums GROUP BY op
        """,
        [rank, SHARED.min_payload_bytes, _MAX_STEPS],
    )
    return {str(op): int(num_bytes) for op, num_bytes in rows}
