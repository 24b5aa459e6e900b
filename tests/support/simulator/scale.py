"""Runs of thousands of ranks, written as fast as the disk takes them: step rows, or a hang with calls in flight.

    python -m tests.support.simulator.scale runs/big --ranks 4096 --steps 1000 --slow-rank 17
    python -m tests.support.simulator.scale runs/hang --ranks 4096 --steps 20 --in-flight 2000 --slow-rank 17

The same model as in `engine`, with one reduction a step and so in closed form: a rank's own time is drawn, the step
lasts as long as the slowest rank and the transfer, everybody else waits. So a whole segment of steps is one array over
ranks and steps. With `--in-flight` the job ends in a hang: `--slow-rank` stops entering collectives, and every other
rank has issued so many that cannot end.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from probes.tape.format.schema import TABLES, UNSET
from probes.tape.format.writer import COMPLETE, HEADER_BYTES, OPEN
from probes.tape.rundir import RunDir

from .faults import Fault
from .introduction import introduction
from .layout import WORLD, Layout
from .program import Job
from .recording import Event, Scenario
from .tapes import EPOCH_NS, Run, record_dtype, write_segments

__all__ = ["Size", "write_big"]

_STEPS, _COLLECTIVES = TABLES["steps"], TABLES["collectives"]
_RANKS_AT_ONCE = 256
_BOOT_NS = 10**15


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Parameters of the run to write. `slow_rank` is `factor` slower from the middle of the run on; -1: none is."""

    ranks: int
    steps: int
    in_flight: int = 0
    slow_rank: int = -1
    factor: float = 1.05
    seed: int = 0
    ranks_per_node: int = 8
    tp: int = 1
    pp: int = 1
    """Coordinates of the mesh that ranks record; the model of a step stays that of plain data parallel."""


