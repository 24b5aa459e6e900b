"""CPU time of the rounds of `watch`'s two loops, by part, on tapes that this process writes.

    python -m benchmarks.cost.watch_rounds                                   # 40 rounds, 18 steps a second of two ranks
    python -m benchmarks.cost.watch_rounds --steps-per-s 160 --rounds 60 --json rounds.json

Before each round, one second's worth of records is written without waiting, so other load changes the figures little.

| figure | meaning |
|---|---|
| ms a round | CPU time of this process per round, all threads: median and 10th percentile |
| ms a second | CPU time per second of both loops, with store rounds as often as `watch.records.tick_pace` allows |
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from analyzers.run.policy import stall_policy
from benchmarks.harness import argument_parser, write_json
from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.format.writer import COMPLETE
from probes.tape.rundir import NODE_RANK, RunDir
from probes.tape_recorder import TapeRecorder
from store import Ingester
from store.runs.cached_store import CachedStore
from watch import ingest_loop
from watch.exporting.exports import exports
from watch.ingest_loop import IngestLoop
from watch.live import LiveJudge
from watch.live_tapes import LiveTapes
from watch.records.tape_sync import TapeSync
from watch.records.tick_pace import CORE_SHARE, MAX_REST_S, TICK_S
from watch.standstill_loop import StandstillLoop

WARM_ROUNDS = 8
SYNC_ROUNDS = 5
PARTS: tuple[tuple[Any, str, str], ...] = (
    (StandstillLoop, "tick", "standstill loop"),
    (IngestLoop, "tick", "store's thread"),
    (IngestLoop, "_ingest", "- ingest"),
    (CachedStore, "_store", "- open the store"),
    (ingest_loop, "stale_ranks", "- stale ranks"),
    (LiveJudge, "record_findings", "- live analyses"),
    (IngestLoop, "_export", "- export (each 15th)"),
    (TapeSync, "sync", "sync of tapes (each 5th)"),
)


class Ranks:
    """Two ranks that record steps with four phases and some collectives."""

    def __init__(self, run: RunDir, calls: int) -> None:
        self._calls, self._number = calls, 0
        self._recorders = [
            TapeRecorder(run.rank_dir(0, r), rank=r, attempt=0, world_size=2, local_rank=r) for r in (0, 1)
        ]
        self._recorders[0].event(event_kinds.RUN_STARTED, node_rank=0, launcher_pid=0)
        self._recorders[0].event(event_kinds.ATTEMPT_STARTED, world_size=2)

    def train(self, steps: int) -> None:
        """Record steps."""
        for _ in range(steps):
            self._number += 1
            for recorder in self._recorders:
                self._step(recorder)

    def _step(self, recorder: TapeRecorder) -> None:
        with recorder.step(self._number):
            for phase in ("data", "forward", "backward", "optimizer"):
                with recorder.span(phase):
                    if phase == "backward":
                        self._collectives(recorder)
            recorder.log(loss=1.0, local_loss=1.0, grad_norm=1.0, lr=1e-3, committed=True)

    def _collectives(self, recorder: TapeRecorder) -> None:
        tape, now_ns = recorder.tape("collectives"), time.monotonic_ns()
        row = dict(zip((column.name for column in tape.table.columns), tape.unset_row(), strict=True))
        texts = {
            "process_group": "world:0-1",
            "op": "all_reduce",
            "dtype": "float32",
            "shape": "16",
            "phase": "backward",
        }
        row |= {name: recorder.name(text) for name, text in texts.items()}
        row |= {"step": self._number, "bytes": 64, "issue_ns": now_ns, "end_ns": now_ns + 1000, "wait_ns": 1000}
        for call in range(self._calls):
            tape.append(COMPLETE, *(row | {"seq": self._number * self._calls + call}).values())

    def close(self) -> None:
        for recorder in self._recorders:
            recorder.close()


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """{part: CPU milliseconds of each round}."""
    spent: Counter[str] = Counter()
    rounds: list[Counter[str]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for place, name, label in PARTS:
            stack.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, _timed(getattr(place, name), spent, label))
        run, _ = RunDir.adopt(Path(folder) / "run")
        run.begin_manifest({"world_size": 2, "attached": True, "config": {}})
        ranks = Ranks(run, options.calls)
        stack.callback(ranks.close)
        run.node_dir(0).mkdir(parents=True, exist_ok=True)
        events = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)
        stall = stall_policy(run.manifest())
        exporting = stack.enter_context(exports(run, node_rank=0, stall=stall, events=events, listen=None))
        tapes, judge = LiveTapes(run, 0), LiveJudge(run.manifest(), events, exporting)
        ingester = stack.enter_context(Ingester(run, 0))
        standstill = StandstillLoop(run, tapes, judge, events)
        ingest = IngestLoop(run, ingester, tapes, judge, exporting, events)
        syncing = TapeSync(run, 0)
        for number in range(options.rounds + WARM_ROUNDS):
            ranks.train(options.steps_per_s)
            spent.clear()
            standstill.tick()
            ingest.tick()
            if number % SYNC_ROUNDS == 0:
                syncing.sync()
            rounds.append(spent.copy())
    return {label: [one[label] / 1e6 for one in rounds[WARM_ROUNDS:]] for _, _, label in PARTS}


def _timed(real: Callable[..., Any], spent: Counter[str], label: str) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start_ns = time.process_time_ns()
        try:
            return real(*args, **kwargs)
        finally:
            spent[label] += time.process_time_ns() - start_ns

    return timed


def show(found: dict[str, list[float]], num_cores: int) -> None:
    """Print the table, and the CPU time per second of watching."""
    table = Table("part", "median", "10th percentile", "mean", title="CPU time of a round, ms")
    for label, times in found.items():
        low = statistics.quantiles(times, n=10)[0]
        table.add_row(label, *(f"{value:.1f}" for value in (statistics.median(times), low, statistics.mean(times))))
    console = Console()
    console.print(table)
    each, round_ms = statistics.mean(found["standstill loop"]), statistics.mean(found["store's thread"])
    period_s = min(MAX_REST_S, max(TICK_S, round_ms / 1e3 / (CORE_SHARE * num_cores)))
    console.print(
        f"{num_cores} cores: a round each {period_s:.1f} s, {each + round_ms / period_s:.0f} ms of CPU a second"
    )


def main() -> None:
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps-per-s", type=int, default=18, help="steps per second of each of two ranks")
    parser.add_argument("--calls", type=int, default=4, help="collectives per step")
    parser.add_argument("--quick", action="store_true", help="ten rounds")
    options = parser.parse_args()
    options.rounds = 10 if options.quick else options.rounds
    logging.disable()
    found = measure(options)
    show(found, len(os.sched_getaffinity(0)))
    write_json(options.json, found)


if __name__ == "__main__":
    main()
