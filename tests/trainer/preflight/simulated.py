"""Readings of a healthy cluster, drawn around its usual speeds, to plant faults in."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from trainer.preflight.layout import Hello, Layout
from trainer.preflight.verdict.readings import AllReduceReading, LinkReading, RankReading, Readings

FLOPS, MEMORY, LINK, LATENCY = 7e14, 2.8e12, 4.5e10, 9e-6
Alter = Callable[[RankReading], RankReading]
AlterLink = Callable[[LinkReading], LinkReading]


def cluster(
    num_nodes: int,
    ranks_per_node: int = 8,
    *,
    seed: int = 0,
    rank: Alter = lambda reading: reading,
    link: AlterLink = lambda reading: reading,
) -> Readings:
    """All readings that the ranks of such a cluster would have made; `rank` and `link` plant the faults."""
    noise = random.Random(seed)
    world_size = num_nodes * ranks_per_node
    hellos = {
        number: Hello(
            host=f"gpu-{number // ranks_per_node:03d}", node_key=str(number // ranks_per_node),
            boot_id=str(number // ranks_per_node), local_rank=number % ranks_per_node, is_gpu=True,
        )
        for number in range(world_size)
    }  # fmt: skip
    layout = Layout.of(hellos, world_size)
    ranks = [
        RankReading(
            rank=number, local_rank=hello.local_rank, node=hello.host, host=hello.host, device="H200",
            facts={"torch": "2.13.0", "nccl": "2.28.3", "python": "3.12.3", "gpu driver": "580.95.05"},
            settings={"NCCL_IB_HCA": "mlx5", "OMP_NUM_THREADS": "8"},
            disk_free_bytes=2 << 40, shared_free_bytes=900 << 30,
            matmul_flops_per_s=noise.gauss(FLOPS, 0.01 * FLOPS), memory_bytes_per_s=noise.gauss(MEMORY, 0.005 * MEMORY),
            core_wait_ratio=abs(noise.gauss(0, 0.01)),
            clock_offset_ns=int(noise.gauss(0, 2e5)) if not hello.local_rank else None, clock_error_ns=10_000,
        )
        for number, hello in hellos.items()
    ]  # fmt: skip
    links = [
        LinkReading(
            source=a, target=b, bytes_per_s=noise.gauss(LINK, 0.04 * LINK), latency_s=noise.gauss(LATENCY, 1e-6)
        )
        for pairs in layout.rounds()
        for pair in pairs
        for a, b in (pair, pair[::-1])
    ]
    return Readings(
        world_size=world_size, ranks=tuple(map(rank, ranks)), links=tuple(map(link, links)),
        num_rounds=len(layout.rounds()),
        all_reduce=AllReduceReading(num_bytes=1 << 26, bus_bytes_per_s=3e11, latency_s=6e-5), backend="nccl",
    )  # fmt: skip


def slower(reading: LinkReading, ratio: float) -> LinkReading:
    return replace(reading, bytes_per_s=reading.bytes_per_s * ratio)
