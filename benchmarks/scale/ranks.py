"""Time and memory of a verdict for 8 to 4,096 ranks; the goal is a minute and 4 GB.

    python -m benchmarks.scale.ranks --quick                          # small runs, under a minute
    python -m benchmarks.scale.ranks steps --ranks 4096 --steps 100000
    python -m benchmarks.scale.ranks hang dumps --ranks 8 64 512 4096 --json scale.json

| kind | generated data | goal at 4,096 ranks |
|---|---|---|
| steps | a store with `--steps` finished steps per rank, one rank 5 % slow from the middle on | 60 s, 4 GB |
| hang | a store with `--in-flight` open calls per rank, which one rank has not entered | 10 s |
| dumps | flight-recorder dumps (pickles) of the same hang, with as many entries | 10 s |

A store is generated in SQL, not from tapes, for one node. Durations are drawn per rank for the first 1,000 steps, in
whole microseconds, and repeated in every further thousand. A child process makes the verdict as `analyze` does; its
wall time and peak memory (`VmHWM`) are shown. The data are deleted afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import argument_parser, write_json
from store import Store
from store.database import connect_writer
from tests.support.simulator.introduction import introduction
from tests.support.simulator.layout import WORLD, Layout
from tests.support.simulator.recording import Event, Scenario
from tests.support.simulator.tapes import EPOCH_NS, Run

BASE_NS = 90_000_000
SLOW_RATIO = 1.05
DRAWN_STEPS = 1_000
GOALS = {"steps": "60 s, 4 GB", "hang": "10 s", "dumps": "10 s"}
_CHILD = """
import resource, sys, time
from pathlib import Path
began = time.perf_counter()
from analyzers.report.json import to_json
path = Path(sys.argv[1])
if sys.argv[2] == "dumps":
    from analyzers.evidence.diagnose_files import diagnose_files
    diagnosis = diagnose_files([path])
else:
    from analyzers.diagnose import diagnose
    from analyzers.account.long_run import MEMORY_BYTES
    from probes.tape.rundir import RunDir
    from store import Store
    run = RunDir.open(path)
    with Store.open(run, memory_bytes=MEMORY_BYTES, spills=True) as store:
        diagnosis = diagnose(store, run.manifest(), stacks_dir=run.stacks)
to_json(diagnosis)
status = Path("/proc/self/status").read_text()
peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
first = diagnosis.fired[0] if diagnosis.fired else None
import json
print(json.dumps({"seconds": time.perf_counter() - began, "peak_kib": max(peak, children),
                  "cpu_s": sum(resource.getrusage(who).ru_utime + resource.getrusage(who).ru_stime
                               for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)),
                  "found": first and first.kind, "cause": first and first.cause, "named": first and list(first.ranks),
                  "first_step": first and first.first_step, "verdict": diagnosis.verdict}))
"""


def make_run(
    path: Path,
    ranks: int,
    *,
    hang: bool,
    steps: int = 0,
    layout: Layout | None = None,
    more_events: Sequence[Event] = (),
) -> Run:
    """Make a run's folder with the events of all ranks and no tapes; its store has the ranks."""
    layout = layout or Layout(dp_replicate=ranks, ranks_per_node=ranks)
    scenario = Scenario(seed=0, layout=layout, steps=1)
    run = Run(scenario, path)
    end_ns = 10**15 if hang else (steps + 2) * 10**8
    if hang:
        ends = [Event(-1, end_ns, "run_ended", None, {"reason": "interrupted", "exit_code": 130, "message": ""})]
    else:
        closed: dict[str, Any] = {"probe_errors": {}, "dropped_records": {}}
        ends = [Event(rank, end_ns, "rank_closed", None, closed) for rank in range(ranks)]
        ends.append(Event(-1, end_ns, "run_ended", None, {"reason": "finished", "exit_code": 0, "message": ""}))
    run.write_events([*introduction(scenario), *more_events, *ends])
    with Store.open(run.run):
        pass
    return run


