"""Faults on played devices, and the diagnosis that is expected of each.

    fault = draw("slow_link", layout, seed=3)
    fault.rank, fault.peer, fault.step
    EXPECTED["slow_link"].kind, EXPECTED["slow_link"].causes

A fault changes causes only: times of kernels, transfers and hosts, programs, processes. The records follow from these.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tests.support.played.programs import Layout
from tests.support.played.streams import Await, Call, Host, Launch, Op, Span

__all__ = ["EXPECTED", "Expected", "Fault", "draw"]

Named = Literal["rank", "link", "side", "pair"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Kind and causes of the finding, and whom it names: the rank; both ends of a link, or both ranks of a pair; one
    side of two."""

    kind: str
    causes: tuple[str, ...]
    names: Named = "rank"
    also: tuple[str, ...] = ()
    """Other kinds that are correct."""


EXPECTED: Mapping[str, Expected] = {
    "host_stall": Expected(kind="hang", causes=("not_entered", "p2p_unmatched")),
    "loader_stall": Expected(kind="hang", causes=("data",)),
    "device_stall": Expected(kind="hang", causes=("device_stuck",)),
    "two_device_stalls": Expected(kind="hang", causes=("device_stuck",), names="pair"),
    "skipped_step": Expected(kind="desync", causes=("skipped",), also=("hang",)),
    "stuck_call": Expected(kind="hang", causes=("device_stuck",)),
    "dead_link": Expected(kind="hang", causes=("all_entered",), names="link"),
    "mismatch_size": Expected(kind="hang", causes=("mismatch_size",), names="side"),
    "mismatch_op": Expected(kind="hang", causes=("mismatch_operation",), names="side"),
    "skipped_call": Expected(
        kind="hang", names="side",
        causes=("skipped", "mismatch_size", "mismatch_operation", "not_entered", "p2p_unmatched", "order_inversion"),
    ),
    "slow_gpu": Expected(kind="straggler", causes=("compute",)),
    "slow_clock": Expected(kind="straggler", causes=("gpu_clock",)),
    "slow_loader": Expected(kind="straggler", causes=("data",)),
    "slow_link": Expected(kind="straggler", causes=("communication",), names="link"),
    "dead_gpu": Expected(kind="rank_lost", causes=("exception",), also=("xid",)),
    "ecc_error": Expected(kind="rank_lost", causes=("exception",), also=("xid", "gpu_memory_errors")),
}  # fmt: skip

SLOW_FACTOR = 1.25
LINK_FACTOR = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a rank, or of the link from `rank` to `peer`, from a step on."""

    kind: str
    rank: int
    peer: int
    step: int
    channel: int = 0
    factor: float = 1.0

    @property
    def is_death(self) -> bool:
        """True if the process ends."""
        return EXPECTED[self.kind].kind == "rank_lost"

    def scale(self, rank: int, step: int, what: str, ns: int) -> int:
        """Duration of a piece of work of a rank, ns."""
        if rank != self.rank or step < self.step:
            return ns
        slowed = {
            "slow_gpu": ("forward", "backward", "optimizer"),
            "slow_clock": ("forward", "backward", "optimizer"),
            "slow_loader": ("data",),
        }.get(self.kind, ())
        return int(ns * self.factor) if what in slowed else ns

    def change(self, rank: int, step: int, ops: list[Op]) -> list[Op]:
        """The rank's operations in a step, changed by the fault."""
        ranks = (self.rank, self.peer) if EXPECTED[self.kind].names == "pair" else (self.rank,)
        if rank not in ranks or step != self.step:
            return ops
        match self.kind:
            case "host_stall":
                return _before(ops, _nth(ops, Call, 1), Host(ns=None))
            case "loader_stall":
                return _before(ops, _nth(ops, Span, 0) + 1, Host(ns=None))
            case "skipped_step":
                return [op for op in ops if not isinstance(op, (Call, Await))]
            case "device_stall" | "two_device_stalls":
                middle = sum(isinstance(op, Launch) for op in ops) // 2
                return _before(ops, _nth(ops, Launch, middle), Launch(ns=None))
            case "dead_gpu" | "ecc_error":
                return ops[: _nth(ops, Call, 1)]
            case "skipped_call" | "mismatch_size" | "mismatch_op":
                return self._with_other_call(ops)
        return ops

    def _with_other_call(self, ops: list[Op]) -> list[Op]:
        at = next(i for i, op in enumerate(ops) if isinstance(op, Call) and op.peer is None and op.count > 2)
        call = ops[at]
        assert isinstance(call, Call)
        if self.kind == "mismatch_op":
            other = "AllReduce" if call.op != "AllReduce" else "AllGather"
            changed = Call(group=call.group, op=other, count=call.count, handle=call.handle)
        elif self.kind == "mismatch_size":
            changed = Call(group=call.group, op=call.op, count=call.count // 2, handle=call.handle)
        else:
            return [op for i, op in enumerate(ops) if i != at and getattr(op, "handle", "") != call.handle]
        return [*ops[:at], changed, *ops[at + 1 :]]


def _nth(ops: list[Op], kind: type, number: int) -> int:
    return [i for i, op in enumerate(ops) if isinstance(op, kind)][number]


def _before(ops: list[Op], index: int, op: Op) -> list[Op]:
    return [*ops[:index], op, *ops[index:]]


def draw(kind: str, layout: Layout, seed: int) -> Fault:
    """The fault of a seed."""
    dice = random.Random(zlib.crc32(f"{kind} {layout.name} {seed}".encode()))
    rank = dice.randrange(layout.num_ranks)
    peer = -1
    if EXPECTED[kind].names == "link":
        rank, peer = dice.choice(layout.network_links())
    if EXPECTED[kind].names == "pair":
        rank, peer = dice.sample(range(layout.num_ranks), 2)
    factor = {"slow_link": LINK_FACTOR, "slow_loader": 130.0}.get(kind, SLOW_FACTOR)
    return Fault(kind=kind, rank=rank, peer=peer, step=dice.randrange(22, 28), channel=dice.randrange(2), factor=factor)
