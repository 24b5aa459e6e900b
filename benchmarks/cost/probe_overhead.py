"""Cost of the probes: the same training loop with and without them, in alternating blocks.

    python -m benchmarks.cost.probe_overhead --quick                  # under a minute
    python -m benchmarks.cost.probe_overhead --json overhead.json
    python -m benchmarks.cost.probe_overhead --ranks 2 --step-ms 50 --blocks 60 --kind fsdp

Each rank holds the model twice: with plain process groups, and with recorded ones and all probes (steps, spans,
collectives with their check for NaN, gradients of each parameter at every 10th step). Blocks of a few steps alternate
between the two in one process, so that other load affects both; their order alternates, too.

| figure | meaning |
|---|---|
| ratio | median step with probes / median step without, with a 95 % interval from resampling pairs of blocks |
| CPU ratio | the same for the CPU time of the process, all threads; least affected by other load |
| record | time to write one record: append, span (two stores), step (two stores, CPU time, memory) |
| collective | time added to one all_reduce of 4 numbers in a group of one rank, without noise from peers |
| records | records written per step, by table |

Costs of single calls are the 10th percentile of many repeats, which is their undisturbed time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from benchmarks.harness import argument_parser, write_json
from probes.collectives.wrapped import install, uninstall
from probes.gradients import GradientProbe
from probes.recorder import NullRecorder
from probes.tape.format.reader import read_segment, segment_paths
from probes.tape.format.writer import COMPLETE, OPEN
from probes.tape_recorder import TapeRecorder

WIDTH = 128
LAYERS = 8  # 1 M parameters in total: the check for NaN reads each gradient once, 0.06 ms per million
GRADIENT_INTERVAL = 10  # the trainer's default
STEPS_A_BLOCK = 5
RESAMPLES = 2000
SEED = 0


class Loop:
    """One model with its optimizer and its recorder."""

    def __init__(self, kind: str, group: dist.ProcessGroup, recorder: TapeRecorder) -> None:
        torch.manual_seed(SEED)
        self.recorder = recorder
        self.net: nn.Module = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS))
        )
        if kind == "ddp":
            self.net = nn.parallel.DistributedDataParallel(self.net, process_group=group, bucket_cap_mb=1)
        else:
            mesh = DeviceMesh.from_group(group, "cpu")
            for layer in self.net.children():
                fully_shard(layer, mesh=mesh)
            fully_shard(self.net, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)
        self.gradients = GradientProbe(recorder, self.net.named_parameters(), interval=GRADIENT_INTERVAL)
        self.number = 0

    def step(self, x: Tensor) -> None:
        """One training step; a disabled recorder does nothing."""
        recorder = self.recorder
        self.number += 1
        with recorder.step(self.number):
            with recorder.span("data"):
                x = x + 1.0
            with recorder.span("forward"):
                loss = self.net(x).square().mean()
            with recorder.span("backward"):
                loss.backward()
            self.gradients.after_backward(self.number)
            with recorder.span("optimizer"):
                self.optimizer.step()
                self.optimizer.zero_grad()
            recorder.log(tokens=len(x), lr=1e-3)


def median_with_interval(probed: list[list[float]], bare: list[list[float]]) -> tuple[float, float, float]:
    """Ratio of the medians over all steps, and its 2.5th and 97.5th percentile over resampled pairs of blocks."""
    probed_blocks, bare_blocks = np.array(probed), np.array(bare)
    ratio = float(np.median(probed_blocks) / np.median(bare_blocks))
    random = np.random.default_rng(SEED)
    chosen = random.integers(0, len(probed_blocks), (RESAMPLES, len(probed_blocks)))
    ratios = np.median(probed_blocks[chosen], axis=(1, 2)) / np.median(bare_blocks[chosen], axis=(1, 2))
    low, high = np.percentile(ratios, [2.5, 97.5])
    return ratio, float(low), float(high)


def rows_for(loop: Loop, target_ms: float) -> int:
    """Number of input rows for which a step takes `target_ms` on the slowest rank; the same on all ranks."""
    size, took = 16, 0.0
    while took < target_ms and size < 1 << 15:
        size = size * 2 if took < target_ms / 4 else int(size * target_ms / took) + 1
        x = torch.randn(size, WIDTH)
        times = []
        for _ in range(4):
            start = time.perf_counter()
            loop.step(x)
            times.append(time.perf_counter() - start)
        slowest = torch.tensor(statistics.median(times[1:]) * 1e3)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        took = slowest.item()
    return size


def compare_loops(
    kind: str, plain: Any, recorded: Any, recorder: TapeRecorder, options: argparse.Namespace
) -> dict[str, Any]:
    bare = Loop(kind, plain, NullRecorder())
    probed = Loop(kind, recorded, recorder)
    size = rows_for(bare, options.step_ms)
    x = torch.randn(size, WIDTH)
    times: dict[bool, list[list[float]]] = {True: [], False: []}
    cpu_times: dict[bool, list[list[float]]] = {True: [], False: []}
    for loop in (bare, probed):
        for _ in range(3):
            loop.step(x)
    counted_from = count_records(recorder)
    for block in range(options.blocks):
        for with_probes in (block % 2 == 0, block % 2 == 1):
            loop, taken, cpu_taken = (probed if with_probes else bare), [], []
            dist.barrier(group=plain)
            for _ in range(STEPS_A_BLOCK):
                cpu_start, start = time.process_time(), time.perf_counter()
                loop.step(x)
                taken.append((time.perf_counter() - start) * 1e3)
                cpu_taken.append((time.process_time() - cpu_start) * 1e3)
            times[with_probes].append(taken)
            cpu_times[with_probes].append(cpu_taken)
    steps = options.blocks * STEPS_A_BLOCK
    counted = {table: (count - counted_from[table]) / steps for table, count in count_records(recorder).items()}
    ratio, low, high = median_with_interval(times[True], times[False])
    cpu_ratio, cpu_low, cpu_high = median_with_interval(cpu_times[True], cpu_times[False])
    return {
        "kind": kind,
        "bare_step_ms": float(np.median(times[False])),
        "probed_step_ms": float(np.median(times[True])),
        "ratio": ratio,
        "ratio_low": low,
        "ratio_high": high,
        "bare_cpu_ms": float(np.median(cpu_times[False])),
        "probed_cpu_ms": float(np.median(cpu_times[True])),
        "cpu_ratio": cpu_ratio,
        "cpu_ratio_low": cpu_low,
        "cpu_ratio_high": cpu_high,
        "rows": size,
        "steps": steps,
        "records_a_step": counted,
    }


def count_records(recorder: TapeRecorder) -> dict[str, int]:
    tables = ("steps", "spans", "collectives", "gradients")
    return {
        table: sum(len(read_segment(path).records) for path in segment_paths(recorder.directory, table))
        for table in tables
    }


def undisturbed(values: list[float]) -> float:
    """The 10th percentile."""
    return float(np.percentile(values, 10))


def best_us(call: Callable[[], object], count: int = 500, repeats: int = 60) -> float:
    """Undisturbed microseconds per call; each repeat is the mean over `count` calls."""
    means = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        for _ in range(count):
            call()
        means.append((time.perf_counter_ns() - start) / count / 1e3)
    return undisturbed(means)


def record_costs(recorder: TapeRecorder) -> dict[str, float]:
    """Microseconds to write one record of each kind, without the loop around it."""
    spans, gradients, collectives = (recorder.tape(table) for table in ("spans", "gradients", "collectives"))
    span_row, collective_row = tuple(spans.unset_row()), tuple(collectives.unset_row())
    finish = collectives.finisher("end_ns", "wait_ns")
    slot = collectives.append(OPEN, *collective_row)

    def span() -> None:
        with recorder.span("forward"):
            pass

    def step() -> None:
        with recorder.step(1):
            pass

    empty = best_us(lambda: None)
    return {
        "append, gradients (5 columns)": best_us(lambda: gradients.append(COMPLETE, 1, 2, 0.5, 0.5, 0)) - empty,
        "append, spans (7 columns)": best_us(lambda: spans.append(OPEN, *span_row)) - empty,
        "append, collectives (15 columns)": best_us(lambda: collectives.append(OPEN, *collective_row)) - empty,
        "complete, collectives": best_us(lambda: finish(slot, 1, 2)) - empty,
        "span": best_us(span) - empty,
        "step": best_us(step) - empty,
    }


def collective_costs(plain: Any, quiet: Any, checked: Any, rounds: int) -> list[dict[str, Any]]:
    """Microseconds of one bare call, and those added by the probe without and with the check for NaN."""
    x = torch.ones(4)
    functional = torch.ops._c10d_functional

    def blocking(group: Any) -> None:
        dist.all_reduce(x, group=group)

    def handle(group: Any) -> None:
        dist.all_reduce(x, group=group, async_op=True).wait()  # type: ignore[union-attr]

    def from_cpp(group: Any) -> None:
        functional.wait_tensor(functional.all_reduce(x, "sum", group.group_name))

    found = []
    for name, call in (("blocking", blocking), ("handle and wait", handle), ("functional (from C++)", from_cpp)):
        taken: dict[int, list[float]] = {0: [], 1: [], 2: []}
        for _ in range(rounds):
            for index, group in enumerate((plain, quiet, checked)):
                single = []
                for _ in range(20):
                    start = time.perf_counter_ns()
                    call(group)
                    single.append((time.perf_counter_ns() - start) / 1e3)
                taken[index].append(statistics.median(single))
        bare, quietly, with_check = (undisturbed(taken[index]) for index in range(3))
        found.append(
            {"call": name, "bare_us": bare, "added_us": quietly - bare, "added_with_check_us": with_check - bare}
        )
    return found


def _rank_main(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), options.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks, timeout=timedelta(seconds=120))
    recorder = TapeRecorder(Path(folder) / f"rank-{rank}", rank=rank, attempt=0, world_size=options.ranks)
    plain = dist.new_group()
    alone = [dist.new_group([other]) for other in range(options.ranks)][rank]
    install(recorder)
    recorded = dist.new_group()
    checked = [dist.new_group([other]) for other in range(options.ranks)][rank]
    install(recorder, check_nonfinite=False)
    quiet = [dist.new_group([other]) for other in range(options.ranks)][rank]

    result: dict[str, Any] = {"loops": [], "ranks": options.ranks}
    for kind in options.kind:
        result["loops"].append(compare_loops(kind, plain, recorded, recorder, options))
    dist.barrier()
    if rank == 0:  # this rank alone: the others wait without working
        result["collectives_us"] = collective_costs(alone, quiet, checked, 100 if options.quick else 400)
        result["records_us"] = record_costs(recorder)
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.barrier()
    uninstall()
    recorder.close()
    dist.destroy_process_group()


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    console = Console()
    loops = Table(title=f"Training loop, {result['ranks']} ranks on gloo")
    for column in ("step", "bare", "with probes", "ratio", "95 % interval"):
        loops.add_column(column, justify="left" if column == "step" else "right")
    for loop in result["loops"]:
        for what, bare, probed, ratio in (
            ("time", "bare_step_ms", "probed_step_ms", "ratio"),
            ("CPU", "bare_cpu_ms", "probed_cpu_ms", "cpu_ratio"),
        ):
            loops.add_row(
                f"{loop['kind']}, {what}",
                f"{loop[bare]:.2f} ms",
                f"{loop[probed]:.2f} ms",
                f"{loop[ratio]:.4f}",
                f"{loop[f'{ratio}_low']:.4f} to {loop[f'{ratio}_high']:.4f}",
            )
    console.print(loops)
    for loop in result["loops"]:
        records = loop["records_a_step"]
        parts = ", ".join(f"{count:g} {table}" for table, count in records.items())
        console.print(f"{loop['kind']}: {sum(records.values()):g} records a step ({parts})")
    calls = Table(title="One all_reduce in a group of one rank")
    for column in ("call", "bare", "added", "added with check for NaN"):
        calls.add_column(column, justify="left" if column == "call" else "right")
    for row in result["collectives_us"]:
        calls.add_row(row["call"], *(f"{row[key]:.1f} us" for key in ("bare_us", "added_us", "added_with_check_us")))
    console.print(calls)
    costs = Table(title="One record")
    costs.add_column("what")
    costs.add_column("cost", justify="right")
    for name, cost in result["records_us"].items():
        costs.add_row(name, f"{cost:.2f} us")
    console.print(costs)


def main() -> None:
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--quick", action="store_true", help="fewer blocks: under a minute")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=50.0, help="approximate duration of a bare step")
    parser.add_argument("--blocks", type=int, help=f"pairs of blocks of {STEPS_A_BLOCK} steps (default 40, quick 10)")
    parser.add_argument("--kind", action="append", choices=["ddp", "fsdp"], help="default: both")
    options = parser.parse_args()
    options.blocks = options.blocks or (10 if options.quick else 40)
    options.kind = options.kind or ["ddp", "fsdp"]
    with tempfile.TemporaryDirectory(prefix="probe-overhead-") as folder:
        mp.spawn(_rank_main, (options, folder), nprocs=options.ranks)
        result = json.loads(Path(folder, "result.json").read_text())
    result |= {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }
    show(result)
    write_json(options.json, result)


if __name__ == "__main__":
    main()
