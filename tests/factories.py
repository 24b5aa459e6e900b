"""Synthetic runs on real tapes: N ranks, M steps, with the timings and faults that a test asks for.

    run = make_run(tmp_path, ranks=4, steps=100, slow={3: 1.5}, phase="forward")     # rank 3 computes 1.5 times as long
    run = make_run(tmp_path, hang={2: 40})                  # rank 2 stops joining collectives in step 40
    run = make_run(tmp_path, kill={1: 30}, nan={0: 12}, spikes={20: 9.0})
    with Store.open(run) as store: ...

How time passes: in each step a rank does its own work of a phase (data, forward, backward, optimizer), and at the end
of `collective_phases` joins an all_reduce, which all ranks leave together, `collective_ms` after the last arrival. So
the wait in a collective follows from the slowest rank, as in a real run. Work is jittered by a
seeded random factor. The tapes are written by `TapeWriter`, `NameWriter` and `EventWriter`, with simulated times.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from probes.collectives.groups.group_label import group_label
from probes.step_clock import GAPS
from probes.tape.events import EventWriter
from probes.tape.format.names import NameWriter
from probes.tape.format.schema import TABLES
from probes.tape.format.writer import COMPLETE, OPEN, TapeWriter
from probes.tape.rundir import NODE_RANK, RunDir

__all__ = ["PHASE_SHARES", "RankWriter", "empty_run", "make_run", "still_training"]

PHASE_SHARES = {"data": 0.04, "forward": 0.30, "backward": 0.50, "optimizer": 0.16}
"""How a step's own work is divided."""
_GAP_BEFORE = {"forward": "before_forward", "backward": "forward_to_backward", "optimizer": "backward_to_optimizer"}
MS = 1_000_000
_COLUMN_INDEX = {table.name: {column.name: i for i, column in enumerate(table.columns)} for table in TABLES.values()}
"""Index of each column in a row, by table."""


def empty_run(tmp_path: Path, *, name: str = "synthetic", **manifest: Any) -> RunDir:
    """A run's folder with a manifest and nothing in it."""
    return RunDir.create(tmp_path / "runs", name=name, manifest=manifest)


@dataclass
class RankWriter:
    """Writes one rank's files; rows are given by column name, what is left out is not recorded.

    writer = RankWriter(run, rank=3)
    slot = writer.append("collectives", OPEN, step=1, op="all_reduce", issue_ns=writer.now_ns)
    writer.complete("collectives", slot, end_ns=writer.now_ns + 5)
    """

    run: RunDir
    rank: int
    attempt: int = 0
    ranks: int = 1
    now_ns: int = field(default_factory=time.monotonic_ns)
    node_rank: int = 0
    identity: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.directory = self.run.rank_dir(self.attempt, self.rank)
        self.directory.mkdir(parents=True)
        self.wall_minus_mono_ns = time.time_ns() - time.monotonic_ns()
        self.names = NameWriter(self.directory / "names.jsonl")
        self.names_by_file = {"names.jsonl": self.names}
        self.events = EventWriter(self.directory / "events.jsonl", attempt=self.attempt, rank=self.rank)
        self.tapes: dict[str, TapeWriter] = {}
        known = {
            "world_size": self.ranks,
            "local_rank": self.rank,
            "node_rank": self.node_rank,
            "host": f"node-{self.node_rank}",
            "pid": 10_000 + self.rank,
            "device": "cpu",
            "clock_offset_ns": self.wall_minus_mono_ns,
        }
        self.event("rank", **(known | dict(self.identity)))

    def tape(self, table: str) -> TapeWriter:
        """The tape of a table."""
        if table not in self.tapes:
            self.tapes[table] = TapeWriter(
                self.directory, TABLES[table], rank=self.rank, attempt=self.attempt, clock_ns=time.monotonic_ns
            )
        return self.tapes[table]

    def name(self, table: str, text: str) -> int:
        """The number of a text in the file of names that the table refers to."""
        file = TABLES[table].names_file
        if file not in self.names_by_file:
            self.names_by_file[file] = NameWriter(self.directory / file)
        return self.names_by_file[file](text)

    def append(self, table: str, state: int, **values: Any) -> int:
        """Store a record; texts become name numbers."""
        assert values.keys() <= _COLUMN_INDEX[table].keys(), f"no such column in {table}: {sorted(values)}"
        tape = self.tape(table)
        row = tape.unset_row()
        for name, value in values.items():
            row[_COLUMN_INDEX[table][name]] = self.name(table, value) if isinstance(value, str) else value
        return tape.append(state, *row)

    def complete(self, table: str, slot: int, **values: Any) -> None:
        """Fill in an open record and finish it."""
        tape = self.tape(table)
        for name, value in values.items():
            tape.set(slot, name, self.name(table, value) if isinstance(value, str) else value)
        tape.complete(slot)

    def event(self, kind: str, *, step: int | None = None, **detail: Any) -> None:
        """Write an event at this rank's current time. As in `EventWriter`, a given time is by the wall clock only."""
        now = {"wall_ns": self.now_ns + self.wall_minus_mono_ns, "mono_ns": self.now_ns}
        times: dict[str, Any] = {} if "wall_ns" in detail else now
        self.events.write(kind, step=step, **(times | detail))

    def close(self, *, clean: bool = True) -> None:
        """Close the files; without `clean`, no `rank_closed` is written and the tapes are not sealed."""
        if clean:
            self.event("rank_closed", probe_errors={}, dropped_records={})
            for tape in self.tapes.values():
                tape.close()
        self.events.close()
        for names in self.names_by_file.values():
            names.close()


