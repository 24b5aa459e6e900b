"""A simulated run on disk: the real recorder and the real NCCL plugin write its tapes, by a virtual clock.

    played = play("ddp", steps=60, seed=0, fault=None, folder=Path("runs"))
    played.run, played.truth.exposed_ratio

1. `streams` computes the time of every operation.
2. The operations of each rank's host and device are passed, in the order of the virtual clock, to a `TapeRecorder` and
   to a copy of the plugin (compiled from its sources with the virtual clock), which write their tapes themselves.
3. The launcher's and the node's events follow: how the run ended, readings of the devices, XIDs.
"""

from __future__ import annotations

import functools
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes.collectives.groups.group_label import group_label
from probes.tape.rundir import RunDir
from probes.tape_recorder import TapeRecorder
from tests.support.played.aftermath import write_end
from tests.support.played.faults import Fault
from tests.support.played.host_time import PlayedClock, played_time
from tests.support.played.nccl_interface import PlayedCommunicator, PlayedNccl
from tests.support.played.programs import LAYOUTS, WORLD, Job, Layout, training
from tests.support.played.stamps import PlayedEvent
from tests.support.played.streams import (
    Await,
    AwaitEnd,
    Begin,
    Collective,
    EndStep,
    Machine,
    Op,
    Span,
    SpanEnd,
    World,
)

__all__ = ["Played", "play", "simulate"]

CHANNELS = 2
NODE_BYTES_PER_NS = 150.0
NETWORK_BYTES_PER_NS = 40.0
LATENCY_NS = 15_000
SEEN_LATE_NS = 2_000
"""Delay with which the host sees a kernel's start and stop."""
PROXY_STEPS = 2
START_NS = 400_000_000
"""Time from a rank's first record to its first step."""
SEND_GPU_WAIT, SEND_WAIT, RECV_WAIT, SEND_PEER_WAIT = 8, 9, 10, 20
_OPS = {"send": "Send", "recv": "Recv"}
_DESCRIPTIONS = {WORLD: "default_pg"}

Emit = tuple[int, int, Callable[[], None]]
"""(time, order at that time, action)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A run on disk, and its simulation."""

    run: RunDir
    world: World
    layout: Layout
    fault: Fault | None


class Links:
    """Durations of transfers: a ring or pair is as fast as its slowest link."""

    def __init__(self, layout: Layout, fault: Fault | None, dice: random.Random) -> None:
        self._layout, self._fault, self._dice = layout, fault, dice

    def pairs(self, call: Collective) -> list[tuple[int, int]]:
        """(from, to) of the links that a call uses."""
        kinds = {op for op, _ in call.ops.values()}
        if kinds & {"send", "recv"}:
            rank, (op, _) = next(iter(call.ops.items()))
            other = next(member for member in call.members if member != rank)
            return [(rank, other) if op == "send" else (other, rank)]
        return list(zip(call.members, (*call.members[1:], call.members[0]), strict=True))

    def is_hit(self, call: Collective, kind: str) -> bool:
        """Return True if a fault of the link concerns a call."""
        fault = self._fault
        if fault is None or fault.kind != kind or (fault.rank, fault.peer) not in self.pairs(call):
            return False
        return min(call.steps.values()) >= fault.step and next(iter(call.ops.values()))[1] > 2

    def transfer_ns(self, call: Collective) -> int | None:
        """Duration of a transfer; None: never ends."""
        op, count = next(iter(call.ops.values()))
        size, num = count * 4, len(call.members)
        moved = {
            "AllReduce": 2 * size * (num - 1) / num,
            "AllGather": size * (num - 1),
            "ReduceScatter": size * (num - 1),
        }
        across = any(self._layout.node(a) != self._layout.node(b) for a, b in self.pairs(call))
        speed = NETWORK_BYTES_PER_NS if across else NODE_BYTES_PER_NS
        ns = (LATENCY_NS + moved.get(op, size) / speed) * self._dice.uniform(0.97, 1.03)
        if self.is_hit(call, "dead_link"):
            return None
        if self.is_hit(call, "slow_link") and self._fault is not None:
            ns *= self._fault.factor
        return int(ns)


