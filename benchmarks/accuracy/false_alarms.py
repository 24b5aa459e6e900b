"""False alarms: findings fired on clean runs.

    python -m benchmarks.accuracy.false_alarms --quick  # a few thousand simulated steps, one real layout
    python -m benchmarks.accuracy.false_alarms --simulated 1000000          # some minutes on two cores
    python -m benchmarks.accuracy.false_alarms --real 10000  # real launches of all layouts, live watch included

Simulated: long runs of 8 ranks in closed form (`tests.support.simulator.long`): quiet, shared and oversubscribed hosts,
uneven sequences, a rank 0 that saves (F20), pauses of the garbage collector (F19). Each run is diagnosed as a whole,
and cut off at three random steps.

Real: `rankscope train` on 4 ranks (8 where the mesh needs them) in every layout: findings that `watch` wrote while it
ran, and those of `analyze` afterwards.

An alarm is any fired finding of severity warning or critical. Exit code 1 if there is one.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from analyzers.diagnose import diagnose
from analyzers.finding import Finding
from benchmarks.harness import argument_parser, write_json
from probes.tape.rundir import RunDir
from store import Store
from tests.support.simulator.long import LongRun, write_long
from tests.support.simulator.noise import OVERSUBSCRIBED, QUIET, SHARED_HOST

STEPS_A_RUN = 20_000
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "ddp": (4, ("dp_replicate=4", "dp_shard=1")),
    "fsdp": (4, ("dp_shard=4",)),
    "zero2": (4, ("dp_shard=4", "reshard_after_forward=false")),
    "hsdp": (4, ("dp_replicate=2", "dp_shard=2")),
    "tp": (4, ("dp_shard=1", "tp=4")),
    "fsdp x tp": (4, ("dp_shard=2", "tp=2")),
    "pp gpipe": (4, ("dp_shard=1", "pp=4", "schedule=gpipe")),
    "pp 1f1b x fsdp": (4, ("dp_shard=2", "pp=2", "schedule=1f1b")),
    "pp interleaved": (4, ("dp_shard=1", "pp=4", "schedule=interleaved_1f1b")),
    "pp x fsdp x tp": (8, ("dp_shard=2", "tp=2", "pp=2")),
}
MODEL = ("model.dim=64", "model.num_layers=8", "model.num_heads=4", "data.seq_len=64", "train.global_batch_size=16")


@dataclass(slots=True, kw_only=True)
class Count:
    """Outcome of a kind of run."""

    name: str
    runs: int = 0
    steps: int = 0
    alarms: list[str] = field(default_factory=list)
    seconds: float = 0.0


def long_run(seed: int, steps: int) -> tuple[str, LongRun]:
    """Make the long run of a seed; the kinds of runs alternate with the seed."""
    kinds: dict[str, LongRun] = {
        "quiet": LongRun(seed=seed, noise=QUIET),
        "shared host": LongRun(seed=seed, noise=SHARED_HOST),
        "oversubscribed": LongRun(seed=seed, noise=OVERSUBSCRIBED),
        "uneven sequences": LongRun(seed=seed, noise=QUIET, uneven_ratio=0.15),
        "rank 0 saves": LongRun(seed=seed, noise=SHARED_HOST, busy_rank=0),
        "frequent gc": LongRun(seed=seed, noise=replace(QUIET, gc_interval_steps=20.0, gc_pause_s=0.08)),
    }
    name = list(kinds)[seed % len(kinds)]
    return name, replace(kinds[name], steps=steps)


def simulated(task: tuple[int, int]) -> Count:
    """Write one long run; diagnose it as a whole, and cut off at three random steps."""
    seed, steps = task
    name, long = long_run(seed, steps)
    count, start = Count(name=f"simulated, {name}", runs=1, steps=steps), time.perf_counter()
    moments = [*sorted(np.random.default_rng(seed).integers(30, steps, 3).tolist()), steps]
    for moment in moments:
        with tempfile.TemporaryDirectory(prefix="false-alarms-") as folder:
            run = write_long(replace(long, steps=moment), Path(folder) / "run")
            for finding in _alarms(run):
                count.alarms.append(f"seed {seed}, {name}, {moment} steps: {finding.kind}: {finding.summary}")
    count.seconds = time.perf_counter() - start
    return count


def _alarms(run: RunDir) -> list[Finding]:
    with Store.open(run) as store:
        findings = diagnose(store, run.manifest(), stacks_dir=run.stacks).findings
    return [finding for finding in findings if finding.status == "fired" and finding.severity != "info"]


def real(layout: str, steps: int, seed: int, folder: Path) -> Count:
    """Launch one real run with its watch."""
    ranks, mesh = LAYOUTS[layout]
    count, start = Count(name=f"real, {layout}", runs=1), time.perf_counter()
    settings = [
        *MODEL, *(f"parallel.{setting}" for setting in mesh), f"train.steps={steps}", f"run.seed={seed}",
        f"run.dir={folder}", "run.name=clean", f"checkpoint.interval={max(50, steps // 5)}",
    ]  # fmt: skip
    command = [sys.executable, "-m", "rankscope", "train", "--nproc-per-node", str(ranks)]
    command += [text for setting in settings for text in ("--set", setting)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    run = RunDir.open(folder / "latest")
    if done.returncode:
        count.alarms.append(f"{layout}: exit code {done.returncode}: {(done.stdout + done.stderr)[-400:]}")
    with Store.open(run) as store:
        trained = store.query("SELECT count(DISTINCT step) AS n FROM steps WHERE committed")["n"][0]
        live = store.query("SELECT finding_kind, status, severity, summary FROM findings")
    count.steps = int(trained)
    for kind, status, severity, summary in zip(*live.values(), strict=True):
        if status == "fired" and severity != "info":
            count.alarms.append(f"{layout}, live: {kind}: {summary}")
    count.alarms += [f"{layout}, afterwards: {finding.kind}: {finding.summary}" for finding in _alarms(run)]
    count.seconds = time.perf_counter() - start
    if not count.alarms:
        shutil.rmtree(run.path.resolve())
    return count


def table(counts: list[Count]) -> str:
    """One row per kind of run, and the total."""
    rows: dict[str, Count] = {}
    for count in counts:
        row = rows.setdefault(count.name, Count(name=count.name))
        row.runs += count.runs
        row.steps += count.steps
        row.alarms += count.alarms
        row.seconds += count.seconds
    total = Count(
        name="all", runs=sum(row.runs for row in rows.values()), steps=sum(row.steps for row in rows.values())
    )
    total.alarms = [alarm for row in rows.values() for alarm in row.alarms]
    total.seconds = sum(row.seconds for row in rows.values())
    lines = [f"{'':30} {'runs':>6} {'steps':>10} {'false alarms':>13} {'seconds':>8}"]
    lines += [
        f"{row.name:30} {row.runs:6} {row.steps:10,} {len(row.alarms):13} {row.seconds:8.0f}"
        for row in (*rows.values(), total)
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--simulated", type=int, default=0, metavar="STEPS", help="simulated steps in all")
    parser.add_argument("--real", type=int, default=0, metavar="STEPS", help="real steps in all, over all layouts")
    parser.add_argument("--layout", action="append", choices=LAYOUTS, help="only this real layout; repeatable")
    parser.add_argument("--quick", action="store_true", help="6 simulated runs of 1,000 steps, 100 real steps of ddp")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes for simulated runs")
    options = parser.parse_args()
    steps_a_run = 1_000 if options.quick else STEPS_A_RUN
    if options.quick:
        options.simulated, options.real, options.layout = 6_000, 100, ["ddp"]
    counts: list[Count] = []

    def done(count: Count) -> None:
        counts.append(count)
        for alarm in count.alarms:
            print(f"ALARM  {alarm}", flush=True)
        print(f"{count.name}: {count.steps:,} steps in {count.seconds:.0f} s", file=sys.stderr, flush=True)

    number = -(-options.simulated // steps_a_run)
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for count in pool.imap_unordered(simulated, [(options.seed + i, steps_a_run) for i in range(number)]):
            done(count)
    layouts = options.layout or list(LAYOUTS)
    folder = Path(tempfile.mkdtemp(prefix="false-alarms-"))  # a run with an alarm is kept there
    for index, layout in enumerate(layouts if options.real else []):
        done(real(layout, -(-options.real // len(layouts)), options.seed + index, folder))
    print(table(counts))
    if options.json:
        result: dict[str, Any] = {
            "runs": [{"name": c.name, "steps": c.steps, "seconds": c.seconds, "alarms": c.alarms} for c in counts],
            "false_alarms": sum(len(count.alarms) for count in counts),
        }
        write_json(options.json, result)
    return int(any(count.alarms for count in counts))


if __name__ == "__main__":
    sys.exit(main())
