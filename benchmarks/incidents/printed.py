"""Logs in the formats of public programs: lines of steps that are healthy, slow or have a loss that is not finite.

    text = printed("torchtitan", steps=200, slow_from=100)

Formats follow the programs' logging code; numbers are drawn with a seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["PROGRAMS", "Step", "printed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step's values."""

    number: int
    total: int
    loss: float
    grad_norm: float
    seconds: float
    data_s: float
    at_s: float
    skipped: int = 0

    @property
    def clock(self) -> str:
        whole = 36_000 + int(self.at_s)
        return f"2026-03-01 {whole // 3600 % 24:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _bar(step: Step, name: str = "", more: str = "") -> str:
    share = step.number / step.total
    rate = f"{step.seconds:.2f}s/it" if step.seconds >= 1 else f"{1 / step.seconds:.2f}it/s"
    done = "#" * int(10 * share)
    return (f"{name}{100 * share:3.0f}%|{done:<10}| {step.number}/{step.total} [{_time(step.at_s)}<"
            f"{_time((step.total - step.number) * step.seconds)}, {rate}{more}]")  # fmt: skip


def _time(seconds: float) -> str:
    whole = int(seconds)
    return (
        f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
        if whole >= 3600
        else f"{whole // 60:02d}:{whole % 60:02d}"
    )


def _hf(s: Step) -> str:
    line = "\r" + _bar(s)
    if s.number % 10 == 0:
        line += f"\n{{'loss': {s.loss:.4f}, 'grad_norm': {s.grad_norm:.4f}, 'learning_rate': 2e-05, 'epoch': {s.number / s.total:.2f}}}\n"
    return line