def make_steps(
    path: Path,
    ranks: int,
    steps: int,
    *,
    layout: Layout | None = None,
    more_events: Sequence[Event] = (),
    jump_at: int | None = None,
    work_ns: int = BASE_NS,
    idle_ns: int = 0,
) -> int:
    """Fill the store with steps, in the order of ingestion (some steps of all ranks, then the next); return its bytes.

    The loss of step `jump_at` is twice that of the others. `work_ns`: own work of a rank in a step. In the rest of the
    step it waits: `idle_ns` between phases, as in a pipeline stage, else in collectives.
    """
    run = make_run(path, ranks, hang=False, steps=steps, layout=layout, more_events=more_events).run
    connection = connect_writer(run.store(), wait_s=10, threads=2)
    compute_ns = BASE_NS * 108 // 100 - idle_ns
    slow_rank, onset, drawn = ranks // 3, steps // 2, min(steps, DRAWN_STEPS)
    connection.execute(
        f"""
        CREATE TEMP TABLE drawn AS SELECT rank, step, CAST({work_ns // 1000} * (1 + 0.016 * (random() - 0.5)
            + 0.003 * (hash(rank) % 100 / 50.0 - 1)) AS BIGINT) * 1000 AS own
        FROM range({ranks}) r(rank), range({drawn}) s(step) ORDER BY rank, step
        """
    )
    for first in range(0, steps, drawn):
        connection.execute(
            f"""
            INSERT INTO steps_done BY NAME
            SELECT 0 AS attempt, rank, step, {EPOCH_NS} + step * 100000000 AS start_ns, 100000000 AS duration_ns,
                   2000000 AS data_ns, own // 3 AS forward_ns, {compute_ns} - own // 3 AS backward_ns,
                   2000000 AS optimizer_ns, 0 AS checkpoint_ns, 0 AS evaluate_ns, 0 AS data_wait_ns,
                   0 AS forward_wait_ns, {compute_ns} - own AS backward_wait_ns, 0 AS optimizer_wait_ns,
                   {BASE_NS * 108 // 100} - own AS collective_wait_ns, own + 3000000 AS cpu_ns, 0 AS gc_ns,
                   0 AS run_delay_ns, 0 AS major_faults, 4096 AS tokens, step - 1 AS batch_index, loss,
                   loss AS local_loss, 0.2 * loss AS grad_norm, 3e-4 AS lr, 8000000000 AS memory_bytes,
                   true AS committed
            FROM (
                SELECT rank, step + {first} + 1 AS step,
                       (2.0 + 8.0 * pow(1.0 + (step + {first} + 1) / 5.0, -0.35))
                           * CASE WHEN step + {first} + 1 = {jump_at or -1} THEN 2 ELSE 1 END AS loss,
                       CASE WHEN rank = {slow_rank} AND step + {first} + 1 >= {onset}
                       THEN own * {round(100 * SLOW_RATIO)} // 100 ELSE own END AS own
                FROM drawn WHERE step + {first} < {steps})
            """
        )
    connection.execute("CHECKPOINT")
    connection.close()
    return run.store().stat().st_size


def make_hang(path: Path, ranks: int, in_flight: int) -> int:
    """Fill the store with a hang: all ranks but one have issued `in_flight` calls of the next step, which cannot end.
    Returns the bytes.
    """
    run = make_run(path, ranks, hang=True).run
    connection = connect_writer(run.store(), wait_s=10, threads=2)
    group = Layout(dp_replicate=ranks, ranks_per_node=ranks).labels(WORLD)[0].replace("'", "''")
    columns = f"""
        0 AS attempt, rank, 21 AS step, seq, 33554432 AS bytes, {EPOCH_NS} + 2100000000 + seq * 1000000 AS issue_ns,
        0 AS wait_ns, '{group}' AS process_group, 'all_reduce' AS op, 'float32' AS dtype, '8388608' AS shape,
        'backward' AS phase, 'train.py:121 train' AS caller, true AS is_async, false AS nonfinite
    """
    connection.execute(
        f"INSERT INTO steps_done BY NAME SELECT 0 AS attempt, rank, step, {EPOCH_NS} + step * 100000000 AS start_ns, "
        "100000000 AS duration_ns, 30000000 AS forward_ns, 60000000 AS backward_ns, 2.5 AS loss, true AS committed "
        f"FROM range({ranks}) r(rank), range(1, 21) s(step)"
    )
    connection.execute(
        f"INSERT INTO steps_open BY NAME SELECT 0 AS attempt, rank, 21 AS step, {EPOCH_NS} + 2100000000 AS start_ns "
        f"FROM range({ranks}) r(rank)"
    )
    connection.execute(
        f"INSERT INTO collectives_done BY NAME SELECT {columns}, {EPOCH_NS} + 2100800000 + seq * 1000000 AS end_ns "
        f"FROM range({ranks}) r(rank), range(10) s(seq)"
    )
    connection.execute(
        f"INSERT INTO collectives_open BY NAME SELECT {columns} "
        f"FROM range({ranks}) r(rank), range(10, {10 + in_flight}) s(seq) WHERE rank <> {ranks // 3}"
    )
    connection.execute("CHECKPOINT")
    connection.close()
    return run.store().stat().st_size