def write_big(size: Size, path: Path) -> dict[str, float]:
    """Write the run; returns rows, bytes and seconds."""
    start = time.perf_counter()
    replicas = size.ranks // (size.tp * size.pp)
    layout = Layout(pp=size.pp, dp_replicate=replicas, tp=size.tp, ranks_per_node=size.ranks_per_node)
    fault = Fault(kind="slow_compute", rank=max(size.slow_rank, 0), step=size.steps // 2, factor=size.factor)
    scenario = Scenario(seed=size.seed, layout=layout, steps=size.steps, fault=fault)
    run = Run(scenario, path)
    written, end_ns = _write_steps(size, run.run, scenario.job)
    rows = size.ranks * size.steps
    names = [
        layout.labels(WORLD)[0],
        "all_reduce",
        "float32",
        "8388608",
        "backward",
        "trainer/training/rank_training.py:121 train",
    ]
    if size.in_flight:
        written += _write_in_flight(size, run.run, end_ns)
        rows += size.ranks * size.in_flight
    run.write_names(names, in_order=True)
    run.write_events(introduction(scenario) + _end(size, end_ns))
    seconds = time.perf_counter() - start
    return {"rows": rows, "bytes": written, "seconds": seconds, "rows_per_s": rows / seconds}


def _write_steps(size: Size, run: RunDir, job: Job) -> tuple[int, float]:
    """Segments of step rows for all ranks; returns bytes and the end of the last step."""
    rng = np.random.default_rng(size.seed)
    capacity = (_STEPS.segment_bytes - HEADER_BYTES) // record_dtype(_STEPS).itemsize
    speed = np.exp(0.003 * rng.standard_normal(size.ranks))
    begin, written = 0.0, 0
    for number, first in enumerate(range(0, size.steps, capacity)):
        steps = np.arange(first + 1, min(first + capacity, size.steps) + 1)
        own = np.exp(0.008 * rng.standard_normal((size.ranks, len(steps)), dtype=np.float32)) * speed[:, None]
        if size.slow_rank >= 0:
            own[size.slow_rank, steps >= size.steps // 2] *= size.factor
        own *= (job.forward_s + job.backward_s) * 1e9
        longest = own.max(axis=0)
        transfer = 3e6 * np.exp(0.04 * rng.standard_normal(len(steps)))
        rest = (job.data_s + job.optimizer_s) * 1e9
        durations = longest + transfer + rest
        starts = begin + np.concatenate([[0.0], np.cumsum(durations)[:-1]])
        begin += float(durations.sum())
        loss = 2.0 + 8.0 * (1.0 + steps / 5.0) ** -0.35 * np.exp(0.02 * rng.standard_normal(len(steps)))
        for low in range(0, size.ranks, _RANKS_AT_ONCE):
            block = own[low : low + _RANKS_AT_ONCE]
            records = _step_records(job, steps, starts, durations, block, longest + transfer, loss)
            for index, part in enumerate(records):
                rank = low + index
                written += write_segments(
                    run.rank_dir(0, rank), _STEPS, part, rank=rank, mono_ns=_BOOT_NS,
                    wall_minus_mono_ns=EPOCH_NS - _BOOT_NS, first_segment=number, first_record=first,
                )  # fmt: skip
    return written, begin


def _step_records(
    job: Job,
    steps: npt.NDArray[Any],
    starts: npt.NDArray[Any],
    durations: npt.NDArray[Any],
    own: npt.NDArray[Any],
    compute_end: npt.NDArray[Any],
    loss: npt.NDArray[Any],
) -> npt.NDArray[Any]:
    """(ranks, steps) records of the steps tape."""
    records = np.zeros(own.shape, dtype=record_dtype(_STEPS))
    for column in _STEPS.columns:
        records[column.name] = UNSET[column.type]
    forward = own * (job.forward_s / (job.forward_s + job.backward_s))
    wait = compute_end[None, :] - own
    zeros = ("checkpoint_ns", "evaluate_ns", "data_wait_ns", "forward_wait_ns", "optimizer_wait_ns", "gc_ns")
    values: dict[str, Any] = dict.fromkeys(zeros, 0) | {
        "step": steps, "start_ns": starts + _BOOT_NS, "duration_ns": durations, "data_ns": job.data_s * 1e9,
        "forward_ns": forward, "backward_ns": own - forward + wait, "optimizer_ns": job.optimizer_s * 1e9,
        "backward_wait_ns": wait, "collective_wait_ns": wait, "cpu_ns": own, "tokens": job.local_tokens,
        "batch_index": steps - 1, "loss": loss, "local_loss": loss, "grad_norm": 0.2 * loss, "lr": 3e-4,
        "memory_bytes": job.memory_bytes, "committed": 1, "state": COMPLETE,
    }  # fmt: skip
    for name, value in values.items():
        records[name] = value
    return records


def _write_in_flight(size: Size, run: RunDir, begin_ns: float) -> int:
    """The last calls that all have ended, and those that everybody but the culprit has issued since."""
    ended = 10
    number = np.arange(ended + size.in_flight)
    records = np.zeros(len(number), dtype=record_dtype(_COLLECTIVES))
    for column in _COLLECTIVES.columns:
        records[column.name] = UNSET[column.type]
    issue = _BOOT_NS + begin_ns + number * 1e6
    values: dict[str, Any] = {
        "step": size.steps + 1, "seq": number, "bytes": 32 << 20, "issue_ns": issue, "wait_ns": 0,
        "process_group": 2, "op": 3, "dtype": 4, "shape": 5, "phase": 6, "caller": 7, "is_async": 1, "nonfinite": 0,
        "state": OPEN,
    }  # fmt: skip
    for name, value in values.items():
        records[name] = value
    records["end_ns"][:ended], records["state"][:ended] = issue[:ended] + 8e5, COMPLETE
    written = 0
    for rank in range(size.ranks):
        own = records[:ended] if rank == size.slow_rank else records
        written += write_segments(
            run.rank_dir(0, rank),
            _COLLECTIVES,
            own,
            rank=rank,
            mono_ns=_BOOT_NS,
            wall_minus_mono_ns=EPOCH_NS - _BOOT_NS,
        )
    return written


def _end(size: Size, end_ns: float) -> list[Event]:
    if size.in_flight:
        return [
            Event(-1, end_ns + 600e9, "run_ended", None, {"reason": "interrupted", "exit_code": 130, "message": ""})
        ]
    closed: dict[str, Any] = {"probe_errors": {}, "dropped_records": {}}
    events = [Event(rank, end_ns + 2e6, "rank_closed", size.steps, closed) for rank in range(size.ranks)]
    return [*events, Event(-1, end_ns + 3e8, "run_ended", None, {"reason": "finished", "exit_code": 0, "message": ""})]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write one run and print how long that took."""
    parser = argparse.ArgumentParser(prog="tests.support.simulator.scale", description="a run of many ranks, on disk")
    parser.add_argument("path", type=Path, help="the run's folder, which is created")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--in-flight", type=int, default=0, help="end in a hang with so many calls in flight a rank")
    parser.add_argument("--slow-rank", type=int, default=-1, help="a rank that is slow from the middle on, or hangs")
    parser.add_argument("--factor", type=float, default=1.05)
    parser.add_argument("--ranks-per-node", type=int, default=8, help="each node has a separate store")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel coordinates")
    parser.add_argument("--pp", type=int, default=1, help="pipeline coordinates")
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args(arguments))
    done = write_big(Size(**{key: value for key, value in options.items() if key != "path"}), options["path"])
    print(
        f"{done['rows']:,.0f} rows, {done['bytes'] / 1e6:,.0f} MB of tapes in {done['seconds']:.1f} s: "
        f"{done['rows_per_s'] / 1e6:.2f} M rows/s, {done['bytes'] / done['rows']:.0f} bytes a row"
    )


if __name__ == "__main__":
    main()