PROGRAMS: dict[str, Callable[[Step], str]] = {
    "hf": _hf,
    "hf_lines": lambda s: f"{{'loss': {s.loss:.4f}, 'grad_norm': {s.grad_norm:.4f}, 'learning_rate': 2e-05, "
    f"'epoch': {s.number / s.total:.3f}}}\n",
    "lightning": lambda s: "\r" + _bar(s, "Epoch 0: ", f", v_num=3, train_loss={s.loss:.3f}"),
    "torchtitan": lambda s: f"[rank0]:[titan] {s.clock},120 - root - INFO - step: {s.number:2d}  loss: {s.loss:7.4f}  "
    f"grad_norm: {s.grad_norm:.4f}  memory: 49.66GiB(52.28%)  tps: {6000 / s.seconds:,.0f}  tflops: {340 / s.seconds:.2f}  "
    f"mfu: {34 / s.seconds:.2f}%\n",
    "mmengine": lambda s: f"{s.clock.replace('-', '/')} - mmengine - INFO - Epoch(train)   [1][{s.number:5d}/{s.total}]  "
    f"lr: 1.0000e-04  eta: 3:20:11  time: {s.seconds:.4f}  data_time: {s.data_s:.4f}  memory: 9628  "
    f"grad_norm: {s.grad_norm:.4f}  loss: {s.loss:.4f}  loss_cls: {s.loss / 2:.4f}\n",
    "detectron2": lambda s: f"[03/01 {s.clock[11:]} d2.utils.events]:  eta: 0:40:11  iter: {s.number}  total_loss: {s.loss:.4f}  "
    f"loss_cls: {s.loss / 2:.4f}  time: {s.seconds:.4f}  last_time: {s.seconds:.4f}  data_time: {s.data_s:.4f}  "
    f"last_data_time: {s.data_s:.4f}   lr: 0.0002  max_mem: 7012M\n",
    "open_clip": lambda s: f"{s.clock[:10]},{s.clock[11:]} | INFO | Train Epoch: 0 [{s.number * 256:7d}/{s.total * 256} "
    f"({100 * s.number / s.total:.0f}%)] Data (t): {s.data_s:.3f} Batch (t): {s.seconds:.3f}, {256 / s.seconds:.1f}/s, "
    f"{32 / s.seconds:.1f}/s/gpu LR: 0.000500 Logit Scale: 14.286 Contrastive_loss: {s.loss:.4f} ({s.loss:.4f}) "
    f"Loss: {s.loss:.4f} ({s.loss:.4f})\n",
    "timm": lambda s: f"Train: 0 [{s.number:4d}/{s.total} ({100 * s.number / s.total:3.0f}%)]  Loss: {s.loss:.3f} ({s.loss:.2f})  "
    f"Time: {s.seconds:.3f}s, {512 / s.seconds:7.2f}/s  ({s.seconds:.3f}s, {512 / s.seconds:7.2f}/s)  LR: 1.000e-03  "
    f"Data: {s.data_s:.3f} ({s.data_s:.3f})\n",
    "fairseq": lambda s: f"{s.clock} | INFO | train_inner | epoch 001: {s.number:6d} / {s.total} loss={s.loss:.3f}, "
    f"nll_loss={s.loss - 0.2:.3f}, ppl=120.1, wps={9000 / s.seconds:.1f}, ups={1 / s.seconds:.2f}, wpb=9000, bsz=64, "
    f"num_updates={s.number}, lr=0.0005, gnorm={s.grad_norm:.3f}, loss_scale=16, train_wall=41, wall={s.at_s:.0f}\n",
    "nemo": lambda s: f"Training epoch 0, iteration {s.number}/{s.total} | lr: 1.0e-04 | global_batch_size: 512 | "
    f"global_step: {s.number} | reduced_train_loss: {s.loss:.4f} | train_step_timing in s: {s.seconds:.3f} | "
    f"consumed_samples: {s.number * 512}\n",
    "deepspeed": lambda s: f"[{s.clock},233] [INFO] [logging.py:96:log_dist] [Rank 0] step={s.number}, skipped={s.skipped}, lr=[0.0001], "
    f"mom=[(0.9, 0.95)]\n[{s.clock},234] [INFO] [timer.py:258:stop] epoch=0/micro_step={s.number * 4}/global_step={s.number}, "
    f"RunningAvgSamplesPerSec={32 / s.seconds:.2f}, CurrSamplesPerSec={32 / s.seconds:.2f}, MemAllocated=18.2GB\n"
    f"steps: {s.number} loss: {s.loss:.4f} iter time (s): {s.seconds:.3f} samples/sec: {32 / s.seconds:.3f}\n",
    "torchtune": lambda s: "\r" + _bar(s, f"1|{s.number}|Loss: {s.loss:.4f}: "),
    "verl": lambda s: f"step:{s.number} - actor/pg_loss:{s.loss:.4f} - actor/grad_norm:{s.grad_norm:.4f} - actor/lr:1e-06 - "
    f"timing_s/gen:{s.seconds / 2:.3f} - timing_s/step:{s.seconds:.3f} - perf/throughput:{5000 / s.seconds:.1f}\n",
    "imagenet": lambda s: f"Epoch: [0][{s.number:5d}/{s.total}]\tTime {s.seconds:6.3f} ({s.seconds:6.3f})\tData {s.data_s:6.3f} "
    f"({s.data_s:6.3f})\tLoss {s.loss:.4e} ({s.loss:.4e})\tAcc@1  12.50 ( 11.90)\tAcc@5  30.10 ( 29.80)\n",
    "litgpt": lambda s: f"Epoch 1 | iter {s.number} step {s.number} | loss train: {s.loss:.3f}, val: n/a | iter time: "
    f"{1000 * s.seconds:.2f} ms (step)\n",
    "megatron": lambda s: f" [{s.clock}] iteration {s.number:8d}/{s.total:8d} | consumed samples: {s.number * 256:12d} | elapsed time "
    f"per iteration (ms): {1000 * s.seconds:.1f} | throughput per GPU (TFLOP/s/GPU): {300 / s.seconds:.1f} | learning rate: "
    f"3.000000E-04 | global batch size:   256 | lm loss: {s.loss:.6E} | loss scale: 1.0 | grad norm: {s.grad_norm:.3f} | number of "
    f"skipped iterations: {s.skipped:3d} | number of nan iterations:   0 |\n",
}  # fmt: skip


def printed(
    program: str, *, steps: int = 200, total: int | None = None, seconds: float = 1.2, data_share: float = 0.02,
    slow_from: int = 0, slow_factor: float = 2.0, every: int = 0, nan_from: int = 0, gradient_from: int = 0,
    diverge_from: int = 0, skip_from: int = 0, seed: int = 1,
) -> str:  # fmt: skip
    """Return the lines of a job's steps."""
    rng = random.Random(f"{program} {seed}")
    at_s, lines = 0.0, []
    for number in range(1, steps + 1):
        slow = (slow_from and number >= slow_from) or (every and number % every == 0)
        took_s = seconds * (slow_factor if slow else 1.0) * rng.uniform(0.98, 1.02)
        at_s += took_s
        loss = 2 + 5 * math.exp(-number / 80) + rng.gauss(0, 0.03)
        grad_norm = rng.uniform(0.9, 1.3)
        if diverge_from and number >= diverge_from:
            loss += 0.12 * (number - diverge_from)
            grad_norm *= 1.05 ** (number - diverge_from)
        if gradient_from and number >= gradient_from:
            grad_norm = math.nan
        if nan_from and number >= nan_from:
            loss = math.nan
        lines.append(PROGRAMS[program](Step(
            number=number, total=total or 5 * steps, loss=loss, grad_norm=grad_norm, seconds=took_s,
            data_s=data_share * took_s, at_s=at_s, skipped=int(bool(skip_from and number >= skip_from)),
        )))  # fmt: skip
    return "".join(lines)
