"""A training loop without Rankscope: torch's DDP or FSDP2, AdamW, clipping, a line every ten steps.

    torchrun --nproc-per-node 2 -m benchmarks.cost.bare_loop --kind fsdp --steps 50

`benchmarks.cost.throughput` compares the trainer's loop with it. Only the model's class is the trainer's, so that both
compute the same.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import argument_parser
from trainer.config.config import ModelConfig
from trainer.model.initial_weights import initialise
from trainer.model.transformer import Transformer

__all__ = ["BareLoop", "Job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Size of the model and of a batch. `batch_size`: sequences per rank and step."""

    model: ModelConfig
    seq_len: int
    batch_size: int
    kind: str  # ddp | fsdp
    bf16: bool = False
    compiled: bool = False
    """Compile each block with inductor."""
    lr: float = 3e-4
    warmup_steps: int = 20
    total_steps: int = 10_000
    log_interval: int = 10


class BareLoop:
    """Model, optimizer and data of one rank."""

    def __init__(self, job: Job, group: Any, device: torch.device) -> None:
        self.job, self.device, self.number = job, device, 0
        model = Transformer(job.model).to(device)
        initialise(model, job.model, seed=0)
        for block in model.blocks.values() if job.compiled else ():
            block.compile()
        self.model: nn.Module = model
        if job.kind == "ddp":
            ids = [device] if device.type == "cuda" else None
            self.model = DistributedDataParallel(
                model, device_ids=ids, process_group=group, gradient_as_bucket_view=True
            )
        else:
            mesh = DeviceMesh.from_group(group, device.type)
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if job.bf16 else None, reduce_dtype=torch.float32)
            for block in model.blocks.values():
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        named = list(model.named_parameters())
        decayed = [value for name, value in named if value.dim() >= 2 and not name.startswith("embed.")]
        others = [value for name, value in named if value.dim() < 2 or name.startswith("embed.")]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=job.lr, betas=(0.9, 0.95), fused=True)
        self.random = torch.Generator().manual_seed(dist.get_rank())
        self.tokens = torch.randint(job.model.vocab_size, (2_000_000,), generator=self.random)
        self.last_loss = math.nan

    def batch(self) -> tuple[Tensor, Tensor]:
        length = self.job.seq_len
        starts = torch.randint(len(self.tokens) - length - 1, (self.job.batch_size,), generator=self.random).tolist()
        rows = torch.stack([self.tokens[start : start + length + 1] for start in starts])
        if self.device.type == "cuda":
            rows = rows.pin_memory().to(self.device, non_blocking=True)
        return rows[:, :-1], rows[:, 1:]

    def step(self) -> None:
        job = self.job
        inputs, targets = self.batch()
        with self._autocast():
            logits = self.model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.number += 1
        if self.number % job.log_interval == 0:
            self.last_loss = loss.item()

    def _rate(self) -> float:
        job = self.job
        if self.number < job.warmup_steps:
            return job.lr * (self.number + 1) / job.warmup_steps
        progress = min(1.0, (self.number - job.warmup_steps) / (job.total_steps - job.warmup_steps))
        return job.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))

    def _autocast(self) -> AbstractContextManager[object]:
        if self.job.bf16 and self.job.kind == "ddp":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--kind", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = ModelConfig(dim=192, num_layers=4, num_heads=4)
    job = Job(model=model, seq_len=128, batch_size=4, kind=options.kind, total_steps=max(options.steps, 100))
    loop = BareLoop(job, dist.group.WORLD, device)
    start = time.perf_counter()
    for _ in range(options.steps):
        loop.step()
        if dist.get_rank() == 0 and loop.number % job.log_interval == 0:
            print(f"step {loop.number}  loss {loop.last_loss:.4f}  {time.perf_counter() - start:.1f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
