"""Seconds from the death of a rank (SIGKILL) to the next good step, from the records of real runs.

    python -m benchmarks.durability.recovery --kills 10
    python -m benchmarks.durability.recovery --kills 5 --layout fsdp --json recovery.json
    python -m benchmarks.durability.recovery --config gpt2-124m --ranks 2 --kills 3     # 124 M parameters, 128 tokens

Four ranks train a small model; at random moments one of them gets SIGKILL. The run recovers automatically, and the next
kill follows ten steps later. `--config` selects another model, with short steps. Phases, each from the end of the
previous one:

| phase | ends with |
|---|---|
| detect | the launcher's event that the rank has ended |
| stop the others | the last event of another rank's end |
| next attempt | the claim of the next attempt (includes rendezvous of the nodes, one synced file) |
| ranks begin | the last rank's first record (fork, store, run folder) |
| restore | rank 0's event that the checkpoint is loaded (process groups, model, hashes, tensors) |
| first good step | the end of the first committed step (new caches, first batch) |

The import of torch and the trainer is measured separately, in a new interpreter. Ranks do not repeat it, because they
are forked from a process that has imported them; `rankscope train` does so once, before the first attempt.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import argument_parser, write_json
from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from store import Store

PHASES = ("detect", "stop the others", "next attempt", "ranks begin", "restore", "first good step")
LAYOUTS = {
    "ddp": ("parallel.dp_replicate=-1", "parallel.dp_shard=1"),
    "fsdp": ("parallel.dp_replicate=1", "parallel.dp_shard=-1"),
}
SMALL = ("model.dim=64", "model.num_layers=4", "model.num_heads=4", "data.seq_len=64", "train.global_batch_size=8")
LARGE = (
    "data.seq_len=128", "train.global_batch_size=2", "train.micro_batch_size=1", "train.precision=float32",
    "train.eval_interval=0",
)  # fmt: skip
"""Overrides of a preset: steps of about a second, so that the wait for the next kill is short."""
SETTINGS = (
    "run.name=recovery", "train.device=cpu", "train.steps=100000000", "checkpoint.interval=10",
    "recovery.max_restarts=1000", "recovery.max_failures_per_device=0",
)  # fmt: skip
STEPS_BETWEEN = 10
DEADLINE_S = 600.0
GOAL_S = 20.0


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """Seconds of each phase for each kill."""
    size = LARGE if options.config else SMALL
    texts = (*SETTINGS, *size, f"run.dir={folder}", *LAYOUTS[options.layout], *options.overrides)
    command = [sys.executable, "-m", "rankscope", "train", *([options.config] if options.config else [])]
    command += ["--nproc-per-node", str(options.ranks), *(part for text in texts for part in ("--set", text))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    kills, moments = options.kills, random.Random(options.seed)
    try:
        _wait(lambda: (folder / "latest").exists(), process)
        run = RunDir.open(folder / "latest")
        killed_ns = []
        for attempt in range(kills + 1):
            _wait(lambda a=attempt: _committed(run, a) >= STEPS_BETWEEN, process)  # type: ignore[misc]
            if attempt == kills:
                break
            time.sleep(moments.uniform(0.0, 0.5))  # a random moment within a step
            victim = _rank_events(run, attempt, options.ranks)[moments.randrange(options.ranks)]["pid"]
            killed_ns.append(time.time_ns())
            os.kill(victim, signal.SIGKILL)
            print(f"kill {attempt + 1} of {kills}", flush=True)
        process.send_signal(signal.SIGTERM)
        process.wait(DEADLINE_S)
        return [_phases(run, attempt, when, options.ranks) for attempt, when in enumerate(killed_ns)]
    finally:
        process.kill()


def import_s() -> float:
    """Wall time of a fresh interpreter that imports what a rank needs; files are in the page cache."""
    times = []
    for _ in range(3):
        begin = time.monotonic()
        subprocess.run([sys.executable, "-c", "import trainer.rank.worker"], check=True)
        times.append(time.monotonic() - begin)
    return min(times)


def _phases(run: RunDir, attempt: int, killed_ns: int, num_ranks: int) -> dict[str, float]:
    node = read_events(run.node_dir(0) / "events.jsonl")[0]
    ends = [e["wall_ns"] for e in node if e["kind"] in ("rank_exit", "rank_stopped") and e["attempt"] == attempt]
    claimed = next(e["wall_ns"] for e in node if e["kind"] == "attempt_started" and e["attempt"] == attempt + 1)
    began = max(event["wall_ns"] for event in _rank_events(run, attempt + 1, num_ranks))
    rank0 = read_events(run.rank_dir(attempt + 1, 0) / "events.jsonl")[0]
    loaded = next(e["wall_ns"] for e in rank0 if e["kind"] == "checkpoint" and e["state"] == "loaded")
    with Store.open(run) as store:
        ((stepped,),) = store.rows(
            "SELECT min(start_ns + duration_ns) FROM steps WHERE attempt = ? AND rank = 0 AND committed", [attempt + 1]
        )
    marks = [killed_ns, min(ends), max(ends), claimed, began, loaded, stepped]
    seconds = {name: (marks[i + 1] - marks[i]) / 1e9 for i, name in enumerate(PHASES)}
    return seconds | {"all": (stepped - killed_ns) / 1e9}


def _rank_events(run: RunDir, attempt: int, num_ranks: int) -> list[dict[str, Any]]:
    """The first event of each rank of an attempt."""
    found = []
    for rank in range(num_ranks):
        events, _, _ = read_events(run.rank_dir(attempt, rank) / "events.jsonl")
        found += [event for event in events if event["kind"] == "rank"][:1]
    return found


def _committed(run: RunDir, attempt: int) -> int:
    with Store.open(run) as store:
        if not store.has("steps"):
            return 0
        sql = "SELECT count(*) FROM steps WHERE attempt = ? AND rank = 0 AND committed"
        return int(store.rows(sql, [attempt])[0][0])


def _wait(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the run ended or did not continue: see its folder")
        time.sleep(0.2)


def main() -> None:
    """Print the table; exit code 1 if the goal is missed."""
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--config", default="", metavar="CONFIG", help="preset or TOML file; default: a small model")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--layout", choices=sorted(LAYOUTS), default="ddp")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    imports = import_s()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    title = f"SIGKILL of one of {options.ranks} ranks ({options.layout}), {len(found)} times: seconds"
    table = Table("phase", "median", "longest", title=title, title_justify="left")
    for name in (*PHASES, "all"):
        values = [seconds[name] for seconds in found]
        table.add_row(name, f"{statistics.median(values):.2f}", f"{max(values):.2f}")
    table.add_row("(apart) import", f"{imports:.2f}", "")
    Console().print(table)
    load = os.getloadavg()[0]
    print(f"load {load:.1f} at the end, {os.cpu_count()} cores; goal: at most {GOAL_S:.0f} s")
    write_json(options.json, {"import_s": imports, "kills": found, "load": load})
    sys.exit(max(seconds["all"] for seconds in found) > GOAL_S)


if __name__ == "__main__":
    main()
