"""Duration of a collective call by NCCL's own model: latency of its hops plus transfer time.

    call_s(call, hardware, bandwidth=450e9, nodes=1)     # seconds of one of the `call.calls` calls

In the ring algorithm data hop from rank to rank, in the tree algorithm up and down a tree (all_reduce only). Each can
use three protocols. LL and LL128 have a flag in every word and are for small messages. Simple sends chunks, is slower
per hop, and is for large messages. The fastest combination is taken, as in NCCL. Source of the figures: the code with
which NCCL 2.11 chooses, `src/graph/tuning.cc` (`baseLat`, `hwLat`, and the shares of the bandwidth in
`ncclTopoTuneModel`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.plan.hardware import Hardware
from trainer.plan.traffic import CollectiveCall

__all__ = ["LINK_EFFICIENCY", "call_s"]

LINK_EFFICIENCY = 0.8
"""Share of a link's data-sheet bandwidth reached by large messages."""
_US = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Protocol:
    """Latencies in microseconds of a call (`base`) and of a hop over NVLink, over PCIe and between nodes.
    `bandwidth_ratio`: share of the link's bandwidth that the protocol reaches."""

    base: float
    nvlink: float
    pcie: float
    network: float
    bandwidth_ratio: float


# In the order LL, LL128, Simple.
_RING = (
    _Protocol(base=3.6, nvlink=0.47, pcie=1.0, network=2.7, bandwidth_ratio=0.25),
    _Protocol(base=10.0, nvlink=1.9, pcie=2.5, network=4.0, bandwidth_ratio=0.92),
    _Protocol(base=8.4, nvlink=3.4, pcie=5.7, network=9.6, bandwidth_ratio=1.0),
)
_TREE = (
    _Protocol(base=4.4, nvlink=0.52, pcie=1.0, network=5.0, bandwidth_ratio=0.9 / 3.8),
    _Protocol(base=4.4, nvlink=1.2, pcie=1.9, network=8.5, bandwidth_ratio=0.9 * 0.915),
    _Protocol(base=0.0, nvlink=28.0, pcie=28.0, network=50.0, bandwidth_ratio=0.9),
)
_PAIRWISE = ("send", "all_to_all")


def call_s(call: CollectiveCall, hardware: Hardware, *, bandwidth: float, nodes: int) -> float:
    """Seconds of one call over `nodes` nodes, at `bandwidth` bytes/s."""
    transfer_s = call.bus_bytes / call.calls / (bandwidth * LINK_EFFICIENCY)
    if call.op == "copy":
        return transfer_s
    times = [
        _hops_us(protocol, hardware, *_ring_hops(call, nodes)) * _US + transfer_s / protocol.bandwidth_ratio
        for protocol in _RING
    ]
    if call.op == "all_reduce":
        inside, between = 2 * (math.ceil(call.size / nodes) - 1), 2 * math.ceil(math.log2(nodes))
        times += [
            _hops_us(protocol, hardware, inside, between) * _US + transfer_s / protocol.bandwidth_ratio
            for protocol in _TREE
        ]
    return min(times)


def _ring_hops(call: CollectiveCall, nodes: int) -> tuple[int, int]:
    """Number of sequential hops (within nodes, between nodes) in a ring. A send or all_to_all has one hop, because all
    pairs send at the same time."""
    if call.op in _PAIRWISE:
        return (0, 1) if nodes > 1 else (1, 0)
    rounds = 2 if call.op == "all_reduce" else 1
    return rounds * (call.size - nodes), rounds * (nodes - 1)


def _hops_us(protocol: _Protocol, hardware: Hardware, inside: int, between: int) -> float:
    hop = protocol.pcie if hardware.inside.startswith("pcie") else protocol.nvlink
    return protocol.base + inside * hop + between * protocol.network
