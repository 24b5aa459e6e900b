"""Comparison with other tools: rules for loss spikes on the same curves, and torch's tools on the same hangs.

    python -m benchmarks.cost.compare_tools spikes --runs 400       # a minute on one core
    python -m benchmarks.cost.compare_tools hangs              # real gloo ranks, TORCH_DISTRIBUTED_DEBUG=DETAIL
    python -m benchmarks.cost.compare_tools --quick

*Spikes*: simulated curves (`tests.support.simulator.curves`), with a bad batch, or one step at a hundred times the
learning rate, at a random step; the loop does not react. Caught: a verdict within 20 steps of the onset. False alarms:
verdicts before the onset, and in as many clean runs, per million steps.

*Hangs*: all three tools get the same faulty program. torch's DETAIL mode compares fingerprints of the calls before
issuing them; it runs with real ranks over gloo, and counts as right if an error comes before the timeout (8 s) and
names the ranks. torchfrtrace and Rankscope read flight-recorder dumps of that program in NCCL's format.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy.spike_rules import RULES
from benchmarks.harness import argument_parser, write_json
from tests.support.simulator.curves import Curves
from tests.support.simulator.faults import Fault
from tests.support.simulator.noise import QUIET, SHARED_HOST

STEPS = 1200
MAX_DELAY_STEPS = 20
RANKS = 4
TIMEOUT_S = 8.0


def curve(seed: int, kind: str) -> tuple[list[tuple[float, float]], int]:
    """((loss, gradient norm) of each step, onset); onset -1: a clean curve."""
    rng = np.random.default_rng([seed, len(kind)])
    onset = int(rng.integers(150, STEPS - 100))
    fault = None
    if kind == "bad_batch":
        fault = Fault(kind=kind, step=onset, factor=float(rng.uniform(0.25, 1.0)))
    elif kind == "lr_spike":
        fault = Fault(kind=kind, step=onset)
    curves = Curves(rng, SHARED_HOST if seed % 2 else QUIET, fault)
    readings = [curves.reading(step, step - 1, step > onset) for step in range(1, STEPS + 1)]
    return [(reading.loss, reading.grad_norm) for reading in readings], onset if fault else -1


def spikes(runs: int) -> list[dict[str, Any]]:
    """One row per rule."""
    rows = {name: {"rule": name, "caught": {}, "steps": [], "false": 0} for name in RULES}
    watched = 0
    for kind in ("bad_batch", "lr_spike", "clean"):
        for seed in range(runs):
            values, onset = curve(seed, kind)
            last_clean = onset - 1 if onset > 0 else STEPS
            watched += last_clean
            for name, make in RULES.items():
                rule, row = make(), rows[name]
                for step, (loss, norm) in enumerate(values, start=1):
                    found = rule(loss, norm)
                    if found and step <= last_clean:
                        row["false"] += 1
                    elif found and step <= onset + MAX_DELAY_STEPS:
                        row["caught"][kind] = row["caught"].get(kind, 0) + 1
                        row["steps"].append(step - onset)
                        break
                    if onset > 0 and step > onset + MAX_DELAY_STEPS:
                        break
    for row in rows.values():
        steps = sorted(row.pop("steps"))
        row["runs"] = runs
        row["false_per_million"] = row["false"] * 1e6 / watched
        row["steps_median"] = steps[len(steps) // 2] if steps else None
        row["watched_steps"] = watched
    return list(rows.values())


# ---- hangs: one program for torch's DETAIL mode (real), torchfrtrace and Rankscope (dumps) ----


def _operation(rank: int, dist: Any, torch: Any) -> None:
    if rank == 2:
        dist.broadcast(torch.ones(8), src=0)
    else:
        dist.all_reduce(torch.ones(8))


def _size(rank: int, dist: Any, torch: Any) -> None:
    dist.all_reduce(torch.ones(4 if rank == 2 else 8))


def _dtype(rank: int, dist: Any, torch: Any) -> None:
    dist.all_reduce(torch.ones(8, dtype=torch.float64 if rank == 2 else torch.float32))


def _skipped(rank: int, dist: Any, torch: Any) -> None:
    if rank != 3:
        dist.all_reduce(torch.ones(8))
    else:
        time.sleep(2 * TIMEOUT_S)


def _unanswered(rank: int, dist: Any, torch: Any) -> None:
    if rank == 1:
        dist.recv(torch.ones(8), src=0)
    elif rank == 0:
        time.sleep(2 * TIMEOUT_S)


PROGRAMS: dict[str, tuple[Callable[[int, Any, Any], None], tuple[int, ...]]] = {
    "different operations": (_operation, (2,)),
    "different sizes": (_size, (2,)),
    "different element types": (_dtype, (2,)),
    "a rank that never enters": (_skipped, (3,)),
    "a receive without its send": (_unanswered, (0,)),
}


def _rank_main(rank: int, name: str, folder: str) -> None:
    import os

    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT_S))
    dist.all_reduce(torch.ones(8))
    start, error_text = time.monotonic(), ""
    try:
        PROGRAMS[name][0](rank, dist, torch)
    except Exception as error:
        error_text = str(error)
    Path(folder, f"{rank}.json").write_text(json.dumps({"error_text": error_text, "seconds": time.monotonic() - start}))
    os._exit(0)


def detail(name: str) -> dict[str, Any]:
    """Run a program in DETAIL mode; return the delay of its error, and whether the text names exactly the culprits."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        processes = [context.Process(target=_rank_main, args=(rank, name, folder)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(6 * TIMEOUT_S)
            process.kill()
        files = [Path(folder, f"{rank}.json") for rank in range(RANKS)]
        found = [json.loads(file.read_text()) for file in files if file.exists()]
        aborted = [rank for rank, file in enumerate(files) if not file.exists()]  # how gloo fails on different sizes
    raised = [one for one in found if one["error_text"]]
    text = " ".join(one["error_text"] for one in raised)
    named = {int(number) for number in re.findall(r"[Rr]anks? (\d+)", text)}
    first = min((one["seconds"] for one in raised), default=None)
    return {
        "seconds": first,
        "aborted_ranks": aborted,
        "before_timeout": first is not None and first < TIMEOUT_S * 0.9,
        "names": sorted(named),
        "right": named == set(PROGRAMS[name][1]),
        "text": raised[0]["error_text"].splitlines()[0][:200] if raised else "",
    }