@dataclass
class _Rank:
    """A rank in the simulation."""

    writer: RankWriter
    slot: int = -1
    work_ns: dict[str, int] = field(default_factory=dict)
    wait_ns: dict[str, int] = field(default_factory=dict)
    seq: int = 0
    stopped: bool = False


def make_run(
    tmp_path: Path,
    *,
    ranks: int = 4,
    steps: int = 100,
    step_ms: float = 50.0,
    slow: Mapping[int, float] | None = None,
    phase: str | Sequence[str] = ("forward", "backward"),
    slow_from: int = 1,
    collective_ms: float = 1.0,
    collective_phases: Sequence[str] = ("backward", "optimizer"),
    gaps_ms: Mapping[str, float] | None = None,
    jitter: float = 0.02,
    loss: Callable[[int], float] = lambda step: 2.0 + 3.0 * math.exp(-step / 40),
    spikes: Mapping[int, float] | None = None,
    nan: Mapping[int, int] | None = None,
    hang: Mapping[int, int] | None = None,
    kill: Mapping[int, int] | None = None,
    gradients_every: int = 0,
    parameters: Sequence[str] = ("embedding.weight", "blocks.0.mlp.up.weight", "head.weight"),
    run: RunDir | None = None,
    attempt: int = 0,
    first_step: int = 1,
    end: str = "finished",
    seed: int = 0,
    identities: Mapping[int, Mapping[str, Any]] | None = None,
    **manifest: Any,
) -> RunDir:
    """Write a run.

    slow            {rank: factor} on its own work in `phase` (phases or gaps), from step `slow_from` on
    gaps_ms         {gap: own work between phases (ms)}; a gap that is not named takes no time
    spikes          {step: loss} on all ranks
    nan             {rank: step} whose local gradients are NaN; the step is refused by all ranks
    hang            {rank: step} in which it stops before its first collective; its peers wait for ever
    kill            {rank: step} in which it dies before its first collective; its peers wait for ever
    gradients_every steps between records of each parameter's gradient; 0: none
    run, attempt    continue an existing run, e.g. after a restart
    identities      {rank: columns of table `ranks`}, e.g. another node_rank
    end             reason of `run_ended`; "": no such event, as after a hang or a kill
    """
    slow, spikes, nan, hang, kill = slow or {}, spikes or {}, nan or {}, hang or {}, kill or {}
    phases = (phase,) if isinstance(phase, str) else tuple(phase)
    run = run or empty_run(tmp_path, world_size=ranks, **manifest)
    dice = random.Random(seed)
    group = group_label("default_pg", list(range(ranks)))
    begin = time.monotonic_ns() - int(steps * step_ms * 1.5 * MS)
    everybody = [
        _Rank(RankWriter(run, rank, attempt=attempt, ranks=ranks, now_ns=begin, identity=identity))
        for rank, identity in (
            (rank, {"dp_replicate": rank, **(identities or {}).get(rank, {})}) for rank in range(ranks)
        )
    ]
    node = _node_events(run)
    wall = everybody[0].writer.wall_minus_mono_ns
    if attempt == 0:
        first_node = sum(rank.writer.identity.get("node_rank", 0) == 0 for rank in everybody)
        node.write("run_started", wall_ns=begin + wall, attempt=attempt, node_rank=0, nproc_per_node=first_node)
    node.write("attempt_started", wall_ns=begin + wall, attempt=attempt, world_size=ranks)
    for rank in everybody:
        rank.writer.event("process_group", process_group=group, description="default_pg", members=list(range(ranks)))

    def pass_gap(gap: str, step: int) -> None:
        """Let every rank do its own work between two phases."""
        if gap not in (gaps_ms or {}):
            return
        for number, rank in enumerate(everybody):
            factor = slow.get(number, 1.0) if gap in phases and step >= slow_from else 1.0
            took_ns = int((gaps_ms or {})[gap] * factor * (1 + jitter * dice.uniform(-1, 1)) * MS)
            rank.writer.now_ns += took_ns
            rank.work_ns[gap] = took_ns

    for step in range(first_step, first_step + steps):
        bad = step in nan.values()
        for rank in everybody:
            rank.work_ns, rank.wait_ns = dict.fromkeys(GAPS, 0), {}
            rank.slot = rank.writer.append("steps", OPEN, step=step, start_ns=rank.writer.now_ns)
        starts = [rank.writer.now_ns for rank in everybody]
        for name, share in PHASE_SHARES.items():
            pass_gap(_GAP_BEFORE.get(name, ""), step)
            entered = [rank.writer.now_ns for rank in everybody]
            spans = [
                rank.writer.append("spans", OPEN, step=step, kind=name, start_ns=rank.writer.now_ns)
                for rank in everybody
            ]
            for number, rank in enumerate(everybody):
                factor = slow.get(number, 1.0) if name in phases and step >= slow_from else 1.0
                rank.writer.now_ns += int(step_ms * share * factor * (1 + jitter * dice.uniform(-1, 1)) * MS)
            if name in collective_phases:
                for number, rank in enumerate(everybody):
                    rank.stopped |= step in (hang.get(number), kill.get(number))
                _all_reduce(everybody, step=step, phase=name, group=group, transfer_ms=collective_ms, nan=nan)
                if any(rank.stopped for rank in everybody):
                    return _abort(run, everybody, node, kill=kill)
            for number, rank in enumerate(everybody):
                now = rank.writer.now_ns
                rank.work_ns[name] = now - entered[number]
                rank.writer.complete("spans", spans[number], end_ns=now, wait_ns=rank.wait_ns.get(name, 0))
        pass_gap("after_optimizer", step)
        for number, rank in enumerate(everybody):
            value = spikes.get(step, loss(step))
            _end_step(rank, step, starts[number], value, bad=bad, local_bad=nan.get(number) == step)
            if step % 10 == 0:
                everything = {"replica_group": group, "tensor": "(all)", "hash": 1000 * attempt + step}
                rank.writer.append("fingerprints", COMPLETE, step=step, taken_ns=rank.writer.now_ns, **everything)
            if gradients_every and step % gradients_every == 0:
                for parameter in parameters:
                    broken = nan.get(number) == step
                    rank.writer.append(
                        "gradients",
                        COMPLETE,
                        step=step,
                        parameter=parameter,
                        norm=math.nan if broken else dice.uniform(0.5, 1.5),
                        max_abs=math.nan if broken else dice.uniform(0.1, 0.2),
                        nonfinite_count=17 if broken else 0,
                    )
    for rank in everybody:
        rank.writer.close()
    if end:
        node.write("run_ended", wall_ns=everybody[0].writer.now_ns + wall, attempt=attempt, reason=end, exit_code=0)
    node.close()
    return run


