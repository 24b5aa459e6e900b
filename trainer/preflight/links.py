"""Measure bandwidth, latency and clock offsets between ranks of an initialised process group.

    link = measure_link(partner=3, device=device)            # both ends call it in the same round
    offsets = clock_offsets([1, 2, 3])                       # on rank 0; the others: answer_clock(0)
    reading = measure_all_reduce(device, num_bytes=1 << 20)   # on all ranks

Data travels as in training, through the backend of `device`; sizes and clocks go through the CPU's backend.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from trainer.preflight.verdict.readings import AllReduceReading, LinkReading, bus_bytes_per_s
from watch.digests.clock_offsets import RoundTrip, best_offset

__all__ = ["answer_clock", "clock_offsets", "measure_all_reduce", "measure_link", "time_all_reduce"]

NUM_PINGS = 20
FIRST_BYTES = 1 << 20
GROWTH = 4
MOST_BYTES = {"cuda": 1 << 28, "cpu": 1 << 26}
ENOUGH_S = 0.02
"""Messages are enlarged until a transfer takes this long, because latency is then a small part of the time."""
NUM_TRANSFERS = 2
NUM_CLOCK_TRIPS = 5
NUM_ALL_REDUCES = 10


def measure_link(partner: int, device: torch.device) -> LinkReading:
    """Measure the link from this rank to its partner. The partner measures the other direction, before or after this
    rank.

    The lower rank sends first.
    """
    own = dist.get_rank()
    if own < partner:
        reading = _send(partner, device)
        _receive(partner, device)
    else:
        _receive(partner, device)
        reading = _send(partner, device)
    return reading


def _send(partner: int, device: torch.device) -> LinkReading:
    """Ping the partner, then send larger and larger messages until one takes `ENOUGH_S`. The fastest transfer of that
    size counts."""
    token = torch.zeros(1, device=device)
    trips = []
    for _ in range(NUM_PINGS):
        started = time.perf_counter()
        dist.send(token, partner)
        dist.recv(token, partner)
        _synchronise(device)
        trips.append(time.perf_counter() - started)
    latency_s = min(trips) / 2
    rate, num_bytes = 0.0, FIRST_BYTES
    while num_bytes:
        payload = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        dist.send(torch.tensor([num_bytes]), partner)
        took = min(_timed_transfer(payload, token, partner, device) for _ in range(NUM_TRANSFERS))
        rate = num_bytes / max(took - latency_s, 1e-9)
        is_last = took >= ENOUGH_S or num_bytes >= MOST_BYTES[device.type]
        num_bytes = 0 if is_last else num_bytes * GROWTH
    dist.send(torch.tensor([0]), partner)
    return LinkReading(source=dist.get_rank(), target=partner, bytes_per_s=rate, latency_s=latency_s)


def _timed_transfer(payload: torch.Tensor, token: torch.Tensor, partner: int, device: torch.device) -> float:
    _synchronise(device)
    started = time.perf_counter()
    dist.send(payload, partner)
    dist.recv(token, partner)
    _synchronise(device)
    return time.perf_counter() - started


def _receive(partner: int, device: torch.device) -> None:
    token = torch.zeros(1, device=device)
    for _ in range(NUM_PINGS):
        dist.recv(token, partner)
        dist.send(token, partner)
    size = torch.zeros(1, dtype=torch.int64)
    while True:
        dist.recv(size, partner)
        if not size.item():
            return
        payload = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
        for _ in range(NUM_TRANSFERS):
            dist.recv(payload, partner)
            dist.send(token, partner)


def clock_offsets(ranks: Sequence[int]) -> dict[int, tuple[int, int]]:
    """{rank: (offset from this rank's clock, maximum error)} in nanoseconds; positive if the rank's clock is ahead."""
    found: dict[int, tuple[int, int]] = {}
    for rank in ranks:
        trips = []
        for _ in range(NUM_CLOCK_TRIPS):
            answer = torch.zeros(1, dtype=torch.int64)
            sent_ns = time.time_ns()
            dist.send(answer, rank)
            dist.recv(answer, rank)
            received_ns = time.time_ns()
            trips.append(RoundTrip(sent_ns=sent_ns, answered_ns=int(answer.item()), received_ns=received_ns))
        found[rank] = best_offset(trips)
    return found


def answer_clock(asking: int) -> None:
    """Answer the clock requests of the rank `asking`."""
    request = torch.zeros(1, dtype=torch.int64)
    for _ in range(NUM_CLOCK_TRIPS):
        dist.recv(request, asking)
        dist.send(torch.tensor([time.time_ns()]), asking)


def measure_all_reduce(device: torch.device, num_bytes: int) -> AllReduceReading:
    """Measure latency and bandwidth of the all-reduce over all ranks. Each is the best of a few calls."""
    small, took = time_all_reduce(device, 8), time_all_reduce(device, num_bytes)
    rate = bus_bytes_per_s(num_bytes, took, dist.get_world_size())
    return AllReduceReading(num_bytes=num_bytes, bus_bytes_per_s=rate, latency_s=small)


def time_all_reduce(device: torch.device, num_bytes: int) -> float:
    """Seconds of the fastest of a few calls, after a warm-up call."""
    tensor = torch.zeros(max(4, num_bytes // 4), device=device)
    count = NUM_ALL_REDUCES if num_bytes <= FIRST_BYTES else NUM_TRANSFERS
    _timed_all_reduce(tensor, device)
    return min(_timed_all_reduce(tensor, device) for _ in range(count))


def _timed_all_reduce(tensor: torch.Tensor, device: torch.device) -> float:
    _synchronise(device)
    started = time.perf_counter()
    dist.all_reduce(tensor)
    _synchronise(device)
    return time.perf_counter() - started


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
