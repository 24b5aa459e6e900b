"""Speed of ingesting tapes into a store, and the cost of a tick.

    python -m benchmarks.ingest               about 6 minutes, needs 7 GB of disk
    python -m benchmarks.ingest --quick       under a minute
    python -m benchmarks.ingest --json out.json

Eight ranks write collectives, the widest of the busy tables. Measured: rows a second from tapes into an empty store
(one thread, as in `watch`); a tick in which nothing is new; a tick in which every rank has a step, its spans and ten
collectives more, with few and with many rows in the store; the time to open it for reading.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from probes.tape.events import EventWriter
from probes.tape.names import NameWriter
from probes.tape.reader import read_header
from probes.tape.rundir import RunDir
from probes.tape.schema import TABLES
from probes.tape.writer import COMPLETE, HEADER_BYTES, TapeWriter, record_layout, segment_name
from store import Ingester, Store

NUM_RANKS = 8
TICKS = 20


class RankFiles:
    """The files of one rank; rows are given by column name, what is left out is not recorded."""

    def __init__(self, run: RunDir, rank: int, *, attempt: int) -> None:
        self.directory, self.rank, self.attempt = run.rank_dir(attempt, rank), rank, attempt
        self.directory.mkdir(parents=True)
        self.names = NameWriter(self.directory / "names.jsonl")
        self._tapes: dict[str, TapeWriter] = {}
        events = EventWriter(self.directory / "events.jsonl", attempt=attempt, rank=rank)
        events.write("rank", world_size=NUM_RANKS, local_rank=rank, node_rank=0, host="node-0", device="cpu")
        events.close()

    def append(self, table: str, **values: int | float | str) -> None:
        """Store a finished record; texts become name numbers."""
        if table not in self._tapes:
            self._tapes[table] = TapeWriter(self.directory, TABLES[table], rank=self.rank, attempt=self.attempt)
        tape = self._tapes[table]
        row = tape.unset_row()
        for i, column in enumerate(TABLES[table].columns):
            value = values.get(column.name)
            if value is not None:
                row[i] = self.names(value) if isinstance(value, str) else value
        tape.append(COMPLETE, *row)


def write_collectives(writer: RankFiles, num_rows: int) -> None:
    """Whole segments of collectives, made from one template: this is not a benchmark of the writer."""
    table = TABLES["collectives"]
    capacity = (table.segment_bytes - HEADER_BYTES) // record_layout(table)[0].size
    names = [writer.names(text) for text in ("world:0-7", "all_reduce", "float32", "1048576", "backward", "a.py:1 f")]
    template: np.ndarray | None = None
    tape = TapeWriter(writer.directory, table, rank=writer.rank, attempt=writer.attempt)
    for number in range(-(-num_rows // capacity)):
        row = tape.unset_row()
        for i, column in enumerate(table.columns):
            if column.type == "name":
                row[i] = names[i % len(names)]
        tape.append(COMPLETE, *row)  # makes the segment and its header
        path = writer.directory / segment_name("collectives", number)
        header = read_header(path)
        if template is None:
            blob = path.read_bytes()[HEADER_BYTES : HEADER_BYTES + header.record_bytes]
            template = np.repeat(np.frombuffer(blob, dtype=header.dtype), capacity)
        first = number * capacity
        template["step"] = np.arange(first, first + capacity) // 10
        template["seq"] = np.arange(first, first + capacity)
        template["issue_ns"] = 10**12 + template["seq"] * 1000
        template["end_ns"] = template["issue_ns"] + 500
        with path.open("r+b") as file:
            file.seek(HEADER_BYTES)
            file.write(template.tobytes())
        tape._numbers = iter(range(first + capacity, 1 << 62))


def add_a_step(writers: list[RankFiles], step: int) -> None:
    for writer in writers:
        now = time.monotonic_ns()
        writer.append("steps", step=step, start_ns=now, duration_ns=10**7, loss=2.0)
        for kind in ("data", "forward", "backward", "optimizer"):
            writer.append("spans", step=step, kind=kind, start_ns=now, end_ns=now + 1, wait_ns=0)
        for seq in range(10):
            writer.append("collectives", step=step, seq=seq, op="all_reduce", issue_ns=now, end_ns=now + 1)


def measure(folder: Path, total_rows: int) -> dict[str, float]:
    run = RunDir.create(folder / "runs", name="synthetic", manifest={})
    writers = [RankFiles(run, rank, attempt=0) for rank in range(NUM_RANKS)]
    for writer in writers:
        write_collectives(writer, total_rows // NUM_RANKS)
    later = [RankFiles(run, rank, attempt=1) for rank in range(NUM_RANKS)]
    with Ingester(run) as ingester:
        start = time.perf_counter()
        rows = sum(ingester.catch_up().values())
        ingest_s = time.perf_counter() - start
        add_a_step(later, 0)
        ingester.tick()
        busy, idle = [], []
        for step in range(1, TICKS + 1):
            add_a_step(later, step)
            result = ingester.tick()
            assert result.num_rows == NUM_RANKS * 15, result
            busy.append(result.duration_s * 1e3)
        for _ in range(TICKS):
            result = ingester.tick()
            assert result.num_rows == 0
            idle.append(result.duration_s * 1e3)
    opened = []
    for _ in range(5):
        start = time.perf_counter()
        with Store.open(run) as store:
            store.rows("SELECT count(*) FROM steps")
        opened.append((time.perf_counter() - start) * 1e3)
    tape_bytes = sum(path.stat().st_size for path in run.tapes.rglob("*.tape"))
    return {
        "rows": rows,
        "rows_per_s": rows / ingest_s,
        "tick_ms_median": statistics.median(busy),
        "tick_ms_max": max(busy),
        "idle_tick_ms_median": statistics.median(idle),
        "open_ms_median": statistics.median(opened),
        "tape_bytes_per_row": tape_bytes / rows,
        "store_bytes_per_row": run.store().stat().st_size / rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 million rows at most")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    sizes = [100_000, 2_000_000] if options.quick else [100_000, 2_000_000, 20_000_000]
    figures = []
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="rankscope-benchmark-") as name:
            figures.append(measure(Path(name), size))
    print(f"{NUM_RANKS} ranks, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    width = max(map(len, figures[0]))
    for name in figures[0]:
        print(f"{name:<{width}}  " + "  ".join(f"{found[name]:>14,.1f}" for found in figures))
    if options.json:
        options.json.write_text(json.dumps({"num_ranks": NUM_RANKS, "sizes": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
