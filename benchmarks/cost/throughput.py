"""Tokens per second of the trainer's loop with all probes, compared with a plain PyTorch loop of the same model.

    python -m benchmarks.cost.throughput --quick                     # about a minute
    python -m benchmarks.cost.throughput --json throughput.json
    python -m benchmarks.cost.throughput --memory-interval 10        # with memory copies for rollbacks
    python -m benchmarks.cost.throughput --ranks 1 --kind ddp --precision bf16 \\
        --dim 768 --layers 12 --heads 12 --vocab 50304 --seq-len 1024 --batch 32       # GPT-2's size, on one GPU

    python -m benchmarks.cost.throughput --kernels --dim 64 --layers 2 --seq-len 32 --batch 2 --blocks 20

The trainer's loop is `trainer.rank.loop` as a worker runs it: recorded process groups, steps and spans, gradients of
every parameter at every 10th step, a check of every reduced buffer for NaN, and global loss and norm read back and
judged at every step. The bare loop is `benchmarks.cost.bare_loop`. Both run in the same processes in alternating blocks
of steps, so that other load affects both; their order alternates, too.

| figure | meaning |
|---|---|
| tokens/s | of all ranks together, median over blocks |
| ratio | trainer / bare, with a 95 % interval from resampling pairs of blocks |
| processor | the same ratio for CPU time (rank 0, all threads), which other load hardly affects |
| MFU | tokens/s x FLOPs per token / the devices' dense peak; only on a GPU whose peak is known |

With `--kernels` (CPU only): kernels per step of both loops, and additional CPU time per step of the trainer's loop
(microseconds), eager and with blocks compiled by inductor. Choose a small model; otherwise matrix products hide the
difference.

CPU time does not include waiting: on a quiet machine use the first ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
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

from analyzers.health.utilisation import peak_flops_per_s
from benchmarks.cost.bare_loop import BareLoop, Job
from benchmarks.cost.kernels import is_fused, kernels_a_step
from benchmarks.harness import argument_parser, markdown_head, markdown_row, write_json
from probes.collectives.wrapped import install, uninstall
from probes.device.stream_waits import stamp_waits
from probes.recorder import Recorder
from probes.tape.rundir import RunDir
from probes.tape_recorder import TapeRecorder
from trainer.config.config import Config
from trainer.data.mixture import TokenSource
from trainer.layout.resolve import resolve
from trainer.model.size import flops_per_token, num_parameters
from trainer.rank.instrument import instrument, record_compilation
from trainer.rank.loop import steps
from trainer.rank.session import make_session
from trainer.training.build import build

RESAMPLES = 4000


def configuration(kind: str, options: argparse.Namespace) -> Config:
    model = {"dim": options.dim, "num_layers": options.layers, "num_heads": options.heads}
    return Config.model_validate(
        {
            "model": {**model, "vocab_size": options.vocab},
            "data": {"seq_len": options.seq_len, "validation_ratio": 0.0},
            "parallel": {"dp_replicate": -1, "dp_shard": 1} if kind == "ddp" else {"dp_shard": -1},
            "train": {
                "steps": 10_000,
                "global_batch_size": options.batch * options.ranks,
                "precision": options.precision,
                "device": options.device,
                "compile": "auto" if options.compiled is None else options.compiled,
            },
            "checkpoint": {"interval": 0, "memory_interval": options.memory_interval},
        }
    )


class OurLoop:
    """`trainer.rank.loop` as a worker runs it, one step at a time, with all probes or with a disabled recorder."""

    def __init__(
        self,
        config: Config,
        recorder: Recorder,
        folder: Path,
        device: torch.device,
        corpus: TokenSource | None = None,
    ) -> None:
        plan = resolve(config, dist.get_world_size())
        # The start of recovery initialises the weights.
        self.training = build(config, plan, device, recorder=recorder, corpus=corpus, with_weights=False)
        gradients = instrument(self.training, recorder)
        record_compilation(recorder)
        run = RunDir(folder)
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        session = make_session(self.training, recorder, run, gradients)
        self._steps = steps(session, session.recovery.start())

    def step(self) -> None:
        next(self._steps)


def compare(kind: str, plain: Any, recorder: TapeRecorder, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Alternate both loops; return wall and CPU seconds per step of each block."""
    device = torch.device("cuda", dist.get_rank()) if options.device == "cuda" else torch.device("cpu")
    config = configuration(kind, options)
    bare = BareLoop(
        Job(
            model=config.model,
            seq_len=options.seq_len,
            batch_size=options.batch,
            kind=kind,
            bf16=options.precision == "bf16",
            compiled=options.compiled is True,
        ),
        plain,
        device,
    )
    ours = OurLoop(config, recorder, folder, device)
    taken: dict[str, list[float]] = {"ours": [], "bare": []}
    worked: dict[str, list[float]] = {"ours": [], "bare": []}
    loops: dict[str, Callable[[], None]] = {"ours": ours.step, "bare": bare.step}
    for step in loops.values():
        block(step, plain, device, options.steps_a_block)
    for number in range(options.blocks):
        for name in sorted(loops, reverse=number % 2 == 0):
            wall_s, cpu_s = block(loops[name], plain, device, options.steps_a_block)
            taken[name].append(wall_s)
            worked[name].append(cpu_s)
    kernels = {name: kernels_a_step(step, 3) for name, step in loops.items()} if options.kernels else {}
    tokens = options.batch * options.seq_len * dist.get_world_size()
    ratio, low, high = ratio_with_interval(taken["ours"], taken["bare"])
    cpu_ratio, cpu_low, cpu_high = ratio_with_interval(worked["ours"], worked["bare"])
    return {
        "kind": kind,
        "compiled": options.compiled,
        "kernels": {name: dict(found) for name, found in kernels.items()},
        "host_us": difference_with_interval(worked["ours"], worked["bare"]),
        "ours_tokens_per_s": tokens / float(np.median(taken["ours"])),
        "bare_tokens_per_s": tokens / float(np.median(taken["bare"])),
        "ours_step_ms": 1e3 * float(np.median(taken["ours"])),
        "bare_step_ms": 1e3 * float(np.median(taken["bare"])),
        "ratio": ratio,
        "ratio_low": low,
        "ratio_high": high,
        "cpu_ratio": cpu_ratio,
        "cpu_ratio_low": cpu_low,
        "cpu_ratio_high": cpu_high,
        "blocks": options.blocks,
        "steps_a_block": options.steps_a_block,
        "num_parameters": num_parameters(config.model),
        "flops_per_token": flops_per_token(config.model, options.seq_len),
        "block_s_per_step": taken,
        "block_cpu_s_per_step": worked,
    }