def simulate(layout: Layout, *, steps: int, seed: int, fault: Fault | None, job: Job) -> tuple[World, Links]:
    """Run the training on the virtual clock."""
    dice = random.Random(seed)
    speed = {rank: 1 + 0.004 * dice.uniform(-1, 1) for rank in range(layout.num_ranks)}

    def scale(rank: int, step: int, what: str, ns: int | None) -> int | None:
        if ns is None:
            return None
        spread = 0.1 if what in ("data", "host") else 0.01
        usual_ns = int(ns * speed[rank] * (1 + spread * dice.uniform(-1, 1)))
        return fault.scale(rank, step, what, usual_ns) if fault else usual_ns

    def change(rank: int, step: int, ops: list[Op]) -> list[Op]:
        return fault.change(rank, step, ops) if fault else ops

    def program(rank: int) -> Any:
        for op in training(layout, job, rank, steps, scale, change):
            yield op
            if fault and fault.is_death and rank == fault.rank and isinstance(op, Begin) and op.step > fault.step:
                raise AssertionError("a dead rank goes on")

    links = Links(layout, fault, dice)
    last = {
        rank: fault.step if fault and fault.is_death and rank == fault.rank else steps
        for rank in range(layout.num_ranks)
    }
    machines = [Machine(rank, _until(program(rank), last[rank])) for rank in range(layout.num_ranks)]
    world = World(machines, layout.groups(), links.transfer_ns)
    if fault and fault.kind == "stuck_call":
        world.stuck = (fault.rank, fault.step)
    world.run()
    return world, links


def _until(program: Any, last: int) -> Any:
    for op in program:
        if isinstance(op, Begin) and op.step > last:
            return
        yield op


def play(
    name: str,
    *,
    steps: int,
    seed: int,
    fault: Fault | None,
    folder: Path,
    library: Path,
    clock: PlayedClock,
    job: Job | None = None,
) -> Played:
    """Simulate a run and have it recorded. `library`: the plugin on the virtual clock (`host_time.build`)."""
    layout = LAYOUTS[name]
    world, links = simulate(layout, steps=steps, seed=seed, fault=fault, job=job or Job())
    config = {"parallel": {**layout.sizes, "backend": "nccl"}, "train": {"steps": steps}}
    manifest = {"world_size": layout.num_ranks, "mesh": layout.sizes, "config": config}
    run = RunDir.create(folder, name=f"{name}-{fault.kind if fault else 'clean'}-{seed}", manifest=manifest)
    with played_time(clock):
        for machine in world.machines:
            _Rank(machine, world, links, run, layout, clock, library, folder, is_named=seed % 2 == 0).record(fault)
        write_end(run, world, layout, fault, clock)
    return Played(run=run, world=world, layout=layout, fault=fault)