def make_dumps(path: Path, ranks: int, entries: int) -> int:
    """Write dumps as NCCL's watchdog does; return their total bytes."""
    path.mkdir(parents=True)
    frames = [{"name": "train_step", "filename": "/home/user/project/train.py", "line": 120}]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))}}
    begin_ns, total = EPOCH_NS, 0
    for rank in range(ranks):
        last = entries - (1 if rank == ranks // 3 else 0)
        rows = []
        for number in range(last):
            done = number < entries - 1
            rows.append({
                "frames": frames, "record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"),
                "collective_seq_id": number + 1, "p2p_seq_id": 0, "op_id": number + 1,
                "profiling_name": "nccl:all_reduce", "time_created_ns": begin_ns + number * 10**6,
                "input_sizes": [[8388608]], "input_dtypes": ["Float"], "output_sizes": [[8388608]],
                "output_dtypes": ["Float"], "state": "completed" if done else "started",
                "time_discovered_started_ns": begin_ns + number * 10**6 + 1000,
                "time_discovered_completed_ns": begin_ns + number * 10**6 + 2000 if done else None,
                "retired": done, "timeout_ms": 600_000, "is_p2p": False,
            })  # fmt: skip
        dump = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": rows}
        blob = pickle.dumps(dump, protocol=2)
        file = path / f"nccl_trace_rank_{rank}"
        file.write_bytes(blob)
        written_ns = begin_ns + entries * 10**6 + 605 * 10**9  # the watchdog dumps after the timeout
        os.utime(file, ns=(written_ns, written_ns))
        total += len(blob)
    return total


def measure(path: Path, kind: str, timeout_s: float) -> dict[str, Any]:
    """Make the verdict in a child; return its seconds, peak memory and content."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(path), kind], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:300] if done.stderr else f"exit {done.returncode}"}
    # DuckDB may have printed a progress bar before it, because it takes `python -c` for an interactive session.
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def point(kind: str, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    with tempfile.TemporaryDirectory(prefix="scale-", dir=options.folder) as folder:
        path, began = Path(folder) / "run", time.perf_counter()
        if kind == "steps":
            num_bytes, rows = make_steps(path, ranks, options.steps), ranks * options.steps
        elif kind == "hang":
            num_bytes, rows = make_hang(path, ranks, options.in_flight), ranks * options.in_flight
        else:
            num_bytes, rows = make_dumps(path, ranks, options.in_flight), ranks * options.in_flight
        made_s = time.perf_counter() - began
        found = measure(path, kind, options.timeout_s)
        shutil.rmtree(path, ignore_errors=True)
    right = found.get("named") == [ranks // 3] and found.get("found") == ("straggler" if kind == "steps" else "hang")
    return {"kind": kind, "ranks": ranks, "rows": rows, "bytes": num_bytes, "made_s": made_s, "right": right, **found}


def show(row: dict[str, Any]) -> None:
    """One line."""
    head = f"{row['kind']:6} {row['ranks']:6,} ranks {row['rows']:12,} rows {row['bytes'] / 1e6:8,.0f} MB  "
    if "error" in row:
        print(f"{head} {row['error']}", flush=True)
        return
    verdict = "right" if row["right"] else f"WRONG: {row['verdict'][:90]}"
    print(f"{head}{row['seconds']:7.1f} s {row['cpu_s']:7.1f} s CPU {row['peak_kib'] / 1024:7,.0f} MiB  "
          f"{verdict} (made in {row['made_s']:.0f} s)", flush=True)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a verdict was wrong."""
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="steps, hang, dumps; default: all three")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--in-flight", type=int, default=2000, help="open calls, or dump entries, per rank")
    parser.add_argument("--quick", action="store_true", help="8 and 64 ranks, 2,000 steps, 200 calls")
    parser.add_argument("--folder", type=Path, help="folder for the runs; 4,096 x 100,000 steps take some 6 GB")
    parser.add_argument("--timeout-s", type=float, default=900)
    options = parser.parse_args(arguments)
    if unknown := set(options.kinds) - set(GOALS):
        parser.error(f"unknown kind: {', '.join(sorted(unknown))}; choose {', '.join(GOALS)}")
    if options.quick:
        options.ranks, options.steps, options.in_flight = [8, 64], 2_000, 200
    before, rows = os.getloadavg()[0], []
    for kind in options.kinds or GOALS:
        for ranks in options.ranks:
            rows.append(point(kind, ranks, options))
            show(rows[-1])
        print(f"{kind:6} goal at 4,096 ranks: {GOALS[kind]}")
    print(f"load {before:.1f} before, {os.getloadavg()[0]:.1f} after, {os.cpu_count()} processors")
    write_json(options.json, {"points": rows, "load_before": before})
    return int(not all(row["right"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
