"""Memory of real ranks, from the allocator's own events in each: what `benchmarks.accuracy.plan` holds the plan of a
layout to.

    measured = measure_layout(config, num_ranks=2)          # of rank 0
    measured.peak

The processes are one gloo group on this machine and train as the worker does: the same `build`, the same phases. What
gloo's own threads allocate is not seen.
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
from trainer.layout.plan import resolve
from trainer.training.build import build

__all__ = ["RankMeasured", "measure_layout", "measured_rank"]

_WARM_UP_STEPS = 2
"""They make the optimizer's state and what FSDP keeps from step to step."""

_BATCHES_OF_EXPERTS = 3
"""Measured, since a rank's experts get more of the tokens of one batch than of another; without experts one will do."""
REPEATS = 10
"""Steps with each batch; the one that needed least counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasured:
    """Bytes of one rank."""

    parameters: int
    optimizer: int
    peak: int
    """The most within a step, parameters, optimizer state and errors of compression included; the mean over batches."""


def measured_rank(config: Config, world_size: int, *, repeats: int = REPEATS) -> RankMeasured:
    """A step of this rank, in whatever process group there is; called on all ranks alike. With few repeats the peak may
    be too high."""
    training = build(config, resolve(config, world_size), torch.device("cpu"))

    numbers = count()

    def step(batch: Batch) -> None:
        training.forward_backward(batch)
        training.clip()
        training.step(next(numbers))

    for number in range(_WARM_UP_STEPS):
        step(training.batch(number))
    num_batches = _BATCHES_OF_EXPERTS if config.model.num_experts else 1
    batches = [training.batch(_WARM_UP_STEPS + number) for number in range(num_batches)]
    # gloo's threads may hold a buffer for a moment longer than the call that it was for: less is nearer to the need of
    # the same batch, and only of the same.
    most = [min(allocated(partial(step, batch))[1] for _ in range(repeats)) for batch in batches]
    training.close()
    sizes = {
        name: value.numel() * value.element_size() for name, value in local_tensors(training_tensors(training)).items()
    }
    parameters = sum(size for name, size in sizes.items() if name.startswith("model."))
    errors = sum(size for name, size in sizes.items() if name.startswith("compression."))
    state = sum(sizes.values())
    return RankMeasured(parameters=parameters, optimizer=state - parameters - errors, peak=state + round(mean(most)))


def measure_layout(config: Config, num_ranks: int) -> RankMeasured:
    """Rank 0 of so many processes."""
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
