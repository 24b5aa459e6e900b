"""Writes a recording as a run on disk: run.json, tapes, names, events and stacks, in the formats that ranks write.

    run = write(recording, Path("runs/simulated"), until_step=50)

The segments have the header and the record layout of `probes.tape.format.writer.TapeWriter`, but are written whole,
with numpy: a rank's records of a table at once. A test compares the two. With `until_step` the run is
written as if it had ended there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from probes.tape.format.nccl_tables import NAMES_FILE
from probes.tape.format.schema import SCHEMA_VERSION, TABLES, Table
from probes.tape.format.writer import (
    COMPLETE,
    HEADER_BYTES,
    HEADER_PREFIX,
    JSON_OFFSET,
    MAGIC,
    record_layout,
    segment_name,
)
from probes.tape.rundir import NODE_RANK, RunDir

from .on_devices import nccl_columns, span_columns, stamped_columns, step_columns
from .recording import Event, Recording, Scenario
from .records import Columns, Floats, Log

__all__ = ["EPOCH_NS", "Run", "record_dtype", "segment_header", "write", "write_segments"]

EPOCH_NS = 1_760_000_000_000_000_000
_TAPES = ("steps", "spans", "collectives", "gradients", "fingerprints")
_ENDS = ("run_ended", "rank_closed", "watch_stopped")
_NUMPY = {"i64": "<i8", "f64": "<f8", "i32": "<i4", "name": "<u4", "bool": "i1"}


def write(recording: Recording, path: Path, *, until_step: int | None = None) -> RunDir:
    """Write the run into a new folder."""
    scenario, log = recording.scenario, recording.log
    cut_ns = np.inf
    if until_step is not None:
        ends = [row.end.max() for row in log.steps if row.step == until_step]
        cut_ns = float(max(ends)) + 1.0 if ends else np.inf
    run = Run(scenario, path)
    until = np.minimum(recording.until, cut_ns)
    columns = {table: log.columns(table, until) for table in _TAPES if table not in scenario.missing_tables}
    if scenario.on_devices:
        is_closed = recording.closed or until_step is not None
        columns = _on_devices(log, columns, until, is_closed=is_closed, stamped=scenario.stamped)
    for table, table_columns in columns.items():  # all names are known by now, which the numbering needs
        run.write_tape(table, table_columns, len(log.names.texts))
    run.write_names(log.names.texts)
    run.write_events(recording.events if until_step is None else _cut(recording.events, cut_ns, run.ranks, until_step))
    for rank, text in recording.stacks.items():
        if until_step is None:
            (run.run.stacks / f"attempt-0-rank-{rank:05d}.txt").write_text(text)
    return run.run


def _on_devices(
    log: Log, columns: dict[str, Columns], until: Floats, *, is_closed: bool, stamped: bool
) -> dict[str, Columns]:
    """The tables that ranks on GPUs write instead."""
    found = dict(columns)
    if found.get("steps"):
        found["steps"] = (stamped_columns if stamped else step_columns)(found["steps"])
    if found.get("spans"):
        found["spans"] = span_columns(found["spans"])
    if calls := found.pop("collectives", {}):
        found["nccl_calls"], found["nccl_communicators"] = nccl_columns(log, calls, until, is_closed=is_closed)
    return found


def _cut(events: Sequence[Event], cut_ns: float, ranks: Sequence[int], step: int) -> list[Event]:
    """The events up to a step, and the clean end of a run there."""
    earlier = [event for event in events if event.time_ns < cut_ns and event.kind not in _ENDS]
    closed: dict[str, Any] = {"probe_errors": {}, "dropped_records": {}}
    finished = {"reason": "finished", "exit_code": 0, "message": ""}
    earlier += [Event(rank, cut_ns + 2e6, "rank_closed", step, closed) for rank in ranks]
    return [*earlier, Event(NODE_RANK, cut_ns + 0.3e9, "run_ended", None, finished)]


class Run:
    """A run's folder being written: each node with its own boot time and wall clock."""

    def __init__(self, scenario: Scenario, path: Path) -> None:
        path.mkdir(parents=True)
        self.run, self.scenario = RunDir(path), scenario
        for folder in (self.run.tapes, self.run.checkpoints, self.run.stacks, self.run.reports):
            folder.mkdir()
        self.run.write_manifest(_manifest(scenario, path.name))
        self.ranks = [rank for rank in range(scenario.layout.num_ranks) if rank not in scenario.missing_ranks]
        self.nodes = scenario.layout.nodes()
        count = int(self.nodes.max()) + 1
        rng = np.random.default_rng(scenario.seed + 1)
        self.boot_ns = rng.integers(10**13, 10**16, count)[self.nodes]
        skew = np.zeros(count)
        skew[: len(scenario.clock.skew_s)] = scenario.clock.skew_s[:count]
        self.skew_ns = (skew * 1e9).astype(np.int64)[self.nodes]
        self.folders = {rank: self.run.rank_dir(0, rank) for rank in self.ranks}
        for folder in self.folders.values():
            folder.mkdir(parents=True)

    def write_tape(self, name: str, columns: Columns, num_names: int) -> None:
        """All ranks' tapes of a table."""
        if not columns or not len(columns["rank"]):
            return
        table = TABLES[name]
        records = _packed(table, columns, self.boot_ns, num_names)
        bounds = np.searchsorted(columns["rank"], np.arange(self.scenario.layout.num_ranks + 1))
        for rank in self.ranks:
            of_rank = records[bounds[rank] : bounds[rank + 1]]
            if len(of_rank):
                boot = int(self.boot_ns[rank])
                back_at, back_by = self._step_back_ns(rank)
                write_segments(
                    self.folders[rank], table, of_rank, rank=rank, mono_ns=boot,
                    wall_minus_mono_ns=EPOCH_NS + int(self.skew_ns[rank]) - boot,
                    back_at_mono_ns=back_at, back_by_ns=back_by,
                )  # fmt: skip

    def _step_back_ns(self, rank: int) -> tuple[int, int]:
        """(monotonic time, ns) of a node's step back in time; (0, 0): none."""
        clock = self.scenario.clock
        if not clock.step_back_s or self.nodes[rank] != clock.step_back_node:
            return 0, 0
        return int(self.boot_ns[rank]) + int(clock.step_back_after_s * 1e9), int(clock.step_back_s * 1e9)

    def write_names(self, texts: Sequence[str], *, in_order: bool = False) -> None:
        """Every rank's `names.jsonl`; unless `in_order`, each rank numbers them differently."""
        for rank in self.ranks:
            lines = [json.dumps({"id": 1, "name": "(too many names)"})]
            numbers = _rank_numbers(np.arange(1, len(texts) + 1), 0 if in_order else rank, len(texts))
            lines += [
                json.dumps({"id": int(number), "name": text}) for number, text in zip(numbers, texts, strict=True)
            ]
            for file in ("names.jsonl", NAMES_FILE) if self.scenario.on_devices else ("names.jsonl",):
                (self.folders[rank] / file).write_text("\n".join(lines) + "\n")

    def write_events(self, events: Sequence[Event]) -> None:
        """The `events.jsonl` of all ranks and of the node."""
        by_writer: dict[int, list[Event]] = {}
        for event in events:
            by_writer.setdefault(event.rank, []).append(event)
        for rank, written in by_writer.items():
            if rank != NODE_RANK and rank not in self.folders:
                continue
            folder = self.run.node_dir(0) if rank == NODE_RANK else self.folders[rank]
            folder.mkdir(exist_ok=True)
            lines = [self._line(event) for event in sorted(written, key=lambda event: event.time_ns)]
            (folder / "events.jsonl").write_text("\n".join(lines) + "\n")

    def _line(self, event: Event) -> str:
        at = max(event.rank, 0)
        wall = EPOCH_NS + int(self.skew_ns[at]) + int(event.time_ns)
        back_at, back_by = self._step_back_ns(at)
        if back_at and int(event.time_ns) + int(self.boot_ns[at]) >= back_at:
            wall -= back_by
        detail = dict(event.detail)
        if event.kind == "rank":
            detail["clock_offset_ns"] = EPOCH_NS + int(self.skew_ns[at]) - int(self.boot_ns[at])
        line = {"wall_ns": wall, "attempt": 0, "rank": event.rank, "kind": event.kind, "step": event.step, **detail}
        return json.dumps(_plain(line), separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _manifest(scenario: Scenario, name: str) -> dict[str, Any]:
    layout = scenario.layout
    return {
        "run_id": name,
        "schema_version": SCHEMA_VERSION,
        "created_wall_ns": EPOCH_NS - 3_000_000_000,
        "config": {
            "run": {"name": name, "seed": scenario.seed},
            "model": {"num_layers": layout.layers * layout.pp, "dim": 4096},
            "parallel": {**layout.sizes(), "schedule": layout.schedule, "backend": scenario.backend},
            "train": {"steps": scenario.steps},
            "checkpoint": {"interval": scenario.job.checkpoint_interval},
            "recovery": {"enabled": scenario.recovers},
        },
        "world_size": layout.num_ranks,
        "mesh": layout.sizes(),
        "num_parameters": scenario.job.block_bytes // 4 * layout.layers * layout.pp,
        "num_microbatches": layout.microbatches,
        "simulated": True,
    }


def _rank_numbers(numbers: npt.NDArray[Any], rank: int | npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """A rank's numbers for the shared names, in a different order on each. 1 is taken, 0 is no name."""
    return np.where(numbers > 0, 2 + (numbers - 1 + rank) % max(count, 1), 0)


def record_dtype(table: Table) -> np.dtype[Any]:
    """The record of a table as a numpy type, from the schema."""
    packed, columns = record_layout(table)
    names, formats, offsets, offset = [], [], [], 0
    for column in columns:
        kind = np.dtype(_NUMPY[column.type])
        names.append(column.name)
        formats.append(kind)
        offsets.append(offset)
        offset += kind.itemsize
    return np.dtype(
        {
            "names": [*names, "state"],
            "formats": [*formats, "u1"],
            "offsets": [*offsets, packed.size - 1],
            "itemsize": packed.size,
        }
    )


def _packed(table: Table, columns: Columns, boot_ns: npt.NDArray[Any], num_names: int) -> npt.NDArray[Any]:
    """All ranks' records of a table."""
    rank = columns["rank"]
    records = np.zeros(len(rank), dtype=record_dtype(table))
    for column in table.columns:
        values = columns[column.name]
        if column.is_time:
            values = np.where(values < 0, values, values.astype(np.int64) + boot_ns[rank])
        elif column.type == "name":
            values = _rank_numbers(values, rank, num_names)
        records[column.name] = values
    records["state"] = columns["state"]
    return records


def write_segments(
    folder: Path,
    table: Table,
    records: npt.NDArray[Any],
    *,
    rank: int,
    mono_ns: int,
    wall_minus_mono_ns: int,
    back_at_mono_ns: int = 0,
    back_by_ns: int = 0,
    first_segment: int = 0,
    first_record: int = 0,
) -> int:
    """Write one rank's records as sealed segments of the usual size; returns the bytes. The last one may be short.

    If the wall clock steps back at `back_at_mono_ns`, segments that begin later carry the new anchor.
    """
    capacity = (table.segment_bytes - HEADER_BYTES) // records.dtype.itemsize
    written = 0
    time = next((column.name for column in table.columns if column.is_time), "")
    for number, first in enumerate(range(0, len(records), capacity), first_segment):
        part = records[first : first + capacity]
        anchor, begin = wall_minus_mono_ns, mono_ns
        if time:
            begin = int(part[time][0])
            if back_at_mono_ns and begin >= back_at_mono_ns:
                anchor -= back_by_ns
        sealed = bool((part["state"] == COMPLETE).all())
        header = segment_header(
            table, rank=rank, segment=number, first_record=first_record + first, capacity=len(part), mono_ns=begin,
            wall_ns=begin + anchor, sealed=sealed,
        )  # fmt: skip
        with (folder / segment_name(table.name, number)).open("wb") as file:
            file.write(header)
            file.write(part.tobytes())
        written += len(header) + part.nbytes
    return written


def segment_header(
    table: Table,
    *,
    rank: int,
    segment: int,
    first_record: int,
    capacity: int,
    mono_ns: int,
    wall_ns: int,
    sealed: bool,
    attempt: int = 0,
) -> bytes:
    """The 4096 bytes before a segment's records, with the keys that `TapeWriter` writes."""
    dtype = record_dtype(table)
    assert dtype.fields is not None
    kinds = {column.name: column.type for column in table.columns}
    fields = [[name, kinds[name], dtype.fields[name][1]] for name in dtype.names or () if name != "state"]
    text = json.dumps(
        {
            "table": table.name, "rank": rank, "attempt": attempt, "segment": segment, "first_record": first_record,
            "capacity": capacity, "record_bytes": dtype.itemsize, "state_offset": dtype.itemsize - 1, "fields": fields,
            "pid": os.getpid(), "mono_ns": mono_ns, "wall_ns": wall_ns,
        },
        separators=(",", ":"),
    ).encode()  # fmt: skip
    if JSON_OFFSET + len(text) > HEADER_BYTES:
        raise ValueError(f"the layout of table {table.name} does not fit a header")
    prefix = HEADER_PREFIX.pack(MAGIC, SCHEMA_VERSION, len(text), int(sealed), 0)
    return (prefix + text).ljust(HEADER_BYTES, b"\0")