class _Rank:
    """Passes one rank's operations to its recorder and its plugin."""

    def __init__(
        self,
        machine: Machine,
        world: World,
        links: Links,
        run: RunDir,
        layout: Layout,
        clock: PlayedClock,
        library: Path,
        folder: Path,
        *,
        is_named: bool,
    ) -> None:
        self.machine, self.world, self.links, self.layout, self.clock = machine, world, links, layout, clock
        rank = self.rank = machine.rank
        clock.set(-START_NS)
        self.recorder = TapeRecorder(
            run.rank_dir(0, rank), rank=rank, attempt=0, world_size=layout.num_ranks,
            local_rank=rank % layout.ranks_per_node, node_rank=layout.node(rank),
            device=f"cuda:{rank % layout.ranks_per_node}",
        )  # fmt: skip
        host = f"node-{layout.node(rank)}"
        self.recorder.describe(device_uuid=layout.device(rank), host=host, **layout.coordinates(rank))
        copy = folder / f"plugin-{run.path.name}-{rank}.so"
        shutil.copy(library, copy)
        with clock.environment(RANKSCOPE_NCCL_DIR=str(self.recorder.directory), RANKSCOPE_NCCL_RANK=str(rank)):
            nccl = PlayedNccl(copy, 5)
            self.communicators: dict[str, PlayedCommunicator] = {}
            for number, group in enumerate(layout.groups()):
                members = world.members(group, rank)
                mark = (number + 1) << 32 | members[0]
                self.communicators[group] = nccl.communicator(
                    name=str(mark) if is_named else "", comm_hash=mark, num_ranks=len(members),
                    rank=members.index(rank), nodes=len({layout.node(one) for one in members}),
                )  # fmt: skip
                description = _DESCRIPTIONS.get(group, f"mesh_{group}")
                self.recorder.event(
                    "process_group", process_group=group_label(description, list(members)), description=description,
                    group_name=str(mark), recorded_by="nccl_plugin", members=list(members),
                )  # fmt: skip
        copy.unlink()
        self.handles: dict[int, Any] = {}
        self.emits: list[Emit] = []
        self.reached_ns: int | None = None  # when the compute stream reaches the host's current operation
        self.stamps = self.recorder.stamps
        assert self.stamps is not None
        self.stamps._new_event = lambda: PlayedEvent(self)

    def record(self, fault: Fault | None) -> None:
        """Play everything in the order of the clock."""
        self._host()
        for call in self.world.calls:
            if self.rank in call.enqueue_ns:
                self._call(call)
        for ns, _, act in sorted(self.emits, key=lambda emit: emit[:2]):
            self.clock.set(ns)
            act()
        if not self.world.is_stuck:
            for communicator in self.communicators.values():
                communicator.finalize()
            self.recorder.close()

    # The host.

    def _host(self) -> None:
        spans: list[Any] = []
        assert self.stamps is not None
        for (ns, op), reached in zip(self.machine.log, self.machine.reached, strict=True):
            match op:
                case Begin(step=step):
                    act: Callable[[], None] = functools.partial(self.recorder.begin_step, step)
                case EndStep():
                    act = self._end_step
                case Span():
                    act = functools.partial(self._enter, op, spans)
                case SpanEnd():
                    act = functools.partial(_leave, spans)
                case Await():
                    act = self.stamps.enter_wait
                case AwaitEnd():
                    act = self.stamps.leave_wait
                case _:
                    continue
            self._at(ns, 2, functools.partial(self._stamped, reached.ns, act))

    def _stamped(self, reached_ns: int | None, act: Callable[[], None]) -> None:
        self.reached_ns = reached_ns
        act()

    def _enter(self, op: Span, spans: list[Any]) -> None:
        indices = {key: value for key, value in (("microbatch", op.microbatch), ("stage", op.stage)) if value >= 0}
        span = self.recorder.span(op.kind, **indices)
        span.__enter__()
        spans.append(span)

    def _end_step(self) -> None:
        self.recorder.log(tokens=8192, loss=2.5, committed=1)
        self.recorder.end_step()

    # The device.

    def _at(self, ns: int, order: int, act: Callable[[], None]) -> None:
        self.emits.append((ns, order, act))

    def _call(self, call: Collective) -> None:
        rank, key = self.rank, id(call)
        op, count = call.ops[rank]
        enqueued = call.enqueue_ns[rank]
        self._at(enqueued, 3, lambda: self._enqueue(call, op, count))
        self._at(enqueued + 3_000, 4, lambda: self.handles[key].launched())
        if rank not in call.start_ns:
            return
        start, end = call.start_ns[rank], call.end_ns.get(rank)
        kernels: list[Any] = []
        channels = self._channels(call, op)
        self._at(start + SEEN_LATE_NS, 6, lambda: kernels.extend(self.handles[key].kernel(c, start) for c in channels))
        if end is not None:
            slow = self._slow_channel(call)
            ends = {c: end if c == slow or slow is None else start + int(0.6 * (end - start)) for c in channels}
            self._at(end + SEEN_LATE_NS, 5, lambda: [k.stop(ends[c]) for k, c in zip(kernels, channels, strict=True)])
        for sender, receiver in self.links.pairs(call):
            is_across = self.layout.node(sender) != self.layout.node(receiver) and rank in (sender, receiver)
            if is_across and len(call.start_ns) == len(call.members):
                self._proxy(call, sender, receiver, channels)

    def _enqueue(self, call: Collective, op: str, count: int) -> None:
        communicator, key = self.communicators[call.group], id(call)
        if op in _OPS:
            members = self.world.members(call.group, self.rank)
            peer = next(rank for rank in call.members if rank != self.rank)
            self.handles[key] = communicator.point_to_point(_OPS[op], peer=members.index(peer), count=count, channels=1)
        else:
            self.handles[key] = communicator.collective(op, count=count, channels=CHANNELS, seq=call.number)

    def _channels(self, call: Collective, op: str) -> list[int]:
        if op not in _OPS:
            return list(range(CHANNELS))
        peer = next(rank for rank in call.members if rank != self.rank)
        return [(0 if op == "recv" else 1) + (0 if peer < self.rank else 2)]

    def _slow_channel(self, call: Collective) -> int | None:
        fault = self.links._fault
        if fault is None or not self.links.is_hit(call, "slow_link") or len(call.members) == 2:
            return None
        return fault.channel

    def _proxy(self, call: Collective, sender: int, receiver: int, channels: list[int]) -> None:
        """Operations of the proxy thread, from the last member's arrival to the end of the transfer."""
        is_send, begin = self.rank == sender, call.last_start_ns
        members = self.world.members(call.group, self.rank)
        peer = members.index(receiver if is_send else sender)
        end = call.end_ns.get(self.rank)
        is_bad = any(self.links.is_hit(call, kind) for kind in ("slow_link", "dead_link"))
        fault = self.links._fault
        at_fault = is_bad and fault is not None and (fault.rank, fault.peer) == (sender, receiver)
        size = call.ops[self.rank][1] * 4 // PROXY_STEPS
        for channel in channels:
            is_slow = at_fault and fault is not None and (channel == fault.channel or len(channels) == 1)
            self._proxy_op(call, channel, peer, begin, end, is_send=is_send, is_slow=is_slow, is_bad=is_bad, size=size)

    def _proxy_op(
        self,
        call: Collective,
        channel: int,
        peer: int,
        begin: int,
        end: int | None,
        *,
        is_send: bool,
        is_slow: bool,
        is_bad: bool,
        size: int,
    ) -> None:
        state: dict[str, Any] = {}
        key = id(call)

        def start() -> None:
            state["op"] = self.handles[key].proxy_op(channel=channel, peer=peer, steps=PROXY_STEPS, is_send=is_send)

        self._at(begin + SEEN_LATE_NS, 7, start)
        # In a call that never ends, healthy links do their first step and get no second one.
        each = (end - begin) // PROXY_STEPS if end is not None else 100_000
        fault = self.links._fault
        usual = int(each / (fault.factor if is_bad and fault else 1))
        # The sender of a slow link waits for its network; the others wait for credit meanwhile.
        network = int(0.9 * each) if is_slow else int(0.5 * usual)
        for number in range(PROXY_STEPS):
            at = begin + SEEN_LATE_NS + number * each
            self._at(at, 8, lambda number=number: state.update(step=state["op"].step(number)))
            first = SEND_GPU_WAIT if is_send else RECV_WAIT
            self._at(at, 9, lambda first=first: state["op"].step_state(state["step"], first, size))
            if end is None and (number or is_slow):
                return
            if is_send:
                self._at(at + 2_000, 9, lambda: state["op"].step_state(state["step"], SEND_PEER_WAIT, size))
                self._at(at + each - network, 9, lambda: state["op"].step_state(state["step"], SEND_WAIT, size))
            self._at(at + each, 4, lambda: state["op"].nccl.stop(state["step"]))
        if end is not None:
            self._at(end + SEEN_LATE_NS, 4, lambda: state["op"].stop())


def _leave(spans: list[Any]) -> None:
    spans.pop().__exit__(None, None, None)
