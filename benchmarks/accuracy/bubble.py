"""Idle time of pipeline ranks: measured from the recorded spans, compared with the schedule's formula.

    python -m benchmarks.accuracy.bubble --quick                 # under a minute
    python -m benchmarks.accuracy.bubble --json bubble.json      # three minutes, one of them CPU time
    python -m benchmarks.accuracy.bubble --ranks 4 --microbatches 8 --schedule 1f1b --forward-ms 40

*Bubble* = idle share of the total: 1 - (time in forward, loss, backward and weight spans) / (time from the pipeline's
first forward to its last backward), mean over the ranks; `analyzers.account.bubble` measures it, and has the formulas.

Two tables, both of real `torch.distributed.pipelining` schedules over gloo's real sends and receives, recorded by the
same probes:

1. Stages whose forward and backward take a fixed wall time. They sleep, so ranks do not compete for cores, and all
   stages take equally long whatever else the machine does, as the formula assumes. The measured bubble exceeds the
   formula by a few milliseconds per transfer between ranks, for waking up a process; the longer the stages, the smaller
   that share.
2. The trainer's GPT. Its stages are only roughly equal (embedding and head add to the first and the last). With fewer
   cores than ranks, computing ranks slow each other down and their spans grow, so the share also depends on the
   machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from analyzers.account.bubble import PipelineSpans, StepIdle, expected_idle, measure_idle
from benchmarks.harness import argument_parser, write_json
from probes.collectives.wrapped import install, uninstall
from probes.pipeline import record_schedule
from probes.tape.format.names import read_names
from probes.tape.format.reader import read_segment, segment_paths
from probes.tape.format.schema import UNSET
from probes.tape_recorder import TapeRecorder
from trainer.config.config import Config
from trainer.layout.resolve import resolve
from trainer.rank.instrument import instrument
from trainer.training.build import build

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
}
STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2}
WIDTH = 16


class TimedWork(torch.autograd.Function):
    """Takes time only: `forward_s` in the forward pass, twice as much in the backward pass."""

    @staticmethod
    def forward(context: Any, x: Tensor, forward_s: float) -> Tensor:
        context.backward_s = 2 * forward_s
        wait(forward_s)
        return x * 1.0

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        wait(context.backward_s)
        return gradient * 1.0, None


def wait(seconds: float) -> None:
    """Sleep until `seconds` have passed since the call; sleep again if woken early."""
    end = time.perf_counter() + seconds
    while (left := end - time.perf_counter()) > 0:
        time.sleep(left)


class TimedStage(nn.Module):
    """A stage of fixed wall time. Its weight makes autograd go through it."""

    def __init__(self, forward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.forward_s = forward_s

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = TimedWork.apply(x * self.weight, self.forward_s)
        return out


def timed_pipeline(name: str, rank: int, ranks: int, microbatches: int, forward_s: float) -> tuple[Any, list[Any]]:
    """Schedule and stages of one rank; a rank's stages share `forward_s`, so schedules compare at equal work."""
    per_rank = STAGES_PER_RANK[name]
    example = torch.empty(1, WIDTH, device="meta", requires_grad=True)
    stages = [
        PipelineStage(
            TimedStage(forward_s / per_rank),
            number,
            per_rank * ranks,
            torch.device("cpu"),
            input_args=example,
            output_args=example,
        )
        for number in range(rank, per_rank * ranks, ranks)
    ]
    schedule = SCHEDULES[name](
        stages[0] if per_rank == 1 else stages, microbatches, loss_fn=lambda out, target: (out - target).square().mean()
    )
    return schedule, stages


def run_timed(
    name: str, recorder: TapeRecorder, microbatches: int, options: argparse.Namespace, first_step: int
) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    schedule, stages = timed_pipeline(name, rank, ranks, microbatches, options.forward_ms / 1e3)
    record_schedule(recorder, schedule, stages)
    x = torch.randn(microbatches, WIDTH)
    for number in range(options.steps + 1):  # the first one also makes connections
        with recorder.step(first_step + number):
            schedule.step(
                *((x,) if stages[0].is_first else ()),
                target=x if stages[-1].is_last else None,
                losses=[] if stages[-1].is_last else None,
                return_outputs=False,
            )


def model_config(name: str, ranks: int, microbatches: int) -> Config:
    return Config.model_validate(
        {
            "model": {"dim": 128, "num_layers": 2 * ranks, "num_heads": 4},
            "data": {"seq_len": 128, "validation_ratio": 0.0},
            "parallel": {"pp": ranks, "dp_shard": 1, "schedule": name},
            "train": {"global_batch_size": microbatches, "micro_batch_size": 1, "device": "cpu"},
        }
    )


def run_model(
    name: str, recorder: TapeRecorder, microbatches: int, options: argparse.Namespace, first_step: int
) -> None:
    ranks = dist.get_world_size()
    config = model_config(name, ranks, microbatches)
    training = build(config, resolve(config, ranks), torch.device("cpu"), recorder=recorder)
    instrument(training, recorder)
    for number in range(options.steps + 1):
        with recorder.step(first_step + number):
            training.forward_backward(training.batch(number))
            training.clip()
            training.step(number)


