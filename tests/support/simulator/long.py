"""Long healthy runs of a few ranks: step rows with every noise of `noise`, a segment of steps at a time.

    run = write_long(LongRun(seed=3, noise=OVERSUBSCRIBED, steps=20_000), Path("runs/long"))

One reduction a step, so that a step has a closed form: a rank's own time is drawn, the step lasts as long as its
slowest rank and the transfer, everybody else waits. A step takes some microseconds (in `engine` some milliseconds),
which is enough for a million steps over which detectors must stay silent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from probes.tape.format.schema import TABLES, UNSET
from probes.tape.format.writer import COMPLETE, HEADER_BYTES
from probes.tape.rundir import RunDir

from .curves import Curves
from .introduction import introduction
from .layout import Layout
from .noise import QUIET, Noise
from .program import Job
from .recording import Event, Scenario
from .tapes import EPOCH_NS, Run, record_dtype, write_segments

__all__ = ["LongRun", "write_long"]

_STEPS = TABLES["steps"]
_BOOT_NS = 10**15
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRun:
    """Parameters of the run to write. `uneven_ratio`: variation of a rank's work with the length of its sequences."""

    seed: int
    steps: int = 20_000
    ranks: int = 8
    noise: Noise = QUIET
    uneven_ratio: float = 0.0
    busy_rank: int = -1
    """A rank that evaluates and saves at every 200th step, as rank 0 does; -1: none."""


def write_long(long: LongRun, path: Path) -> RunDir:
    """Write the run into a new folder."""
    scenario = Scenario(
        seed=long.seed, steps=long.steps, noise=long.noise, layout=Layout(dp_replicate=long.ranks, ranks_per_node=8)
    )
    run, job = Run(scenario, path), scenario.job
    rng = np.random.default_rng([long.seed, 1])
    speed = np.exp(long.noise.rank_ratio * rng.standard_normal(long.ranks))[:, None]
    curves = Curves(np.random.default_rng([long.seed, 2]), long.noise, None)
    capacity = (_STEPS.segment_bytes - HEADER_BYTES) // record_dtype(_STEPS).itemsize
    begin_ns = 0.0
    for number, first in enumerate(range(0, long.steps, capacity)):
        steps = np.arange(first + 1, min(first + capacity, long.steps) + 1)
        columns = _columns(long, job, rng, speed, steps, begin_ns)
        columns |= _numbers(long, curves, rng, steps)
        records = np.zeros((long.ranks, len(steps)), dtype=record_dtype(_STEPS))
        for column in _STEPS.columns:
            records[column.name] = UNSET[column.type]
        for name, value in columns.items():
            records[name] = value
        begin_ns = float(columns["start_ns"][-1] - _BOOT_NS + columns["duration_ns"][-1])
        for rank in range(long.ranks):
            write_segments(
                run.run.rank_dir(0, rank), _STEPS, records[rank], rank=rank, mono_ns=_BOOT_NS,
                wall_minus_mono_ns=EPOCH_NS - _BOOT_NS, first_segment=number, first_record=first,
            )  # fmt: skip
    run.write_names([], in_order=True)
    closed: dict[str, Any] = {"probe_errors": {}, "dropped_records": {}}
    ends = [Event(rank, begin_ns + 2e6, "rank_closed", long.steps, closed) for rank in range(long.ranks)]
    finished = {"reason": "finished", "exit_code": 0, "message": ""}
    run.write_events([*introduction(scenario), *ends, Event(-1, begin_ns + 3e8, "run_ended", None, finished)])
    return run.run


def _columns(
    long: LongRun, job: Job, rng: np.random.Generator, speed: _Floats, steps: npt.NDArray[Any], begin_ns: float
) -> dict[str, Any]:
    """Times in ns: of the step (one a step) and of its phases (ranks, steps)."""
    noise, shape = long.noise, (long.ranks, len(steps))

    def lognormal(ratio: float, size: Any = shape) -> _Floats:
        return np.exp(ratio * rng.standard_normal(size))

    common = lognormal(noise.step_ratio, len(steps)) * speed
    if long.uneven_ratio:
        common = common * lognormal(long.uneven_ratio)
    forward, backward = (
        seconds * 1e9 * common * lognormal(noise.compute_ratio) for seconds in (job.forward_s, job.backward_s)
    )
    # The operating system takes the thread away now and then, and Python's collector stops it at each rank's own time.
    step_s = job.forward_s + job.backward_s
    taken = rng.poisson(noise.preemptions_per_s * step_s, shape) * rng.exponential(noise.preemption_s, shape) * 1e9
    gc = (rng.random(shape) < 1.0 / noise.gc_interval_steps) * noise.gc_pause_s * 1e9
    backward = backward + taken + gc
    data = job.data_s * 1e9 * lognormal(noise.data_ratio)
    data = data * np.where(rng.random(shape) < noise.data_miss_probability, noise.data_miss_factor, 1.0)
    optimizer = job.optimizer_s * 1e9 * common * lognormal(noise.compute_ratio)
    checkpoint = np.zeros(shape)
    if long.busy_rank >= 0:
        checkpoint[long.busy_rank, steps % 200 == 0] = job.checkpoint_s * 1e9
    transfer = 3e6 * lognormal(noise.transfer_ratio, len(steps))
    transfer *= np.where(rng.random(len(steps)) < noise.transfer_tail_probability, noise.transfer_tail_factor, 1.0)
    # All meet at the end of the backward pass; what a rank does after that delays its next arrival.
    rest = optimizer + checkpoint
    rest_before = np.concatenate([np.zeros((long.ranks, 1)), rest[:, :-1]], axis=1)
    arrival = rest_before + data + forward + backward
    meeting = arrival.max(axis=0) + transfer
    wait = meeting - arrival
    first = steps == 1
    duration = meeting - rest_before + optimizer + checkpoint + first * noise.compile_s * 1e9
    ends = begin_ns + np.cumsum(duration.max(axis=0))
    starts = np.concatenate([[begin_ns], ends[:-1]])
    return {
        "step": steps, "start_ns": starts + _BOOT_NS, "duration_ns": duration.max(axis=0), "data_ns": data,
        "forward_ns": forward + first * noise.compile_s * 1e9, "backward_ns": backward + wait,
        "optimizer_ns": optimizer, "checkpoint_ns": checkpoint, "evaluate_ns": 0, "data_wait_ns": 0,
        "forward_wait_ns": 0, "backward_wait_ns": wait, "optimizer_wait_ns": 0, "collective_wait_ns": wait,
        "gc_ns": gc, "run_delay_ns": taken, "cpu_ns": forward + backward - taken, "tokens": job.local_tokens,
        "memory_bytes": job.memory_bytes, "committed": 1, "state": COMPLETE,
    }  # fmt: skip


def _numbers(long: LongRun, curves: Curves, rng: np.random.Generator, steps: npt.NDArray[Any]) -> dict[str, Any]:
    """Loss and gradient norm: those of `curves`."""
    readings = [curves.reading(int(step), int(step) - 1, False) for step in steps]
    loss = np.array([reading.loss for reading in readings])
    spread = np.exp(long.noise.local_loss_ratio * rng.standard_normal((long.ranks, len(steps))) / math.sqrt(long.ranks))
    return {
        "loss": loss, "local_loss": loss * spread, "grad_norm": np.array([reading.grad_norm for reading in readings]),
        "lr": np.array([reading.lr for reading in readings]), "batch_index": steps - 1,
    }  # fmt: skip
