"""Cost of attaching in a step on many GPUs, counted on a played device and a fake process group.

    python -m tests.support.played.step_budget                  # DDP, FSDP2, FSDP2 x TP, 1F1B; 2, 64 and 512 ranks
    python -m tests.support.played.step_budget --host-steps 100 --json budget.json

A row shows what `rankscope.attach` adds to a step of rank 0, after five other steps: kernels, copies between device and
host, events and how many of them have a time (stamps), waits of the host for the device, collectives. Nothing is
computed (`tests.support.played.device`); what is launched is counted. `--host-steps 100` also measures the CPU time
that attaching adds to a step of a small model on the CPU, over the same fake group: so many steps of each kind, in
alternating blocks. Each stamp takes two more calls of CUDA's runtime (some 1.5 us). 1F1B is not timed: without the
played device a stage asks its neighbour for shapes. A row that fails shows its error.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from tests.support.played.device import Counts, load, played_device

__all__ = ["LAYOUTS", "RANKS", "SINGLE", "Added", "added_by_attach"]

LAYOUTS = ("ddp", "fsdp", "fsdp_tp", "1f1b")
RANKS = (2, 64, 512)
SINGLE = "single"
"""One rank, without a group: its phases are timed by events."""
DIM, BLOCKS, BATCH, STAGES, TENSOR_RANKS, MICROBATCHES = 256, 4, 8, 8, 8, 8
HOST_DIM = 32
"""Width of the model whose steps are timed: small, so that little but the host's work is in them."""
WARM_UP_STEPS, BLOCK_STEPS = 5, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """Additions of attaching to a step. `operators`: the kernels by name."""

    layout: str
    ranks: int
    kernels: int
    copies: int
    events: int
    stamps: int
    syncs: int
    collectives: int
    operators: dict[str, int]


def added_by_attach(layout: str, ranks: int, folder: Path) -> Added:
    """Count a step without and a step with `attach`, in the same process."""
    with _world(ranks):
        mesh = _mesh(layout, ranks)
        with played_device() as counts:
            return _added(layout, ranks, mesh, counts, folder)


def _added(layout: str, ranks: int, mesh: Any, counts: Counts, folder: Path) -> Added:
    import rankscope

    model, optimizer, step = _training(layout, mesh)
    bare = _counted(step, counts)
    attached = rankscope.attach(model, optimizer, run_dir=folder / f"{layout}-{ranks}", watch=False)
    ours = _counted(step, counts)
    attached.detach()
    more = ours.operators - bare.operators
    more.subtract(bare.operators - ours.operators)
    return Added(
        layout=layout,
        ranks=ranks,
        kernels=ours.kernels - bare.kernels,
        copies=ours.copies - bare.copies,
        events=ours.events - bare.events,
        stamps=ours.stamps - bare.stamps,
        syncs=ours.syncs - bare.syncs,
        collectives=ours.collectives - bare.collectives,
        operators={name: count for name, count in more.items() if count},
    )


def _counted(step: Callable[[], None], counts: Counts) -> Counts:
    for _ in range(WARM_UP_STEPS):
        step()
    counts.clear()
    step()
    return replace(counts, operators=counts.operators.copy())