def block(step: Callable[[], None], plain: Any, device: torch.device, count: int) -> tuple[float, float]:
    """Wall seconds per step over `count` steps, including the device's work, and this process's CPU seconds."""
    dist.barrier(group=plain)
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / count, (time.process_time() - cpu_start) / count


def ratio_with_interval(ours: list[float], bare: list[float]) -> tuple[float, float, float]:
    """Throughput of trainer / bare from seconds per step: ratio of medians, and its 2.5th and 97.5th percentiles."""
    a, b = np.array(ours), np.array(bare)
    chosen = np.random.default_rng(0).integers(0, len(a), (RESAMPLES, len(a)))
    ratios = np.median(b[chosen], axis=1) / np.median(a[chosen], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(np.median(b) / np.median(a)), float(low), float(high)


def difference_with_interval(ours: list[float], bare: list[float]) -> tuple[float, float, float]:
    """Additional microseconds per step of the trainer: median over pairs of blocks, and its 2.5th and 97.5th
    percentiles.
    """
    more = 1e6 * np.subtract(ours, bare)
    chosen = np.random.default_rng(0).integers(0, len(more), (RESAMPLES, len(more)))
    low, high = np.percentile(np.median(more[chosen], axis=1), [2.5, 97.5])
    return float(np.median(more)), float(low), float(high)


def _rank_main(rank: int, options: argparse.Namespace, folder: str) -> None:
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    recorder = TapeRecorder(Path(folder) / f"rank-{rank}", rank=rank, attempt=0, world_size=options.ranks)
    install(recorder)
    stamp_waits(recorder.stamps)
    store = dist.FileStore(os.path.join(folder, "store"), options.ranks)
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=options.ranks, timeout=timedelta(seconds=300))
    found = []
    if options.kernels:
        torch._inductor.config.cpp.enable_kernel_profile = True
    for kind in options.kind:
        for compiled in (False, True) if options.kernels else (None,):
            options.compiled = compiled
            uninstall()
            plain = dist.new_group()
            install(recorder)
            found.append(compare(kind, plain, recorder, options, Path(folder) / f"{kind}-{compiled}"))
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(found))
    dist.barrier()
    uninstall()
    recorder.close()
    dist.destroy_process_group()


