"""Power cuts at random moments of a recorded run: what is lost, whether it is reported, and the result of `rebuild`.

    python -m benchmarks.durability.power_cuts  # 50 cuts, five per run: some twenty minutes; needs root
    python -m benchmarks.durability.power_cuts --cuts 3 --json cuts.json

A run of two ranks is on a separate disk (`benchmarks.cost.loop_disk`), whose power is cut at a random moment.
After each cut:

1. every record and event that was complete for longer than the stated window (`probes.sync_s` and the duration of a
   sync) is on disk, if `watch` had run for that long;
2. `analyze` reports each tape or file that lost something before its end, and each rank that ended with the power cut;
3. every event and step in the files is in the store that a reader opens;
4. `rebuild` leaves no table with fewer rows than the store had, or is refused and leaves the store as it was;
5. `train --resume` continues, and the next cut hits that attempt.

Exit code 1 if a condition fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cost.loop_disk import LoopDisk, own_mounts
from benchmarks.harness import argument_parser, write_json
from probes.tape.events import read_events
from probes.tape.format.reader import TapeError, read_segment
from probes.tape.format.writer import COMPLETE
from probes.tape.rundir import RunDir
from store import Store
from store.database import StoreError, connect_attached
from trainer.launcher.processes.prefork import PreforkServer, StartedCommand

SYNC_S = 2.0
MAX_SYNC_S = 1.0
"""Maximum seconds of a sync on this disk under load."""
SETTINGS = (
    "run.name=cuts", "model.dim=32", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=4",
    "data.seq_len=32", "train.global_batch_size=4", "train.device=cpu", "train.steps=100000000",
    "checkpoint.interval=20", "parallel.dp_replicate=2", "parallel.dp_shard=1", f"probes.sync_s={SYNC_S}",
)  # fmt: skip
CUTS_A_RUN = 5
STEPS_BEFORE = 15
LONGEST_S = 8.0
LAUNCH_NS = 10 * 10**9
"""Maximum time between the start of a launch's `watch` and of its attempt."""
DEADLINE_S = 120.0
Record = tuple[str, int]
"""Segment and record number, or events file and line number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Records on the tapes and event lines at one moment, with their completion times (monotonic ns)."""

    finished_ns: dict[Record, int]
    now_ns: int
    watched_s: float
    """Seconds that the current `watch` has run."""


@dataclass(slots=True)
class Outcome:
    """Effect of one cut."""

    written: int = 0
    lost: int = 0
    oldest_lost_s: float = 0.0
    watched_s: float = 0.0
    stored: int = 0
    refused: bool = False
    problems: list[str] = field(default_factory=list)


def written(run: RunDir) -> Written:
    """Records that the ranks and the node process have completed so far."""
    found: dict[Record, int] = {}
    now_ns = time.monotonic_ns()
    for folder in [path for _, _, path in run.rank_dirs()] + [path for _, path in run.node_dirs()]:
        ends: dict[int, int] = {}
        for path in sorted(folder.glob("*.tape"), key=lambda path: (not path.name.startswith("steps."), path)):
            found |= _records(path, path.relative_to(run.path).as_posix(), ends)
        name = (folder / "events.jsonl").relative_to(run.path).as_posix()
        offset = time.time_ns() - time.monotonic_ns()
        for number, event in enumerate(read_events(folder / "events.jsonl")[0]):
            found[name, number] = int(event.get("mono_ns", event["wall_ns"] - offset))
    started_ns = [event["mono_ns"] for _, folder in run.node_dirs() for event in _started(folder)]
    watched_s = (now_ns - max(started_ns)) / 1e9 if started_ns else 0.0
    return Written(finished_ns=found, now_ns=now_ns, watched_s=watched_s)


def _started(node: Path) -> list[dict[str, Any]]:
    """The `watch_started` events of the last launch."""
    events = read_events(node / "events.jsonl")[0]
    launched_ns = max((event["mono_ns"] for event in events if event["kind"] == "attempt_started"), default=0)
    return [e for e in events if e["kind"] == "watch_started" and e["mono_ns"] > launched_ns - LAUNCH_NS]


def _records(path: Path, name: str, step_ends_ns: dict[int, int]) -> dict[Record, int]:
    """Completed records of a segment; records without a time get the time of their step. Fills `step_ends_ns` from
    steps.
    """
    try:
        segment = read_segment(path)
    except (TapeError, OSError):
        return {}
    whole = segment.records["state"] == COMPLETE
    records, numbers = segment.records[whole], segment.indices[whole].tolist()
    fields, table = records.dtype.names or (), segment.header.table
    times = [column.name for column in table.columns if column.is_time and column.name in fields]
    if not times:
        ends = [step_ends_ns.get(step, time.monotonic_ns()) for step in records["step"].tolist()]
        return {(name, place): ns for place, ns in zip(numbers, ends, strict=True)}
    finished = np.max([records[column] for column in times], axis=0)
    if "duration_ns" in fields:
        finished = finished + np.maximum(records["duration_ns"], 0)
    if table.name == "steps":
        step_ends_ns |= dict(zip(records["step"].tolist(), finished.tolist(), strict=True))
    return {(name, place): ns for place, ns in zip(numbers, finished.tolist(), strict=True)}