def dumps(name: str) -> dict[str, Any]:
    """Verdicts of torchfrtrace and of Rankscope on dumps of the same program."""
    from analyzers.evidence.diagnose_files import diagnose_files
    from tests.support.simulator.recorder_dumps import PREFIX, Job

    job = Job(RANKS)
    job.steps(3)
    if name == "different operations":
        job.collective("all_reduce", ranks=[0, 1, 3])
        job.collective("broadcast", ranks=[2])
    elif name == "different sizes":
        job.collective("all_reduce", ranks=[0, 1, 3])
        job.collective("all_reduce", ranks=[2], numel=512)
    elif name == "different element types":
        job.collective("all_reduce", ranks=[0, 1, 3])
        job.collective("all_reduce", ranks=[2], dtype="Double")
    elif name == "a rank that never enters":
        job.collective("all_reduce", ranks=[0, 1, 2])
    else:
        job.p2p(0, 1, sides="recv", state="started")
    with tempfile.TemporaryDirectory(prefix="compare-") as path:
        folder = job.write(Path(path))
        fired = diagnose_files([folder]).fired
        frtrace = _torchfrtrace(folder, PREFIX)
    truth = set(PROGRAMS[name][1])
    ours = set(fired[0].ranks) if fired else set()
    return {
        "ours": fired[0].cause if fired else "", "our_ranks": sorted(ours), "ours_right": ours == truth,
        "torchfrtrace": sorted(f"{kind} {rank}" for kind, rank in frtrace),
        "torchfrtrace_right": {rank for _, rank in frtrace} == truth,
    }  # fmt: skip


def _torchfrtrace(folder: Path, prefix: str) -> set[tuple[str, int]]:
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig
    from torch.distributed.flight_recorder.components.loader import read_dir

    args: Any = JobConfig().parse_args([str(folder), "-p", prefix])
    details, version = read_dir(args)
    found: set[tuple[str, int]] = set()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        collectives = build_db(details, args, version).collectives
    for collective in collectives:
        found |= {("missing", rank) for rank in collective.missing_ranks or ()}
        for rank, other in (collective.mismatch_collectives or {}).items():
            if other.type_of_mismatch is not None:
                found.add((other.type_of_mismatch.state.name, rank))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; always returns 0, since this only compares."""
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("what", nargs="*", metavar="WHAT", help="spikes, hangs; default: both")
    parser.add_argument("--runs", type=int, default=400, help="curves of each kind (400)")
    parser.add_argument("--quick", action="store_true", help="20 curves of each kind, one hang")
    options = parser.parse_args(arguments)
    what, result = options.what or ["spikes", "hangs"], {}
    if "spikes" in what:
        runs = 20 if options.quick else options.runs
        result["spikes"] = rows = spikes(runs)
        print(f"{'rule':18} {'bad batch':>10} {'rate x 100':>11} {'false alarms/M':>15} {'steps p50':>10}")
        for row in rows:
            shares = [row["caught"].get(kind, 0) / runs for kind in ("bad_batch", "lr_spike")]
            steps = "-" if row["steps_median"] is None else row["steps_median"]
            print(f"{row['rule']:18} {shares[0]:10.3f} {shares[1]:11.3f} {row['false_per_million']:15.1f} {steps:>10}")
        print(f"{runs} runs of each kind, {rows[0]['watched_steps']:,} clean steps")
    if "hangs" in what:
        names = list(PROGRAMS)[:1] if options.quick else list(PROGRAMS)
        result["hangs"] = hangs = [{"program": n, "detail": detail(n), **dumps(n)} for n in names]
        for hang in hangs:
            row = hang["detail"]
            when = "silent" if row["seconds"] is None else f"{row['seconds']:.1f} s, names {row['names']}"
            when += f", ranks {row['aborted_ranks']} abort" if row["aborted_ranks"] else ""
            frtrace = ", ".join(hang["torchfrtrace"]) or "nothing"
            print(f"{hang['program']:28} DETAIL: {when} ({'right' if row['right'] else 'not right'}); "
                  f"torchfrtrace: {frtrace}; Rankscope: {hang['ours']} {hang['our_ranks']}")  # fmt: skip
    write_json(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