def host_us(layout: str, ranks: int, folder: Path, num_steps: int) -> float:
    """CPU time that attaching adds to a step of a small model on the CPU, microseconds; stamps are not in it.

    The loop runs in blocks of `BLOCK_STEPS`, alternately with and without the probes, each with a new model. A block
    counts by its quickest step, which a busy machine disturbs least; the result is the median difference of neighbours.
    """
    import torch

    import rankscope

    torch.set_num_threads(1)  # idle threads of a pool spin
    with _world(ranks):
        mesh = _mesh(layout, ranks, "cpu")

        def block_us(number: int, is_attached: bool) -> float:
            model, optimizer, step = _training(layout, mesh, torch_device="cpu", dim=HOST_DIM)
            with ExitStack() as stack:
                if is_attached:
                    run_dir = folder / f"host-{layout}-{ranks}-{number}"
                    stack.callback(rankscope.attach(model, optimizer, run_dir=run_dir, watch=False).detach)
                return _quickest_us(step)

        block_us(-1, True)  # imports
        added = []
        for number in range(max(3, -(-num_steps // BLOCK_STEPS))):
            kinds = (True, False) if number % 2 else (False, True)
            us = {is_attached: block_us(number, is_attached) for is_attached in kinds}
            added.append(us[True] - us[False])
        return median(added)


def _quickest_us(step: Callable[[], None]) -> float:
    """CPU time of the process in the quickest step of a block, after others."""
    for _ in range(WARM_UP_STEPS):
        step()
    took = []
    for _ in range(BLOCK_STEPS):
        began_ns = time.process_time_ns()
        step()
        took.append(time.process_time_ns() - began_ns)
    return min(took) / 1e3


@contextmanager
def _world(ranks: int) -> Iterator[None]:
    """Rank 0 of a group whose collectives do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _training(
    layout: str, mesh: Any, torch_device: str = "cuda:0", dim: int = DIM
) -> tuple[Any, Any, Callable[[], None]]:
    """Model, optimizer and step of a layout, as in a user's script."""
    import torch
    from torch import nn

    with torch.device(torch_device):
        blocks = nn.Sequential(*[_block(dim) for _ in range(BLOCKS)])
    data = torch.ones(BATCH, dim, device=torch_device)
    model = _PARALLEL[layout](blocks, mesh)
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-3, foreach=True)
    if layout == "1f1b":
        run = partial(_schedule(blocks, mesh, data).step, data)
    else:

        def run() -> None:
            model(data).square().mean().backward()

    def step() -> None:
        run()
        if layout in ("ddp", SINGLE):
            nn.utils.clip_grad_norm_(blocks.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def _block(dim: int) -> Any:
    from torch import nn

    return nn.Sequential(OrderedDict(up=nn.Linear(dim, 4 * dim), act=nn.ReLU(), down=nn.Linear(4 * dim, dim)))


def _mesh(layout: str, ranks: int, device: str = "cuda") -> Any:
    """The meshes along the dimensions of a layout. Made outside of the played device: a mesh reads tensors."""
    from torch.distributed.device_mesh import init_device_mesh

    if layout == "fsdp_tp":
        tensor_ranks = min(TENSOR_RANKS, ranks)
        mesh = init_device_mesh(device, (ranks // tensor_ranks, tensor_ranks), mesh_dim_names=("dp_shard", "tp"))
        return mesh["dp_shard"], mesh["tp"]
    if layout == "1f1b":
        stages = min(STAGES, ranks)
        mesh = init_device_mesh(device, (stages, ranks // stages), mesh_dim_names=("pp", "dp"))
        return (mesh["pp"],)
    return (init_device_mesh(device, (ranks,)),)


def _ddp(blocks: Any, mesh: Any) -> Any:
    """DDP whose reducer reads no tensors, which have no data here: neither shapes nor an order of buckets."""
    import torch
    import torch.distributed as dist

    def reduce(_: Any, bucket: dist.GradBucket) -> Any:
        dist.all_reduce(bucket.buffer(), async_op=True)
        done = torch.futures.Future()  # the fake group's future holds no tensor
        done.set_result(bucket.buffer())
        return done

    device_ids = None if next(blocks.parameters()).is_cpu else [0]
    model = torch.nn.parallel.DistributedDataParallel(blocks, device_ids=device_ids, init_sync=False)
    reduce.__annotations__.clear()  # strings here, but torch expects types
    model.register_comm_hook(None, reduce)
    model.reducer = _Reducer(model.reducer)
    model.logger = SimpleNamespace(set_runtime_stats_and_log=lambda: None)  # it needs CUDA's timer
    return model


class _Reducer:
    """DDP's reducer, which keeps its first order of buckets."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _fsdp(blocks: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        fully_shard(block, mesh=mesh[0])
    return fully_shard(blocks, mesh=mesh[0])


def _fsdp_tp(blocks: Any, mesh: Any) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in blocks:
        parallelize_module(block, mesh[1], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return _fsdp(blocks, mesh)


_PARALLEL: Mapping[str, Callable[[Any, Any], Any]] = {
    "ddp": _ddp,
    "fsdp": _fsdp,
    "fsdp_tp": _fsdp_tp,
    "1f1b": lambda blocks, mesh: blocks,
    SINGLE: lambda blocks, mesh: blocks,
}


def _schedule(blocks: Any, mesh: Any, data: Any) -> Any:
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    piece = torch.empty_like(data[: BATCH // MICROBATCHES])
    grads = torch.empty_like(piece, requires_grad=True)
    stage = PipelineStage(
        blocks, 0, mesh[0].size(), data.device, input_args=piece, output_args=grads, group=mesh[0].get_group()
    )
    return Schedule1F1B(stage, MICROBATCHES, loss_fn=lambda output, target: (output - target).square().mean())


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.played.step_budget")
    parser.add_argument("--layout", action="append", choices=(SINGLE, *LAYOUTS), help="these only")
    parser.add_argument("--ranks", action="append", type=int, help="these only")
    parser.add_argument(
        "--host-steps", type=int, default=0, help="time the host in so many steps of each kind (at least 30)"
    )
    parser.add_argument("--json", type=Path, help="write the table here")
    options = parser.parse_args(arguments)
    logging.getLogger("rankscope").setLevel(logging.ERROR)  # DDP's hook here stands for its reducer
    rows, num_failed = [], 0
    print(
        f"{'layout':8} {'ranks':>5} {'stamps':>6} {'events':>6} {'copies':>6} {'kernels':>7} {'syncs':>5} "
        f"{'collectives':>11} {'host us':>7}"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        load(folder)
        for layout in options.layout or (SINGLE, *LAYOUTS):
            for ranks in (1,) if layout == SINGLE else options.ranks or RANKS:
                try:
                    row = added_by_attach(layout, ranks, folder)
                    is_timed = options.host_steps and layout != "1f1b"
                    us = host_us(layout, ranks, folder, options.host_steps) if is_timed else None
                except Exception as error:
                    num_failed += 1
                    print(f"{layout:8} {ranks:5} {type(error).__name__}: {error}", flush=True)
                    continue
                rows.append({**asdict(row), "host_us": us})
                counts = f"{row.stamps:6} {row.events:6} {row.copies:6} {row.kernels:7} {row.syncs:5}"
                print(
                    f"{layout:8} {ranks:5} {counts} {row.collectives:11} {'' if us is None else f'{us:.0f}':>7}",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