def stored_rows(path: Path) -> dict[str, int]:
    """Rows by table of the store without ingesting anything; {} if it cannot be read."""
    with contextlib.suppress(StoreError):
        if not path.exists():
            return {}
        connection = connect_attached({"store": path}, wait_s=5.0)
        try:
            names = connection.execute(
                "SELECT table_name FROM duckdb_tables() WHERE database_name = 'store' AND table_name NOT LIKE 'ingest%'"
            ).fetchall()
            counts: dict[str, int] = {}
            for (name,) in names:
                ((rows,),) = connection.execute(f'SELECT count(*) FROM store.main."{name}"').fetchall()
                table = str(name).removesuffix("_done").removesuffix("_open")
                counts[table] = counts.get(table, 0) + rows
            return counts
        finally:
            connection.close()
    return {}


class Cuts:
    """Cuts the power of one run on one disk."""

    def __init__(self, server: PreforkServer, disk: LoopDisk, dice: random.Random) -> None:
        self._server, self._disk, self._dice = server, disk, dice
        self._runs = disk.path / "runs"

    def run(self, number: int) -> Iterator[Outcome]:
        """Cut the power `number` times, each time after a resume."""
        settings = [part for text in (*SETTINGS, f"run.dir={self._runs}") for part in ("--set", text)]
        arguments = ["train", *settings]
        for _ in range(number):
            process = self._server.start(arguments, cwd=self._disk.path.parent)
            try:
                yield self._cut(process)
            finally:
                process.kill()
            arguments = ["train", "--resume", str(self._runs / "latest")]

    def _cut(self, process: StartedCommand) -> Outcome:
        outcome = Outcome()
        attempt = self._await_steps(process)
        time.sleep(self._dice.uniform(0.0, LONGEST_S))  # a random moment
        run = RunDir.open(self._runs / "latest")
        before = written(run)
        pids = _pids(run, attempt)
        self._disk.cut_power()
        process.kill()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._disk.power_on()
        run = RunDir.open(self._runs / "latest")
        _check(run, before, outcome, self._server)
        return outcome

    def _await_steps(self, process: StartedCommand) -> int:
        """Wait until the newest attempt has made some steps; returns its number."""
        deadline = time.monotonic() + DEADLINE_S
        known = _attempt(self._runs / "latest")
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise SystemExit(f"the run ended with {process.returncode}: {process.communicate(5)[0]}")
            with contextlib.suppress(OSError, ValueError):
                run = RunDir.open(self._runs / "latest")
                newest = _attempt(run.path)
                path = run.rank_dir(newest, 0) / "steps.00000.tape"
                if newest > known and len(read_segment(path).records) >= STEPS_BEFORE:
                    return newest
            time.sleep(0.1)
        raise SystemExit("the run made no steps")


def _attempt(path: Path) -> int:
    try:
        return max((attempt for attempt, _, _ in RunDir.open(path).rank_dirs()), default=-1)
    except (OSError, ValueError):
        return -1


def _pids(run: RunDir, attempt: int) -> list[int]:
    """Process ids of the attempt's ranks and of the node's processes."""
    folders = [path for number, _, path in run.rank_dirs() if number == attempt]
    events = [event for folder in folders for event in read_events(folder / "events.jsonl")[0]]
    node = [event for _, folder in run.node_dirs() for event in read_events(folder / "events.jsonl")[0]]
    return [event["pid"] for event in events + node[-200:] if event["kind"] in ("rank", "watch_started")]


def _check(run: RunDir, before: Written, outcome: Outcome, server: PreforkServer) -> None:
    """Fill in the losses and the failed conditions."""
    after = written(run)
    lost = {record: ns for record, ns in before.finished_ns.items() if record not in after.finished_ns}
    outcome.watched_s = before.watched_s
    outcome.written, outcome.lost = len(before.finished_ns), len(lost)
    outcome.oldest_lost_s = max([(before.now_ns - ns) / 1e9 for ns in lost.values()], default=0.0)
    window_s = SYNC_S + MAX_SYNC_S
    if outcome.oldest_lost_s > window_s and before.watched_s > window_s:  # a younger `watch` may not have synced yet
        oldest = min(lost, key=lost.__getitem__)
        outcome.problems.append(f"{oldest} was {outcome.oldest_lost_s:.1f} s old and is lost")
    rows_before = stored_rows(run.store())
    outcome.stored = sum(rows_before.values())
    outcome.problems += _unreported(run, after, lost, server)
    outcome.problems += _not_stored(run)
    with tempfile.TemporaryDirectory() as folder:  # a copy, since the run continues with the store as the cut left it
        copy = RunDir.open(Path(shutil.copytree(run.path, Path(folder) / run.path.name, symlinks=True)))
        code, text = _command(server, "rebuild", str(copy.path))
        rows_after = stored_rows(copy.store())
    outcome.refused = code != 0
    fewer = {
        table: (rows, rows_after.get(table, 0))
        for table, rows in rows_before.items()
        if rows_after.get(table, 0) < rows
    }
    if fewer:
        outcome.problems.append(f"rebuild lost rows: {fewer}")
    if code and "no longer have" not in text:
        outcome.problems.append(f"rebuild failed: {text[-500:]}")


