"""Rows of gradients and fingerprints, which are taken at intervals, and of gradients where a step went wrong.

samples = Samples(engine, job, seed, rng)
samples.take(step, reading, bad=False, fault=None)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .curves import Reading
from .engine import Engine
from .faults import Fault
from .layout import Layout
from .program import PARAMETERS, Job
from .taints import Taints

__all__ = ["Samples", "is_hit", "parameter_name"]

GRADIENT_INTERVAL = 10
FINGERPRINT_INTERVAL = 10


def parameter_name(layout: Layout, stage: int, block: int, parameter: str) -> str:
    """Name in the model."""
    return f"blocks.{stage * layout.layers + block}.{parameter}"


def is_hit(taints: Taints, parameter: str) -> bool:
    """Return True if a parameter is hit by a taint; a taint of one element hits only one parameter."""
    return not taints.one_element or parameter == PARAMETERS[2]


class Samples:
    """Writes into the engine's log."""

    def __init__(self, engine: Engine, job: Job, seed: int, rng: np.random.Generator) -> None:
        self._engine, self._layout, self._job, self._seed, self._rng = engine, engine.layout, job, seed, rng

    def take(self, step: int, reading: Reading, *, bad: bool, fault: Fault | None) -> None:
        """Rows of gradients and fingerprints, at their intervals or where a step went wrong."""
        layout, now = self._layout, self._engine.now.copy()
        if step % GRADIENT_INTERVAL == 0 or bad:
            stages = layout.coordinates()["pp"]
            for stage in range(layout.pp):
                ranks = np.flatnonzero((stages == stage) & np.isfinite(now))
                if len(ranks):
                    self._gradient_rows(ranks, step, stage, reading, now[ranks])
        if step % FINGERPRINT_INTERVAL == 0 and layout.dp_replicate > 1:
            self._fingerprint_rows(step, now, fault)
        elif step % FINGERPRINT_INTERVAL == 0:
            self._chain_rows(step, now, fault)

    def _gradient_rows(self, ranks: Any, step: int, stage: int, reading: Reading, now: Any) -> None:
        engine, layout = self._engine, self._layout
        share = reading.grad_norm / np.sqrt(layout.layers * layout.pp * len(PARAMETERS) * layout.dp_shard * layout.tp)
        replicas = layout.coordinates()["dp_shard"][ranks] * layout.tp + layout.coordinates()["tp"][ranks]
        for block in range(layout.layers):
            bad = engine.taints.of(f"grad{block}")
            for parameter in PARAMETERS:
                name = parameter_name(layout, stage, block, parameter)
                number = engine.log.names(name)
                # Replicas hold the same reduced gradient; shards hold parts of it.
                scale = np.exp(0.3 * self._rng.standard_normal(layout.dp_shard * layout.tp))[replicas]
                norm = share * scale
                largest = norm * 0.05
                count = np.zeros(len(ranks), dtype=np.int64)
                if bad is not None and bad[ranks].any() and is_hit(engine.taints, parameter):
                    hit = bad[ranks]
                    each = (
                        1 if engine.taints.one_element else self._job.block_bytes // 16 // layout.dp_shard // layout.tp
                    )
                    norm, largest = np.where(hit, np.nan, norm), np.where(hit, np.nan, largest)
                    count = hit * np.int64(each)
                engine.log.gradients.append((ranks, step, number, norm, largest, count, now))

    def _fingerprint_rows(self, step: int, now: Any, fault: Fault | None) -> None:
        layout, log = self._layout, self._engine.log
        ranks = np.flatnonzero(np.isfinite(now))
        at = layout.coordinates()
        part = (at["pp"] * layout.dp_shard + at["dp_shard"]) * layout.tp + at["tp"]
        for stage in range(layout.pp):
            own = ranks[at["pp"][ranks] == stage]
            for block in range(layout.layers):
                for parameter in PARAMETERS:
                    name = parameter_name(layout, stage, block, parameter)
                    for prefix in ("", "exp_avg."):
                        hashes = _mix(part[own], step * 1_000_003 + log.names(prefix + name) * 7_919 + self._seed)
                        if fault is not None and _is_flipped(fault, step, block, parameter, prefix):
                            hashes = np.where(own == fault.rank, _mix(hashes, 77 + step), hashes)
                        log.fingerprints.append((own, step, 1, log.names(prefix + name), hashes, now[own], None))

    def _chain_rows(self, step: int, now: Any, fault: Fault | None) -> None:
        """Shards that no other rank holds: hashed after the optimizer's step and again before the next. One row for
        all of a rank's tensors, and one for a tensor that differs then."""
        layout, log = self._layout, self._engine.log
        ranks = np.flatnonzero(np.isfinite(now))
        expected = _mix(ranks, step * 1_000_003 + self._seed)
        hashes = expected.copy()
        if fault is not None and fault.kind == "bit_flip_shard":
            first = -(-fault.step // FINGERPRINT_INTERVAL) * FINGERPRINT_INTERVAL
            # The next update starts from what the flip left: from there on before and after agree again.
            own = ranks[(ranks == fault.rank) & (step == first)]
            if len(own):
                hashes = np.where(ranks == fault.rank, _mix(hashes, 77 + step), hashes)
                stage = int(layout.coordinates()["pp"][fault.rank])
                name = log.names("model." + parameter_name(layout, stage, fault.block, PARAMETERS[2]))
                before = _mix(own, step * 7_919 + self._seed)
                log.fingerprints.append((own, step, -1, name, _mix(before, 77), now[own], before))
        log.fingerprints.append((ranks, step, -1, log.names("(all)"), hashes, now[ranks], expected))


def _is_flipped(fault: Fault, step: int, block: int, parameter: str, prefix: str) -> bool:
    """A flipped parameter stays different, because all replicas add the same update; so does a moment."""
    if step < fault.step or block != fault.block or parameter != PARAMETERS[2]:
        return False
    return fault.kind == "bit_flip_optimizer" or (fault.kind == "bit_flip" and prefix == "")


def _mix(values: Any, salt: int) -> Any:
    """A 62-bit hash of each number."""
    mixed = (np.asarray(values).astype(np.uint64) + np.uint64(salt % 2**63)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return (mixed ^ (mixed >> np.uint64(27))).astype(np.uint64).view(np.int64) >> 1