def add_mfu(row: dict[str, Any], device_name: str, precision: str, ranks: int, *loops: str) -> None:
    """Add the loops' model FLOPs utilisation if the device's peak is known."""
    peak = peak_flops_per_s(device_name, precision, torch.get_float32_matmul_precision())
    if peak is not None:
        for name in loops or ("ours", "bare"):
            row[f"{name}_mfu_ratio"] = row[f"{name}_tokens_per_s"] * row["flops_per_token"] / (peak * ranks)


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    table = Table(title=f"Training throughput, {result['ranks']} ranks on {result['device']}")
    has_mfu = "ours_mfu_ratio" in result["loops"][0]
    for column in ("", "bare", "ours", "ratio", "processor", *(("MFU",) if has_mfu else ())):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in result["loops"]:
        table.add_row(
            row["kind"],
            f"{row['bare_tokens_per_s']:.0f}/s",
            f"{row['ours_tokens_per_s']:.0f}/s",
            f"{row['ratio']:.3f} ({row['ratio_low']:.3f} - {row['ratio_high']:.3f})",
            f"{row['cpu_ratio']:.3f} ({row['cpu_ratio_low']:.3f} - {row['cpu_ratio_high']:.3f})",
            *((f"{row['ours_mfu_ratio']:.1%}",) if has_mfu else ()),
        )
    console = Console()
    console.print(table)
    row = result["loops"][0]
    console.print(
        f"{row['num_parameters'] / 1e6:.1f} M parameters; a bare step takes {row['bare_step_ms']:.0f} ms; "
        f"{row['blocks']} pairs of blocks of {row['steps_a_block']} steps; load {result['load_average_before']:.1f} "
        f"before, {result['load_average_after']:.1f} after, on {result['cpus']} cores"
    )


def show_kernels(result: dict[str, Any]) -> None:
    """Print kernels and host time per step."""
    print(
        markdown_head("step", "kernels, bare", "kernels, ours", "of them fused", "extra host time (95 %)", "CPU, bare")
    )
    for row in result["loops"]:
        bare, ours = row["kernels"]["bare"], row["kernels"]["ours"]
        fused = sum(calls for name, calls in ours.items() if is_fused(name))
        name = f"{row['kind']}, {'compiled' if row['compiled'] else 'eager'}"
        bare_us = 1e6 * float(np.median(row["block_cpu_s_per_step"]["bare"]))
        more, low, high = row["host_us"]
        host = f"{more:.0f} us ({low:.0f} to {high:.0f})"
        print(markdown_row(name, sum(bare.values()), sum(ours.values()), fused, host, f"{bare_us:.0f} us"))


def main() -> None:
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--quick", action="store_true", help="fewer blocks")
    parser.add_argument("--ranks", type=int, help="default: 2, or all GPUs")
    parser.add_argument("--kind", action="append", choices=["ddp", "fsdp"], help="default: both")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["float32", "bf16"], default="float32")
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--memory-interval", type=int, default=0, help="steps between copies for rollback; 0: none")
    parser.add_argument("--kernels", action="store_true", help="count kernels per step, eager and compiled; on a CPU")
    parser.add_argument("--blocks", type=int, help="pairs of blocks (default 40, quick 10)")
    parser.add_argument("--steps-a-block", type=int, default=5)
    options = parser.parse_args()
    if options.kernels and options.device != "cpu":
        parser.error("--kernels: needs --device cpu; on a GPU: python -m benchmarks.cost.mfu --kernels 20")
    options.compiled = None
    options.ranks = options.ranks or (torch.cuda.device_count() if options.device == "cuda" else 2)
    options.kind = options.kind or ["ddp", "fsdp"]
    options.blocks = options.blocks or (10 if options.quick else 40)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
        mp.spawn(_rank_main, (options, folder), nprocs=options.ranks)
        loops = json.loads(Path(folder, "result.json").read_text())
    for row in loops:
        add_mfu(row, name, options.precision, options.ranks)
    result = {
        "loops": loops,
        "ranks": options.ranks,
        "device": name,
        "cpus": os.cpu_count(),
        "load_average_before": before,
        "load_average_after": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if options.kernels:
        show_kernels(result)
    else:
        show(result)
    write_json(options.json, result)


if __name__ == "__main__":
    main()
