"""Size of what a run records, before it starts: bytes of tapes and store a step and rank, and an hour.

    volume = expected_records(config, plan, calls_per_step=12)
    volume.tape_bytes, volume.store_bytes            # a step of one rank
    volume.per_hour(step_s=0.4)                      # bytes a rank

Records on tapes have fixed sizes (`probes.tape.writer`). The bytes of a row in DuckDB are rough estimates and not
measured: they depend on the values and on how full its blocks are.
"""

from __future__ import annotations

from dataclasses import dataclass

from probes.tape.schema import TABLES
from probes.tape.writer import record_layout
from trainer.config.config import Config
from trainer.layout.plan import Plan

__all__ = ["RecordVolume", "expected_records"]

STORE_BYTES = {"steps": 150.0, "spans": 26.0, "collectives": 30.0, "gradients": 24.0, "nccl_calls": 60.0}
"""Estimated bytes per row in the store."""
SPANS_A_STEP = 6
"""Spans of a step with one microbatch: data, forward, backward, optimizer and pieces of them."""
SPANS_A_MICROBATCH = 2
SMALL_CALLS = 3
"""Loss, norm and verdict, which the traffic of a plan leaves out."""
TENSORS_A_LAYER = 9
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordVolume:
    """Bytes of one rank and step."""

    tape_bytes: float
    store_bytes: float

    def per_hour(self, step_s: float, *, on_tapes: bool = True) -> float:
        """Bytes of a rank and hour; without tapes: what stays where ingested tapes are retired."""
        return (self.store_bytes + (self.tape_bytes if on_tapes else 0.0)) * HOUR_S / step_s


def expected_records(config: Config, plan: Plan, *, calls_per_step: int, on_device: bool) -> RecordVolume:
    """Estimate for a configuration; `on_device`: NCCL's plugin records calls, and the store has them twice."""
    probes = config.probes
    if not probes.enabled:
        return RecordVolume(tape_bytes=0.0, store_bytes=0.0)
    rows: dict[str, float] = {"steps": 1.0, "spans": SPANS_A_STEP + SPANS_A_MICROBATCH * (plan.num_microbatches - 1)}
    calls = calls_per_step + SMALL_CALLS if probes.collectives else 0
    if probes.gradient_interval:
        rows["gradients"] = TENSORS_A_LAYER * config.model.num_layers / plan.pp / probes.gradient_interval
    on_tape = rows | {"nccl_calls" if on_device else "collectives": calls}
    in_store = on_tape | {"collectives": calls}
    return RecordVolume(
        tape_bytes=sum(number * record_layout(TABLES[table])[0].size for table, number in on_tape.items()),
        store_bytes=sum(number * STORE_BYTES[table] for table, number in in_store.items()),
    )
