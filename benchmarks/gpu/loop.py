"""A training loop without Rankscope code and with a fault in one rank: the program that `benchmarks.gpu` runs.

LOOP_STYLE=fsdp2 LOOP_FAULT=slow_device LOOP_RANK=1 LOOP_AT=40 rankscope run --nproc-per-node 2 loop.py

It trains a GPT of six blocks on random tokens. With LOOP_MARKS it records CUDA events at its phase boundaries
(`marks_rank*.json`) and a Kineto trace of steps 50 to 55 (`trace_rank*.json.gz`) as ground truth for its times.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

STYLE = os.environ.get("LOOP_STYLE", "ddp")
FAULT = os.environ.get("LOOP_FAULT", "none")
FAULTY_RANKS = {int(text) for text in os.environ.get("LOOP_RANK", "1").split(",")}
AT = int(os.environ.get("LOOP_AT", "25"))
STEPS = int(os.environ.get("LOOP_STEPS", "90"))
SLOW_MS = float(os.environ.get("LOOP_SLOW_MS", "30"))
MARKS = Path(os.environ["LOOP_MARKS"]) if "LOOP_MARKS" in os.environ else None
DIM, BLOCKS, BATCH, LENGTH = (int(n) for n in os.environ.get("LOOP_SIZES", "512,6,8,256").split(","))
VOCAB = 8192
TRACED = (50, 55)
CYCLES_A_MS = 0.0
"""Cycles of `torch.cuda._sleep` per millisecond, measured when a rank starts."""

RANK, LOCAL_RANK = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
ON_GPU = os.environ.get("LOOP_DEVICE", "cuda") == "cuda"
DEVICE = torch.device("cuda", LOCAL_RANK % torch.cuda.device_count()) if ON_GPU else torch.device("cpu")


class Block(nn.Module):
    """Pre-norm attention and MLP: [batch, tokens, dim] -> [batch, tokens, dim]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        batch, tokens, _ = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, tokens, 3, -1, 64).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Token numbers [batch, tokens] -> logits [batch, tokens, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.faults = Faults()
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.embedding(tokens) + self.position.weight
        for number, block in enumerate(self.blocks):
            x = block(self.faults(x) if number == BLOCKS // 2 else x)
        return self.head(self.norm(x))


def is_faulty(step: int) -> bool:
    """True on the faulty rank from step `AT` on; faults of a single step also check `step == AT`."""
    return RANK in FAULTY_RANKS and step >= AT


def cycles_a_ms() -> float:
    """Measure the number of `torch.cuda._sleep` cycles per millisecond."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(1_000_000)
    begin.record()
    torch.cuda._sleep(20_000_000)
    end.record()
    end.synchronize()
    return 20_000_000 / begin.elapsed_time(end)


def spend_on_device(ms: float) -> None:
    """Launch a kernel of this duration on the compute stream."""
    if ON_GPU:
        torch.cuda._sleep(int(ms * CYCLES_A_MS))
    else:
        time.sleep(ms / 1e3)


def fault_in_forward(step: int, tokens: Tensor) -> Tensor:
    """Inject the faults that occur before the model's forward pass."""
    if is_faulty(step) and FAULT == "slow_host":
        time.sleep(SLOW_MS / 1e3)
    if not (is_faulty(step) and step == AT):
        return tokens
    if FAULT == "hang":
        time.sleep(3600)
    elif FAULT == "stuck":
        spend_on_device(3_600_000)
    elif FAULT == "illegal":
        tokens = tokens.clone()
        tokens[0, 0] = VOCAB + 5
    elif FAULT == "oom":
        kept = []
        while True:
            kept.append(torch.empty(1 << 30, device=DEVICE))
    elif FAULT == "kill":
        os.kill(os.getpid(), 9)
    elif FAULT == "exception":
        raise ValueError("a batch without tokens")
    elif FAULT == "exit":
        sys.exit(3)
    return tokens


def fault_in_loss(step: int, loss: Tensor) -> Tensor:
    """Make the loss NaN on the faulty rank."""
    return loss * float("nan") if FAULT == "nan_loss" and is_faulty(step) and step == AT else loss


class Faults(nn.Module):
    """Identity on an activation; injects the faults that occur inside the model's forward and backward pass."""

    step = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return the same activation."""
        if FAULT == "slow_device" and is_faulty(self.step):
            spend_on_device(SLOW_MS)
        if FAULT == "nan_gradient" and is_faulty(self.step) and self.step == AT:
            x.register_hook(lambda gradient: gradient * float("nan"))
        return x


class Marks:
    """CUDA events at phase boundaries: [step, boundary, host ns, ms on the device since the first]."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str, int, torch.cuda.Event]] = []

    def __call__(self, step: int, boundary: str) -> None:
        if MARKS and ON_GPU:
            event = torch.cuda.Event(enable_timing=True)
            self.rows.append((step, boundary, time.time_ns(), event))
            event.record()

    def save(self, folder: Path) -> None:
        """Write the events once the device has finished."""
        torch.cuda.synchronize()
        first = self.rows[0][3]
        rows = [[step, boundary, host, first.elapsed_time(event)] for step, boundary, host, event in self.rows]
        (folder / f"marks_rank{RANK}.json").write_text(json.dumps(rows))


class Kineto:
    """The profiler around the steps `TRACED`; writes only the events that a reader of kernels needs."""

    def __init__(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        first, last = TRACED
        self._steps = range(first, last + 1)
        self._profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def before(self, step: int) -> None:
        """Start at the first traced step, stop after the last."""
        if step == self._steps[0]:
            self._profiler.start()
        elif step == self._steps[-1] + 1:
            torch.cuda.synchronize()
            self._profiler.stop()

    def save(self, folder: Path) -> None:
        """Write kernels, copies and runtime calls."""
        path = folder / f"whole_{RANK}.json"
        self._profiler.export_chrome_trace(str(path))
        whole = json.loads(path.read_text())
        path.unlink()
        kinds = {"kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver"}
        whole["traceEvents"] = [event for event in whole["traceEvents"] if event.get("cat") in kinds]
        with gzip.open(folder / f"trace_rank{RANK}.json.gz", "wt") as file:
            json.dump(whole, file)


def data_parallel() -> tuple[nn.Module, Callable[[int, Tensor], Tensor], Callable[[int], None]]:
    """Return the model, its loss as a function of step and batch, and the function to call after the backward pass."""
    torch.manual_seed(0)
    model: nn.Module = Gpt().to(DEVICE)
    faults = model.faults
    after: Callable[[int], None] = lambda step: None  # noqa: E731
    if STYLE == "ddp":
        model = nn.parallel.DistributedDataParallel(model, device_ids=[DEVICE.index] if ON_GPU else None)
    elif STYLE == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    elif STYLE == "manual":
        weights = [weight for weight in model.parameters() if weight.requires_grad]

        def after(step: int) -> None:
            if FAULT == "skip" and is_faulty(step) and step == AT:
                return
            for weight in weights:
                dist.all_reduce(weight.grad)
                weight.grad /= dist.get_world_size()

    def loss_of(step: int, tokens: Tensor) -> Tensor:
        faults.step = step
        logits = model(fault_in_forward(step, tokens))
        return functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())

    return model, loss_of, after


def train() -> None:
    """The loop."""
    model, loss_of, after = data_parallel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=ON_GPU)
    batches = torch.Generator().manual_seed(RANK)
    marks, kineto = Marks(), Kineto() if MARKS and ON_GPU else None
    begin_s = time.perf_counter()
    for step in range(STEPS):
        if step == STEPS // 2:
            if ON_GPU:
                torch.cuda.synchronize()
            begin_s = time.perf_counter()
        if kineto:
            kineto.before(step)
        marks(step, "begin")
        if is_faulty(step) and FAULT == "slow_data":
            time.sleep(SLOW_MS / 1e3)
        tokens = torch.randint(VOCAB, (BATCH, LENGTH), generator=batches).to(DEVICE, non_blocking=True)
        marks(step, "forward")
        loss = fault_in_loss(step, loss_of(step, tokens))
        marks(step, "between")
        if is_faulty(step) and FAULT == "slow_between":
            time.sleep(SLOW_MS / 1e3)
        marks(step, "backward")
        loss.backward()
        after(step)
        marks(step, "clip")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        marks(step, "optimizer")
        optimizer.step()
        optimizer.zero_grad()
        marks(step, "after")
        if step % 10 == 9 and RANK == 0:
            print(f"step {step + 1} loss {loss.item():.3f}", flush=True)
    if ON_GPU:
        torch.cuda.synchronize()
    if RANK == 0:
        half_s = time.perf_counter() - begin_s
        print(f"mean step of the second half {half_s / (STEPS - STEPS // 2) * 1e3:.3f} ms", flush=True)
    if kineto and MARKS:
        marks.save(MARKS)
        kineto.save(MARKS)


def main() -> None:
    """Train under a process group."""
    global CYCLES_A_MS
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
        os.environ.setdefault("NCCL_HOSTID", f"rank{RANK}")  # several ranks on a GPU, as several hosts to NCCL
        CYCLES_A_MS = cycles_a_ms()
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if ON_GPU else "gloo", device_id=DEVICE if ON_GPU else None)
    train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