def _not_stored(run: RunDir) -> Iterator[str]:
    """Events in files and steps on tapes that are missing in the store."""
    with Store.open(run) as store:
        events = {(int(ns), str(kind)) for ns, kind in store.rows("SELECT wall_ns, kind FROM events")}
        steps = dict(store.rows("SELECT attempt * 1000 + rank, count(*) FROM steps GROUP BY ALL"))
    for folder in [path for _, _, path in run.rank_dirs()] + [path for _, path in run.node_dirs()]:
        lines = read_events(folder / "events.jsonl")[0]
        missing = [line for line in lines if (int(line["wall_ns"]), line["kind"]) not in events]
        if missing:
            yield f"{len(missing)} events of {folder.relative_to(run.path)} are not in the store: {missing[0]}"
    for attempt, rank, folder in run.rank_dirs():
        number = sum(len(_records(path, "", {})) for path in folder.glob("steps.*.tape"))
        stored = steps.get(attempt * 1000 + rank, 0)
        if stored < number:
            yield f"rank {rank} of attempt {attempt}: {number} steps on its tape, {stored} in the store"


def _unreported(run: RunDir, after: Written, lost: dict[Record, int], server: PreforkServer) -> Iterator[str]:
    """Losses that `analyze` does not report."""
    code, text = _command(server, "analyze", str(run.path), "--format", "json")
    if "{" not in text:
        yield f"analyze ended with {code}: {text[-500:]}"
        return
    report: dict[str, Any] = json.JSONDecoder().raw_decode(text[text.index("{") :])[0]
    named = {problem["path"].partition("#")[0] for problem in report["run"]["file_problems"]}
    last: dict[str, int] = {}
    for name, place in after.finished_ns:
        last[name] = max(place, last.get(name, -1))
    inner = {name for name, place in lost if place < last.get(name, -1)}
    for name in sorted(inner - named):
        yield f"{name} lost records before its end, which is not reported"
    fired = {finding["kind"] for finding in report["findings"] if finding["status"] == "fired"}
    if lost and "rank_lost" not in fired:
        yield f"{len(lost)} records are lost and no rank is reported as lost"


def _command(server: PreforkServer, *arguments: str) -> tuple[int, str]:
    process = server.start(arguments)
    text, _ = process.communicate(DEADLINE_S)
    return process.wait(5), text


def main() -> None:
    """Print a line per cut and the totals; exit with code 1 if a condition failed."""
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--cuts", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    own_mounts()
    dice, server = random.Random(options.seed), PreforkServer()
    outcomes: list[Outcome] = []
    while len(outcomes) < options.cuts:
        with tempfile.TemporaryDirectory() as folder, LoopDisk(Path(folder)) as disk:
            for outcome in Cuts(server, disk, dice).run(min(CUTS_A_RUN, options.cuts - len(outcomes))):
                outcomes.append(outcome)
                print(
                    f"cut {len(outcomes)}: {outcome.lost} of {outcome.written} records lost, the oldest "
                    f"{outcome.oldest_lost_s:.2f} s old; watched {outcome.watched_s:.0f} s, store {outcome.stored} rows"
                    + (", rebuild refused" if outcome.refused else ""),
                    *(f"\n    {problem}" for problem in outcome.problems),
                    flush=True,
                )
    server.close()
    bad = sum(bool(outcome.problems) for outcome in outcomes)
    oldest = max(outcome.oldest_lost_s for outcome in outcomes)
    print(
        f"{len(outcomes)} cuts, {bad} with a problem; window {SYNC_S:.0f} s and the sync's time, oldest record lost "
        f"{oldest:.2f} s; load {os.getloadavg()[0]:.1f}"
    )
    write_json(options.json, [vars_of(outcome) for outcome in outcomes])
    sys.exit(bad > 0)


def vars_of(outcome: Outcome) -> dict[str, Any]:
    """Convert to plain values."""
    return {name: getattr(outcome, name) for name in Outcome.__slots__}


if __name__ == "__main__":
    main()
