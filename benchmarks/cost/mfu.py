"""Model FLOPs utilisation of the trainer on one GPU, with and without probes, as one line of JSON.

    python -m benchmarks.cost.mfu                                     # GPT-2's size, 124 M parameters
    python -m benchmarks.cost.mfu --model llama-8b-slice              # four layers of Llama 3 8B, with its vocabulary
    python -m benchmarks.cost.mfu --probes-only                       # one model in memory, no comparison
    python -m benchmarks.cost.mfu --set train.compile=false           # with any setting changed
    python -m benchmarks.cost.mfu --kernels 20                        # and the kernels with the most device time
    python -m benchmarks.cost.mfu --model tiny --device cpu           # a test of the script

The loop is `trainer.rank.loop` as a worker runs it, with the trainer's defaults on a GPU. It runs twice in this
process, with all recording and with `probes.enabled = false`, in alternating blocks of steps, so that other load
affects both. Tokens are random.

| figure | meaning |
|---|---|
| mfu | tokens/s x FLOPs per token (`trainer.model.size`, attention counted as non-causal) / the device's dense peak |
| step_ms | median over blocks, including the device's work |
| ratio | step time with probes / without, from medians; `low`, `high`: 95 % interval from resampling pairs of blocks |
| first_step_s | time of building, compiling and one step of the first loop |
| peak_mib | `max_memory_allocated` of the process, which holds model and optimizer of both loops |
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cost.throughput import OurLoop, add_mfu, block, ratio_with_interval
from benchmarks.harness import argument_parser
from probes.device.stream_waits import stamp_waits
from probes.recorder import NullRecorder
from probes.tape_recorder import TapeRecorder
from trainer.config.config import Config
from trainer.config.load import changed_config
from trainer.config.model import ModelConfig
from trainer.model.size import flops_per_token, num_parameters
from trainer.training import rank_training

MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "gpt2": {
        "model": {"dim": 768, "num_layers": 12, "num_heads": 12, "vocab_size": 50_304, "tie_embeddings": True},
        "data": {"seq_len": 1024},
        "train": {"global_batch_size": 32, "precision": "bf16"},
    },
    "llama-8b-slice": {
        "model": {
            "dim": 4096, "num_layers": 4, "num_heads": 32, "num_kv_heads": 8, "hidden_dim": 14_336,
            "vocab_size": 128_256, "max_seq_len": 4096, "rope_theta": 500_000.0,
        },
        "data": {"seq_len": 4096},
        "train": {"global_batch_size": 4, "precision": "bf16"},
    },
    "tiny": {
        "model": {"dim": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 512},
        "data": {"seq_len": 64},
        "train": {"global_batch_size": 4, "precision": "float32"},
    },
}  # fmt: skip

_ATTENTION = {
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
}


@torch.no_grad()
def draw_weights(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Replacement for `trainer.model.initial_weights.initialise`, which draws on the host and takes half a minute for a
    slice.
    """
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.02)
        else:
            parameter.fill_(1.0)


class RandomTokens:
    """A corpus of tokens drawn once."""

    digest = "random"

    def __init__(self, vocab_size: int, num_tokens: int = 2_000_000) -> None:
        self.num_tokens = num_tokens
        self._tokens = np.random.default_rng(0).integers(vocab_size, size=num_tokens, dtype=np.int32)

    def read(self, start: int, count: int) -> np.ndarray[Any, Any]:
        return self._tokens[start : start + count]

    def locate(self, position: int) -> tuple[str, int]:
        return "", position


