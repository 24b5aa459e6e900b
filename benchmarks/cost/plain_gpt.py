"""Loss and speed of the trainer compared with a plain single-file GPT loop: same model, weights, batches and learning
rates.

    python -m benchmarks.cost.plain_gpt --quick                  # tokens/s: four minutes on a quiet machine
    python -m benchmarks.cost.plain_gpt --dim 128 --batch 8      # losses over 1,000 steps of three seeds: 15 minutes
    python -m benchmarks.cost.plain_gpt --json plain_gpt.json    # both at the larger size; an hour on two cores

`PlainGPT` and `PlainLoop` are written without Rankscope. They get initial weights and batches from the trainer, so that
only the arithmetic can differ. The trainer's side is `trainer.rank.loop` with all probes, the guard and memory copies,
as a worker runs it.

| figure | meaning |
|---|---|
| difference | mean loss over the last tenth of the steps, trainer - plain, same seed; mean over seeds |
| noise of seeds | standard deviation of that mean loss over seeds, plain loop |
| first difference | first step at which the losses differ by more than 1e-3 (rounding differences grow) |
| ratio | tokens/s of trainer / plain, from alternating blocks of steps in one process, with a 95 % interval |
| processor | the same ratio for CPU time, which other load hardly affects |

Losses do not depend on other load on the machine, but the ratio does. Figures are printed after each seed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from benchmarks.cost.throughput import OurLoop, block, ratio_with_interval
from benchmarks.harness import argument_parser, write_json
from probes.collectives.wrapped import install, uninstall
from probes.tape_recorder import TapeRecorder
from trainer.config.config import Config

__all__ = ["PlainGPT", "PlainLoop", "configuration"]

MIN_DIFFERENCE = 1e-3
PROGRESS_BLOCKS = 10


class PlainBlock(nn.Module):
    def __init__(self, dim: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, dim = x.shape
        y = self.norm1(x)
        q, k, v = (w(y).view(batch, length, self.num_heads, -1).transpose(1, 2) for w in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, dim))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class PlainGPT(nn.Module):
    """Tokens (batch, length) -> logits (batch, length, vocab)."""

    def __init__(self, vocab: int, dim: int, layers: int, num_heads: int, hidden: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(PlainBlock(dim, num_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, vocab, bias=False)
        width = dim // num_heads
        rates = 10_000.0 ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(length), rates)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for one in self.blocks:
            x = one(x, self.cos, self.sin)
        out: Tensor = self.head(self.norm(x))
        return out


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


_NAMES = {
    "attention_norm": "norm1", "mlp_norm": "norm2", "attention.query": "q", "attention.key": "k",
    "attention.value": "v", "attention.out": "o", "mlp.gate": "gate", "mlp.up": "up", "mlp.down": "down",
}  # fmt: skip
"""Names of a block's modules: in the trainer -> in the plain model."""


class PlainLoop:
    """Model, optimizer and schedule; `step(tokens, targets)` returns the loss."""

    def __init__(self, config: Config) -> None:
        model, self.config, self.number = config.model, config, 0
        self.model = PlainGPT(
            model.vocab_size, model.dim, model.num_layers, model.num_heads, model.ffn_dim, config.data.seq_len
        )
        named = list(self.model.named_parameters())
        decayed = [value for name, value in named if value.dim() >= 2 and name != "embed.weight"]
        others = [value for name, value in named if value.dim() < 2 or name == "embed.weight"]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=config.optim.lr, betas=(0.9, 0.95), fused=True)

    def take_weights(self, named: dict[str, Tensor]) -> None:
        """Copy the trainer's initial values."""
        mine = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in named.items():
                for in_trainer, in_plain in _NAMES.items():
                    name = name.replace(f".{in_trainer}.", f".{in_plain}.")
                mine.pop(name).copy_(value)
        assert not mine, f"without a value: {sorted(mine)}"

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.number += 1
        return loss.item()

    def rate(self) -> float:
        """Warm-up, then a cosine down to a tenth at the last step."""
        lr, warmup, steps = self.config.optim.lr, self.config.optim.warmup_steps, self.config.train.steps
        if self.number < warmup:
            return lr * (self.number + 1) / warmup
        progress = min(1.0, (self.number - warmup) / max(1, steps - 1 - warmup))
        return lr * (0.1 + 0.45 * (1 + float(np.cos(np.pi * progress))))


def configuration(options: argparse.Namespace, seed: int) -> Config:
    """One process, float32, the trainer's default text."""
    model = {
        "dim": options.dim,
        "num_layers": options.layers,
        "num_heads": options.heads,
        "max_seq_len": options.length,
    }
    return Config.model_validate(
        {
            "run": {"seed": seed},
            "model": model,
            "data": {"seq_len": options.length, "validation_ratio": 0.0},
            "parallel": {"dp_replicate": 1, "dp_shard": 1},
            "train": {"steps": options.steps, "global_batch_size": options.batch, "device": "cpu"},
            "optim": {"lr": options.lr},
            "checkpoint": {"interval": 0, "memory_survives": False},
        }
    )


