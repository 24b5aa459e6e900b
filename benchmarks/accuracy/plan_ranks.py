"""Memory of real ranks, measured by allocator events: the reference for the plans of `benchmarks.accuracy.plan`.

    measured = measure_layout(config, num_ranks=2)          # of rank 0
    measured.peak

The processes form one gloo group on this machine and train with the worker's `build` and phases. Allocations by gloo's
threads are not seen.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from statistics import mean

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.cost.allocator import allocated
from trainer.checkpoint.state import local_tensors, training_tensors
from trainer.config.config import Config
from trainer.data.batches import Batch
from trainer.layout.resolve import resolve
from trainer.training.build import build

__all__ = ["RankMeasured", "measure_layout", "measured_rank"]

_WARM_UP_STEPS = 2
"""They allocate the optimizer state and the buffers that FSDP keeps between steps."""
_EXPERT_BATCHES = 3
"""Batches measured for a model with experts, because the number of tokens routed to a rank's experts varies."""
REPEATS = 10
"""Steps per batch; the one with the smallest peak counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasured:
    """Memory of one rank, in bytes."""

    parameters: int
    optimizer: int
    peak: int
    """Peak within a step, with parameters, optimizer state and compression errors; mean over the batches."""


def measured_rank(config: Config, world_size: int, *, repeats: int = REPEATS) -> RankMeasured:
    """Measure a step of this rank; called on all ranks. With few repeats the peak may be too high."""
    training = build(config, resolve(config, world_size), torch.device("cpu"))

    numbers = count()

    def step(batch: Batch) -> None:
        training.forward_backward(batch)
        training.clip()
        training.step(next(numbers))

    for number in range(_WARM_UP_STEPS):
        step(training.batch(number))
    num_batches = _EXPERT_BATCHES if config.model.num_experts else 1
    batches = [training.batch(_WARM_UP_STEPS + number) for number in range(num_batches)]
    # gloo's threads may free a buffer late, so the smallest of a batch's peaks is the most accurate.
    peaks = [min(allocated(partial(step, batch))[1] for _ in range(repeats)) for batch in batches]
    training.close()
    sizes = {
        name: value.numel() * value.element_size() for name, value in local_tensors(training_tensors(training)).items()
    }
    parameters = sum(size for name, size in sizes.items() if name.startswith("model."))
    errors = sum(size for name, size in sizes.items() if name.startswith("compression."))
    state = sum(sizes.values())
    return RankMeasured(parameters=parameters, optimizer=state - parameters - errors, peak=state + round(mean(peaks)))


def measure_layout(config: Config, num_ranks: int) -> RankMeasured:
    """Measure rank 0 of a group of `num_ranks` processes."""
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        mp.spawn(_rank_main, args=(config.model_dump_json(), num_ranks, folder), nprocs=num_ranks)
        return RankMeasured(**json.loads((Path(folder) / "measured.json").read_text()))


def _rank_main(rank: int, config: str, num_ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=120))
    measured = measured_rank(Config.model_validate_json(config), num_ranks)
    if rank == 0:
        (Path(folder) / "measured.json").write_text(json.dumps(asdict(measured)))
    dist.barrier()
    dist.destroy_process_group()