def configuration(options: argparse.Namespace, *, probes: bool) -> Config:
    values = {
        **MODELS[options.model],
        "checkpoint": {"interval": 0, "memory_interval": 0},
        "probes": {"enabled": probes},
    }
    values["train"] = {**values["train"], "steps": 100_000, "device": options.device}
    if options.batch:
        values["train"]["global_batch_size"] = options.batch
    if options.seq_len:
        values["data"] = {"seq_len": options.seq_len}
        values["model"] = {**values["model"], "max_seq_len": options.seq_len}
    values["data"] = {**values["data"], "validation_ratio": 0.0}
    return changed_config(values, options.overrides)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    recorder = TapeRecorder(folder / "rank-0", rank=0, attempt=0, device=str(device))
    stamp_waits(recorder.stamps)
    config = configuration(options, probes=True)
    corpus = RandomTokens(config.model.vocab_size)
    start = time.perf_counter()
    loops: dict[str, OurLoop] = {"with": OurLoop(config, recorder, folder / "with", device, corpus)}
    loops["with"].step()
    _synchronize(device)
    first_step_s = time.perf_counter() - start
    if not options.probes_only:
        bare = configuration(options, probes=False)
        loops["without"] = OurLoop(bare, NullRecorder(), folder / "without", device, corpus)
    taken: dict[str, list[float]] = {name: [] for name in loops}
    for loop in loops.values():
        block(loop.step, None, device, options.warm_up)
    for number in range(options.blocks):
        for name in sorted(loops, reverse=number % 2 == 0):
            taken[name].append(block(loops[name].step, None, device, options.steps_a_block)[0])
    tokens = config.train.global_batch_size * config.data.seq_len
    found: dict[str, Any] = {
        "model": options.model,
        "parameters": num_parameters(config.model),
        "flops_per_token": flops_per_token(config.model, config.data.seq_len),
        "tokens_a_step": tokens,
        "first_step_s": first_step_s,
        "is_compiled": loops["with"].training.modules[0].compiled,
        "loss_in_chunks": loops["with"].training.loss_in_chunks,
    }
    if not options.probes_only:
        speed_ratio, low, high = ratio_with_interval(taken["with"], taken["without"])
        found |= {"ratio": 1 / speed_ratio, "ratio_low": 1 / high, "ratio_high": 1 / low}
    for name, times in taken.items():
        found |= {f"{name}_step_ms": 1e3 * float(np.median(times))}
        found |= {f"{name}_tokens_per_s": tokens / float(np.median(times))}
    if device.type == "cuda":
        found["peak_mib"] = torch.cuda.max_memory_allocated() // 2**20
        add_mfu(found, torch.cuda.get_device_name(), config.train.precision, 1, *loops)
    if options.kernels:
        found["kernels"] = _kernels(loops["with"], device, options.kernels)
    recorder.close()
    return found


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _kernels(loop: OurLoop, device: torch.device, count: int, steps: int = 3) -> list[dict[str, Any]]:
    """Kernels of a step by device time, longest first."""
    activity = torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        for _ in range(steps):
            loop.step()
        _synchronize(device)
    rows = [
        {
            "name": event.key[:100],
            "ms": (event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total) / 1e3 / steps,
            "calls": event.count / steps,
        }
        for event in profile.key_averages()
    ]
    total = {"name": "all", "ms": sum(row["ms"] for row in rows), "calls": sum(row["calls"] for row in rows)}
    return [total, *sorted(rows, key=lambda row: -row["ms"])[:count]]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, help="sequences per step")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--attention", choices=_ATTENTION, help="attention kernel; default: torch's choice")
    parser.add_argument("--probes-only", action="store_true", help="skip the loop without probes; no ratio")
    parser.add_argument("--blocks", type=int, default=12, help="pairs of blocks")
    parser.add_argument("--steps-a-block", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=6, help="warm-up steps of each loop")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="list the N longest kernels")
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(0)
    rank_training.initialise = draw_weights  # type: ignore[assignment]  # accepts any module
    chosen: AbstractContextManager[Any] = contextlib.nullcontext()
    if options.attention:
        chosen = sdpa_kernel(_ATTENTION[options.attention], set_priority=True)
    with tempfile.TemporaryDirectory(prefix="mfu-") as folder, chosen:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo", store=store, rank=0, world_size=1)
        found = measure(options, Path(folder))
        dist.destroy_process_group()
    found["device"] = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    found["torch"] = torch.__version__
    print(json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}))


if __name__ == "__main__":
    main()