class _Losses(TapeRecorder):
    """Keeps the loss of each step in addition to recording it."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.losses: dict[int, float] = {}

    def log(self, **values: float) -> None:
        super().log(**values)
        if "loss" in values:
            self.losses[self.step_number] = values["loss"]


def compare(options: argparse.Namespace, seed: int, folder: Path) -> dict[str, Any]:
    """Run both loops over all steps of a seed in alternating blocks; return losses by step, and seconds per step by
    block.
    """
    config = configuration(options, seed)
    recorder = _Losses(folder / "tapes", rank=0, attempt=0, world_size=1)
    install(recorder)
    ours = OurLoop(config, recorder, folder, torch.device("cpu"))
    plain = PlainLoop(config)
    plain.take_weights(dict(ours.training.named_parameters()))
    stream = ours.training.stream
    losses: list[float] = []

    def plain_step() -> None:
        batch = stream.batch(len(losses))
        losses.append(plain.step(batch.inputs, batch.targets))

    taken: dict[str, list[float]] = {"ours": [], "plain": []}
    worked: dict[str, list[float]] = {"ours": [], "plain": []}
    for number in range(options.steps // options.steps_a_block):
        turns = {"ours": ours.step, "plain": plain_step}
        for name in sorted(turns, reverse=number % 2 == 0):
            seconds, cpu_seconds = block(turns[name], None, torch.device("cpu"), options.steps_a_block)
            taken[name].append(seconds)
            worked[name].append(cpu_seconds)
        if (number + 1) % PROGRESS_BLOCKS == 0:
            step = len(losses)
            print(f"seed {seed}: step {step}, ours {recorder.losses[step]:.4f}, plain {losses[-1]:.4f}", flush=True)
    uninstall()
    recorder.close()
    return {"seed": seed, "ours": [recorder.losses[step + 1] for step in range(len(losses))], "plain": losses,
            "ours_s": taken["ours"], "plain_s": taken["plain"],
            "ours_cpu_s": worked["ours"], "plain_cpu_s": worked["plain"]}  # fmt: skip


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Compute the figures of the table above."""
    last = max(1, len(runs[0]["plain"]) // 10)
    ours = np.array([np.mean(run["ours"][-last:]) for run in runs])
    plain = np.array([np.mean(run["plain"][-last:]) for run in runs])
    apart = [np.abs(np.array(run["ours"]) - np.array(run["plain"])) > MIN_DIFFERENCE for run in runs]
    first = [int(np.argmax(one)) + 1 if one.any() else None for one in apart]

    def ratio(unit: str) -> list[float]:  # without the first pair of blocks, which is the warm-up
        seconds = ([value for run in runs for value in run[f"{name}_{unit}"][1:]] for name in ("ours", "plain"))
        return list(ratio_with_interval(*seconds))

    return {
        "steps": len(runs[0]["plain"]),
        "seeds": [run["seed"] for run in runs],
        "ours_loss": ours.tolist(),
        "plain_loss": plain.tolist(),
        "difference": float(np.mean(ours - plain)),
        "largest_difference": float(np.max(np.abs(ours - plain))),
        "seed_noise": float(np.std(plain, ddof=1)) if len(runs) > 1 else None,
        "first_difference_step": first,
        "ratio_low_high": ratio("s"),
        "cpu_ratio_low_high": ratio("cpu_s"),
    }


def show(result: dict[str, Any]) -> None:
    """Print the figures."""
    console = Console()
    noise = result["seed_noise"]
    console.print(f"{result['steps']} steps, seeds {result['seeds']}, load {result['load_average']:.1f} at the end")
    for seed, ours, plain, first in zip(
        result["seeds"], result["ours_loss"], result["plain_loss"], result["first_difference_step"], strict=True
    ):
        apart = (
            f"from step {first} on more than {MIN_DIFFERENCE} apart"
            if first
            else f"never more than {MIN_DIFFERENCE} apart"
        )
        console.print(f"  seed {seed}: ours {ours:.4f}  plain {plain:.4f}  {apart}")
    console.print(
        f"difference {result['difference']:+.5f} (largest {result['largest_difference']:.5f}), noise of seeds "
        f"{'not known' if noise is None else f'{noise:.5f}'}"
    )
    for name, key in (("tokens/s", "ratio_low_high"), ("processor", "cpu_ratio_low_high")):
        ratio, low, high = result[key]
        console.print(f"{name} ours / plain {ratio:.3f} ({low:.3f} - {high:.3f})")


def main() -> None:
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--quick", action="store_true", help="100 steps of two seeds")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps-a-block", type=int, default=10)
    options = parser.parse_args()
    if options.quick:
        options.steps, options.seeds, options.steps_a_block = 100, 2, 5
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="plain-gpt-") as path:
        folder = Path(path)
        store = dist.FileStore(str(folder / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=300))
        runs = []
        for seed in range(options.seeds):
            runs.append(compare(options, seed, folder / str(seed)))
            result = summary(runs) | {"load_average": os.getloadavg()[0], "torch": torch.__version__}
            show(result)
            write_json(options.json, result | {"runs": runs})
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
