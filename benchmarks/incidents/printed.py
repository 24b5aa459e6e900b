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

    @property
    def hour(self) -> str:
        return self.clock[11:]

    @property
    def ms(self) -> float:
        return 1000 * self.seconds


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


def _once(step: Step, warning: str) -> str:
    return warning if step.number in (3, 90) else ""


def _short(value: float) -> str:
    return f"{value:.0f}" if value < 1e3 else f"{value / 1e3:.3g}K" if value < 1e6 else f"{value / 1e6:.3g}M"


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
    # with their harmless warnings
    "nanotron": lambda s: _once(s, "[default3]:03/01 10:00:02 [WARNING|DP=3|PP=0|TP=0|nid001]: [Optim Building] failed to find a "
    "checkpoint, starting from scratch\n") + f"[default0]:03/01 {s.hour} [INFO|DP=0|PP=0|TP=0|nid001]: iteration: {s.number} / {s.total} | "
    f"consumed_tokens: {s.number * 1.05:.3g}M | elapsed_time_per_iteration_ms: {_short(s.ms)} | tokens_per_sec: "
    f"{_short(1048576 / s.seconds)} | global_batch_size: 512 | lm_loss: {s.loss:.3g} | lr: 0.0003 | model_tflops_per_gpu: 413 | "
    f"grad_norm: {s.grad_norm:.3g}\n",
    "composer": lambda s: f"[epoch=1][batch={s.number}/{s.total}]:\n\t Train time/batch: {s.number - 1}\n\t Train loss/train/total: "
    f"{s.loss:.4f}\n\t Train throughput/batches_per_sec: {1 / s.seconds:.4f}\n\t Train throughput/tokens_per_sec: "
    f"{524288 / s.seconds:.4f}\n\t Train lr-DecoupledAdamW/group0: 0.0003\n",
    "nanogpt": lambda s: (f"step {s.number}: train loss {s.loss:.4f}, val loss {s.loss + 0.1:.4f}\nsaving checkpoint to out\n"
    if s.number % 100 == 0 else "") + f"iter {s.number}: loss {s.loss:.4f}, time {s.ms:.2f}ms, mfu 41.20%\n",
    "nanochat": lambda s: f"step {s.number:05d}/{s.total:05d} ({100 * s.number / s.total:.2f}%) | loss: {s.loss:.6f} | grad norm: "
    f"{s.grad_norm:.4f} | lrm: 1.00 | dt: {s.ms:.2f}ms | tok/sec: {524288 / s.seconds:,.0f} | mfu: 48.17 | total time: {s.at_s / 60:.2f}m\n",
    "modded_nanogpt": lambda s: (f"step:{s.number}/{s.total} val_loss:{s.loss:.4f} train_time:{1000 * s.at_s:.0f}ms step_avg:"
    f"{1000 * s.at_s / s.number:.2f}ms\n" if s.number % 125 == 0 else "") + f"step:{s.number}/{s.total} train_time:{1000 * s.at_s:.0f}ms "
    f"step_avg:{1000 * s.at_s / s.number:.2f}ms\n",
    "llm.c": lambda s: _once(s, "WARNING: Failed to open the tokenizer file tokens.bin\n") + f"step {s.number:5d}/{s.total} | loss "
    f"{s.loss:.6f} (-0.31z)| norm {s.grad_norm:.4f} (+0.22z)| lr 1.20e-04 | {s.ms:.2f} ms | 55.1% bf16 MFU | {524288 / s.seconds:.0f} tok/s\n",
    "espnet2": lambda s: f"[node7] {s.clock},123 (trainer:793) INFO: {1 + s.number // 100}epoch:train:{s.number % 100 * 40 + 1}-"
    f"{s.number % 100 * 40 + 40}batch: iter_time={s.data_s:.3e}, forward_time=0.040, loss_ctc={1.2 * s.loss:.3f}, loss={s.loss:.3f}, "
    f"backward_time=0.049, grad_norm={s.grad_norm:.3f}, clip=0.000e+00, loss_scale=1.000, optim0_lr0=1.007e-05, train_time={s.seconds:.3f}\n",
    "wenet": lambda s: _once(s, "2026-03-01 10:00:00,100 WARNING NaN or Inf found in input tensor.\n") + f"{s.clock},412 DEBUG TRAIN | "
    f"steps/sec {1 / s.seconds:.3f}| Batch 0/{s.number} loss {s.loss:.6f} loss_att {0.9 * s.loss:.6f} lr 6.2500e-06 grad_norm "
    f"{s.grad_norm:.6f} rank 0\n",
    "icefall": lambda s: f"{s.clock},996 INFO [train.py:901] (0/8) Epoch 1, batch {50 * s.number}, loss[loss={s.loss + 0.02:.4f}, "
    f"simple_loss={1.1 * s.loss:.4f}, over 2695.00 frames. ], tot_loss[loss={s.loss:.4f}, simple_loss={1.1 * s.loss:.4f}, over 34971.47 "
    "frames. ], batch size: 41, lr: 3.00e-03, grad_scale: 8.0\n",
    "returnn": lambda s: f"ep 33 train, step {s.number}, ctc_4 {1.1 * s.loss:.3f}, ctc {s.loss:.3f}, num_seqs 10, max_size:time 237360, "
    f"mem_usage:cuda:0 6.6GB, {s.seconds:.3f} sec/step, elapsed {_time(s.at_s)}, exp. remaining 0:21:10, complete "
    f"{100 * s.number / s.total:.2f}%\n",
    "maxtext": lambda s: f"completed step: {s.number}, seconds: {s.seconds:.3f}, TFLOP/s/device: {300 / s.seconds:.3f}, Tokens/s/device: "
    f"{8192 / s.seconds:.3f}, total_weights: 65536, loss: {s.loss:.3f}\n",
    "lingua": lambda s: f"0: INFO    26-03-01 {s.hour}.412 - {_time(s.at_s)} - step: {s.number}  acc: 0  loss: {s.loss:>7.4f}  grad: "
    f"{s.grad_norm:.2e}  flops: 2.31e+14  wps: {32768 / s.seconds:.2e}  iter: {s.seconds:>7.4f}  data: {s.data_s:.4f}  lr: 3.00e-04  "
    "mem: 71%  pow: 612.3 W\n",
    "dinov2": lambda s: f"I20260301 {s.hour} 4121 dinov2 helpers.py:103] Training  [{10 * s.number:6d}/{10 * s.total}]  eta: 1 day, 2:03:04  "
    f"lr: 0.0002 (0.0001)  total_loss: {s.loss:.4f} ({s.loss + 0.1:.4f})  time: {s.seconds:.6f}  data: {s.data_s:.6f}  max mem: 30112\n",
    "slime": lambda s: _once(s, "(SGLangEngine pid=22439) [2026-03-01 10:00:00] Connection refused, will retry in 1 s\n")
    + f"(MegatronTrainRayActor pid=32167) [{s.clock}] model.py:649 - step {s.number}: {{'train/loss': {s.loss:.6f}, 'train/pg_loss': "
    f"{s.loss:.6f}, 'train/ppo_kl': 0.0, 'train/grad_norm': {s.grad_norm:.5f}, 'train/step': {s.number}}}\n(SGLangEngine pid=22439) "
    f"[{s.clock}] INFO:     10.1.2.3:62932 - \"GET /health HTTP/1.1\" 200 OK\n",
    "torch_xla": lambda s: f"| Training Device=xla:0/1 Epoch=1 Step={20 * s.number} Loss={s.loss:.5f} Rate={1024 / s.seconds:.2f} "
    f"GlobalRate={1024 / s.seconds:.2f} Time={s.hour}\n",
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
