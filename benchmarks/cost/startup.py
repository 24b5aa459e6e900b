"""Start of a large job up to its first step: time and memory of one rank in a fake process group.

    python -m benchmarks.cost.startup                 # 8B on 64 ranks, 70B on 512
    python -m benchmarks.cost.startup --json startup.json

Each row is a separate process that builds model, optimizer and data as a rank does. `shapes` is the time to create the
model on the meta device and apply parallelism; `weights` is the time to draw this rank's shards, which a resumed run
does not need. There is no network traffic, so waits for other ranks are not included.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

from benchmarks.harness import argument_parser, markdown_head, write_json

__all__ = ["JOBS", "Start", "start"]

_70B = ["model.dim=8192", "model.num_layers=80", "model.num_heads=64", "model.hidden_dim=28672"]
JOBS: dict[str, tuple[str, int, list[str]]] = {
    "8B, 64 ranks, fsdp": ("llama-8b", 64, []),
    "8B, 64 ranks, fsdp x tp": ("llama-8b", 64, ["parallel.tp=8"]),
    "70B, 512 ranks, fsdp": ("llama-8b", 512, _70B),
    "70B, 512 ranks, fsdp x tp": ("llama-8b", 512, [*_70B, "parallel.tp=8"]),
}
"""Preset, ranks, settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One rank's start. `memory_bytes`: peak resident memory minus that after the imports."""

    job: str
    parameters: int
    own_parameters: int
    shapes_s: float
    weights_s: float
    memory_bytes: int


def start(job: str) -> Start:
    """Start one rank of a job in a separate process."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_start, args=(job, sending))
    process.start()
    sending.close()
    try:
        found: Start = receiving.recv()
    finally:
        process.join()
    return found


def _start(job: str, results: Connection) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from trainer.config.load import load_config
    from trainer.layout.resolve import resolve
    from trainer.presets import config_path
    from trainer.training.build import build

    preset, ranks, settings = JOBS[job]
    torch.set_num_threads(1)
    config = load_config(config_path(preset), ["train.device=cpu", *settings])
    plan = resolve(config, ranks)
    dist.init_process_group("fake", rank=ranks // 3, world_size=ranks, store=FakeStore())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    training = build(config, plan, torch.device("cpu"), with_weights=False)
    built = time.monotonic()
    training.fill_weights()
    ended = time.monotonic()
    parameters = [parameter for _, parameter in training.named_parameters()]
    num_local = sum((one.to_local() if isinstance(one, DTensor) else one).numel() for one in parameters)
    results.send(
        Start(
            job=job,
            parameters=sum(one.numel() for one in parameters),
            own_parameters=num_local,
            shapes_s=built - began,
            weights_s=ended - built,
            memory_bytes=1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before),
        )
    )
    training.close()


def main() -> int:
    """Print the table."""
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--job", choices=JOBS, action="append", help="only this job")
    options = parser.parse_args()
    rows = []
    print(markdown_head("job", "parameters", "of this rank", "shapes", "weights", "memory"))
    for job in options.job or JOBS:
        row = start(job)
        rows.append(row)
        print(
            f"| {row.job} | {row.parameters / 1e9:.1f} B | {row.own_parameters / 1e6:.0f} M | {row.shapes_s:.1f} s "
            f"| {row.weights_s:.1f} s | {row.memory_bytes / 1e9:.2f} GB |",
            flush=True,
        )
    write_json(options.json, [asdict(row) for row in rows])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