def still_training(run: RunDir) -> RunDir:
    """Remove the ranks' `rank_closed` events, as if they were still training."""
    for path in run.path.glob("tapes/attempt-*/rank-*/events.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if json.loads(line)["kind"] != "rank_closed"))
    return run


def _all_reduce(
    everybody: list[_Rank], *, step: int, phase: str, group: str, transfer_ms: float, nan: Mapping[int, int]
) -> None:
    """Record an all-reduce that ends some time after the last arrival; it stays open if a rank does not join."""
    slots = {}
    for number, rank in enumerate(everybody):
        if rank.stopped:
            continue
        slots[number] = rank.writer.append(
            "collectives",
            OPEN,
            step=step,
            seq=rank.seq,
            bytes=4 << 20,
            issue_ns=rank.writer.now_ns,
            process_group=group,
            op="all_reduce",
            dtype="float32",
            shape="1048576",
            phase=phase,
            caller="train.py:42 train_step",
            is_async=0,
            nonfinite=int(nan.get(number) == step),
        )
        rank.seq += 1
    if len(slots) < len(everybody):
        return
    leave = max(rank.writer.now_ns for rank in everybody) + int(transfer_ms * MS)
    for number, rank in enumerate(everybody):
        waited = leave - rank.writer.now_ns
        rank.writer.complete("collectives", slots[number], end_ns=leave, wait_ns=waited)
        rank.wait_ns[phase] = rank.wait_ns.get(phase, 0) + waited
        rank.writer.now_ns = leave


def _end_step(rank: _Rank, step: int, start_ns: int, loss: float, *, bad: bool, local_bad: bool) -> None:
    waits = rank.wait_ns
    rank.writer.complete(
        "steps",
        rank.slot,
        duration_ns=rank.writer.now_ns - start_ns,
        checkpoint_ns=0,
        evaluate_ns=0,
        collective_wait_ns=sum(waits.values()),
        cpu_ns=sum(rank.work_ns.values()) - sum(waits.values()),
        gc_ns=0,
        tokens=2048,
        batch_index=step,
        loss=math.nan if bad else loss,
        local_loss=math.nan if local_bad else loss,
        grad_norm=math.nan if bad else 1.0,
        lr=3e-4,
        memory_bytes=1 << 30,
        nonfinite_count=51 if local_bad else 0,
        committed=int(not bad),
        **{f"{name}_ns": rank.work_ns[name] for name in (*PHASE_SHARES, *GAPS)},
        **{f"{name}_wait_ns": waits.get(name, 0) for name in (*PHASE_SHARES, *GAPS)},
    )
    if bad:
        rank.writer.event(
            "nonfinite",
            step=step,
            phase="backward",
            parameters=["blocks.0.mlp.up.weight"] if local_bad else [],
            local_loss=loss,
            local_nonfinite_count=51 if local_bad else 0,
        )


def _abort(run: RunDir, everybody: list[_Rank], node: EventWriter, *, kill: Mapping[int, int]) -> RunDir:
    """Close a run that hangs or lost a rank: tapes stay open, and the launcher records the killed ranks."""
    for number, rank in enumerate(everybody):
        rank.writer.close(clean=False)
        if number in kill and rank.stopped:
            wall_ns = rank.writer.now_ns + rank.writer.wall_minus_mono_ns
            node.write(
                "rank_exit",
                wall_ns=wall_ns,
                mono_ns=rank.writer.now_ns,
                attempt=rank.writer.attempt,
                exit_rank=number,
                pid=10_000 + number,
                exit_code=-9,
                signal="SIGKILL",
                message="",
            )
    node.close()
    return run


def _node_events(run: RunDir, node_rank: int = 0) -> EventWriter:
    folder = run.node_dir(node_rank)
    folder.mkdir(parents=True, exist_ok=True)
    return EventWriter(folder / "events.jsonl", attempt=0, rank=NODE_RANK)