def _rank_main(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    recorder = TapeRecorder(Path(folder) / f"rank-{rank}", rank=rank, attempt=0, world_size=options.ranks)
    install(recorder)
    store = dist.FileStore(os.path.join(folder, "store"), options.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks, timeout=timedelta(seconds=120))
    first_step = 0
    for run in (run_timed,) if options.no_model else (run_timed, run_model):
        for name in options.schedule:
            for microbatches in options.microbatches:
                dist.barrier()
                run(name, recorder, microbatches, options, first_step)
                first_step += 1000
    dist.barrier()
    uninstall()
    recorder.close()
    dist.destroy_process_group()


def recorded_spans(folder: Path, ranks: int) -> PipelineSpans:
    """The spans that the ranks have written."""
    parts: dict[str, list[Any]] = {
        column: [] for column in ("rank", "step", "stage", "microbatch", "start_ns", "end_ns")
    }
    kinds: list[str] = []
    for rank in range(ranks):
        names, _ = read_names(folder / f"rank-{rank}" / "names.jsonl")
        for path in segment_paths(folder / f"rank-{rank}", "spans"):
            records = read_segment(path).records
            kinds += [names[number] for number in records["kind"].tolist()]
            parts["rank"].append(np.full(len(records), rank, dtype=np.int64))
            for column in ("step", "stage", "microbatch", "start_ns", "end_ns"):
                parts[column].append(records[column].astype(np.int64))
    columns = {column: np.concatenate(values) for column, values in parts.items()}
    columns["stage"][columns["stage"] == UNSET["i32"]] = -1
    return PipelineSpans(kind=np.array(kinds, dtype=object), **columns)


def results(spans: PipelineSpans, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """One row per schedule and number of microbatches for each table; medians over the steps after the first."""
    by_step = {idle.step: idle for idle in measure_idle(spans, range(options.ranks))}
    tables: dict[str, list[dict[str, Any]]] = {}
    first_step = 0
    for table in ("timed_stages",) if options.no_model else ("timed_stages", "model"):
        tables[table] = []
        for name in options.schedule:
            for microbatches in options.microbatches:
                measured = [by_step[first_step + number] for number in range(1, options.steps + 1)]
                tables[table].append(_row(name, microbatches, measured, options.ranks))
                first_step += 1000
    return tables


def _row(name: str, microbatches: int, measured: list[StepIdle], ranks: int) -> dict[str, Any]:
    per_rank = STAGES_PER_RANK[name]
    idle = [step.idle_ratio for step in measured]
    expected = expected_idle(name, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank)
    assert expected is not None
    return {
        "schedule": name,
        "microbatches": microbatches,
        "stages_per_rank": per_rank,
        "expected_idle_ratio": expected,
        "idle_ratio": statistics.median(idle),
        "idle_ratio_low": min(idle),
        "idle_ratio_high": max(idle),
        "idle_ratio_by_rank": [
            statistics.median(step.ranks[rank].idle_ratio for step in measured) for rank in range(ranks)
        ],
        "step_ms": statistics.median(step.total_ns for step in measured) / 1e6,
        "steps": len(measured),
    }


def show(result: dict[str, Any]) -> None:
    """Print the tables. `batches` are microbatches."""
    console = Console()
    titles = {
        "timed_stages": f"Stages of fixed wall time (forward {result['forward_ms']:g} ms a rank, backward twice that)",
        "model": f"Trainer's GPT, similar stages, {result['ranks']} ranks on {result['cpus']} cores (see the caveat)",
    }
    for key, title in titles.items():
        if key not in result:
            continue
        table = Table(title=title, caption="idle share of the total: median over steps, lowest and highest")
        for column in ("schedule", "batches", "formula", "measured", "range", "points off"):
            table.add_column(column, justify="left" if column == "schedule" else "right", no_wrap=True)
        for row in result[key]:
            table.add_row(
                row["schedule"],
                str(row["microbatches"]),
                f"{row['expected_idle_ratio']:.1%}",
                f"{row['idle_ratio']:.1%}",
                f"{100 * row['idle_ratio_low']:.1f} - {row['idle_ratio_high']:.1%}",
                f"{100 * (row['idle_ratio'] - row['expected_idle_ratio']):+.1f}",
            )
        console.print(table)


def main() -> None:
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--quick", action="store_true", help="fewer steps: under a minute")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, action="append", help="default: 8 and 16")
    parser.add_argument("--schedule", action="append", choices=list(SCHEDULES), help="default: all")
    parser.add_argument("--no-model", action="store_true", help="only the first table, which takes hardly any CPU time")
    parser.add_argument("--forward-ms", type=float, help="forward of a microbatch on a rank (100, quick 20)")
    parser.add_argument("--steps", type=int, help="measured steps per row (default 4, quick 2)")
    options = parser.parse_args()
    options.microbatches = options.microbatches or [8, 16]
    options.schedule = options.schedule or list(SCHEDULES)
    options.steps = options.steps or (2 if options.quick else 4)
    options.forward_ms = options.forward_ms or (20.0 if options.quick else 100.0)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="bubble-") as folder:
        mp.spawn(_rank_main, (options, folder), nprocs=options.ranks)
        tables = results(recorded_spans(Path(folder), options.ranks), options)
    result = {
        **tables,
        "ranks": options.ranks,
        "forward_ms": options.forward_ms,
        "cpus": os.cpu_count(),
        "load_average_before": before,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    show(result)
    write_json(options.json, result)


if __name__ == "__main__":
    main()
