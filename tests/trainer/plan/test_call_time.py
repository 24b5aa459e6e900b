"""A call costs the latency of its hops besides the time of its bytes, as in NCCL's own model."""

from __future__ import annotations

import pytest

from trainer.plan.call_time import LINK_EFFICIENCY, call_s
from trainer.plan.hardware import Hardware, parse_hardware
from trainer.plan.traffic import CollectiveCall

RATE = 50e9


def hardware(gpu: str = "h100") -> Hardware:
    return parse_hardware(gpu=gpu, gpu_memory="", gpus_per_node=8, interconnect="nvlink,ib400")


def call(op: str, num_bytes: int, *, size: int, calls: int = 1) -> CollectiveCall:
    return CollectiveCall(dimension="dp_shard", op=op, what="", size=size, calls=calls, num_bytes=num_bytes)


def us(call: CollectiveCall, nodes: int, gpu: str = "h100") -> float:
    return call_s(call, hardware(gpu), bandwidth=RATE, nodes=nodes) * 1e6


def test_a_small_message_costs_its_hops() -> None:
    gather = call("all_gather", 8, size=512)
    assert us(gather, 64) == pytest.approx(3.6 + 448 * 0.47 + 63 * 2.7, rel=0.01)
    assert us(call("all_gather", 8, size=8), 1) == pytest.approx(3.6 + 7 * 0.47, rel=0.01)
    assert us(call("all_reduce", 8, size=512), 64) == pytest.approx(4.4 + 14 * 0.52 + 12 * 5.0, rel=0.01), "a tree"
    assert us(call("send", 8, size=8), 2) == pytest.approx(3.6 + 2.7, rel=0.01), "pairs send at the same time"
    assert us(gather, 64, gpu="l4") > us(gather, 64), "PCIe inside a node"


def test_many_small_calls_cost_more_than_a_large_one_of_their_bytes() -> None:
    one, many = call("all_reduce", 1 << 20, size=64), call("all_reduce", 1 << 20, size=64, calls=1024)
    assert 1024 * us(many, 8) > 100 * us(one, 8)


@pytest.mark.parametrize(("op", "size", "nodes"), [("all_reduce", 8, 1), ("all_gather", 64, 8), ("send", 2, 2)])
def test_a_large_message_costs_its_bytes(op: str, size: int, nodes: int) -> None:
    large = call(op, 4 << 30, size=size)
    assert us(large, nodes) == pytest.approx(large.bus_bytes / (RATE * LINK_EFFICIENCY) * 1e6, rel=0.01)


def test_a_copy_to_the_host_has_no_hops() -> None:
    assert us(call("copy", 8, size=1), 1) == pytest.approx(8 / (RATE * LINK_EFFICIENCY) * 1e6)


def test_the_nodes_of_a_group_follow_from_its_stride_and_size() -> None:
    found = [hardware().num_nodes(stride=stride, size=size) for stride, size in ((1, 8), (1, 16), (8, 4), (4, 4))]
    assert found == [1, 2, 4, 2]
