"""Cost of fingerprints: one reading of a rank's parameters and optimizer state against a training step.

    python -m benchmarks.fingerprints                       # the demo's model, 4 sequences a step
    python -m benchmarks.fingerprints --model 124m --steps 3

A state that is due is read twice at most (after the optimizer's step and before the next), so the share of a step at
an interval of n is 2 x reading / (n x step). The fastest of the repetitions counts: what else runs on the machine
makes both slower, and never faster.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from probes.fingerprints import FingerprintReader
from trainer.checkpoint.state import local_tensors, training_tensors
from trainer.config.config import Config
from trainer.config.load import load_config
from trainer.layout.plan import resolve
from trainer.training.build import build, pick_device
from trainer.training.rank_training import Training

DEMO = Path(__file__).parent.parent / "examples" / "gpt-demo.toml"
MODELS: dict[str, list[str]] = {
    "demo": ["train.global_batch_size=4"],
    "124m": [
        "model.dim=768",
        "model.num_layers=12",
        "model.num_heads=12",
        "model.num_kv_heads=12",
        "model.vocab_size=50304",
        "model.tie_embeddings=true",
        "data.seq_len=256",
        "train.global_batch_size=4",
    ],
}
INTERVALS = (1, 10, 50)
REPETITIONS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="demo")
    parser.add_argument("--steps", type=int, default=20, help="training steps to time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = load_config(DEMO, [*MODELS[options.model], "parallel.dp_shard=1"])
    device = pick_device(config, 0)
    training = build(config, resolve(config, 1), device)
    step_s, reading_s = _step_s(training, options.steps, config), _reading_s(training)
    tensors = local_tensors(training_tensors(training))
    size = sum(tensor.nbytes for tensor in tensors.values())
    print(f"{options.model} on {device}: {len(tensors)} tensors, {size / 1e6:.1f} MB")
    print(f"step {1e3 * step_s:.2f} ms, reading {1e3 * reading_s:.2f} ms ({size / reading_s / 1e9:.1f} GB/s)")
    for interval in INTERVALS:
        print(f"two readings every {interval:>2} steps: {100 * 2 * reading_s / (interval * step_s):.3f} % of a step")


def _step_s(training: Training, steps: int, config: Config) -> float:
    best = float("inf")
    for step in range(min(steps, config.train.steps)):
        start = time.perf_counter()
        training.forward_backward(training.batch(step))
        training.clip()
        training.step(step)
        _settle(training)
        best = min(best, time.perf_counter() - start)
    return best


def _reading_s(training: Training) -> float:
    reader, best = FingerprintReader(), float("inf")
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        reader.read(local_tensors(training_tensors(training))).values()
        _settle(training)
        best = min(best, time.perf_counter() - start)
    return best


def _settle(training: Training) -> None:
    if training.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
