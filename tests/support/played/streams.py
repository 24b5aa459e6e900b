"""Hosts that run ahead, streams and collectives on a virtual clock.

    world = World([Machine(rank, program(rank)) for rank in range(8)], transfer_ns=links.transfer_ns)
    world.run()                                   # to the end, or until no rank can go on
    world.machines[3].kernels, world.calls        # what ran where and when, by the virtual clock

A host executes its operations in order and hands work to its device, without waiting for it until `LAUNCH_QUEUE`
launches are outstanding:

1. A kernel starts when its stream is free and the host has launched it. A call of a communicator runs on a separate
   stream, after the work that was on the compute stream when the host made it.
2. The kernel of a call starts independently on each member and spins until all members' kernels have started; then the
   transfer begins, and all leave together. Members with another operation or size never leave.
3. `Await` blocks the compute stream until a call is over (exposed communication). `Sync` blocks the host until the
   compute stream has reached the mark made `lag` marks ago.
4. Work that never ends has the end None, and so has all work queued behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

__all__ = [
    "Await", "AwaitEnd", "Begin", "Call", "Collective", "EndStep", "Host", "Kernel", "Launch", "Machine", "Mark", "Op",
    "Span", "SpanEnd", "Sync", "World",
]  # fmt: skip

COMPUTE = ""
"""Name of the compute stream; others are named by the group whose calls they run."""


@dataclass(slots=True, kw_only=True)
class Begin:
    """A training step begins."""

    step: int


@dataclass(slots=True)
class EndStep:
    """The step ends on the host."""


@dataclass(slots=True, kw_only=True)
class Span:
    """A span begins on the host."""

    kind: str
    microbatch: int = -1
    stage: int = -1


@dataclass(slots=True)
class SpanEnd:
    """The innermost span ends."""


@dataclass(slots=True, kw_only=True)
class Host:
    """Work of the host; None: never ends."""

    ns: int | None


@dataclass(slots=True, kw_only=True)
class Launch:
    """The host launches a kernel on the compute stream; None: never ends."""

    ns: int | None


@dataclass(slots=True, kw_only=True)
class Call:
    """The host makes a call of a group; `handle` names it for `Await`."""

    group: str
    op: str
    count: int
    handle: str
    peer: int | None = None
    """Global rank at the other end, of send and recv."""


@dataclass(slots=True, kw_only=True)
class Await:
    """The compute stream waits for a call; the host goes on."""

    handle: str


@dataclass(slots=True)
class Mark:
    """Mark the current place of the compute stream."""


@dataclass(slots=True, kw_only=True)
class Sync:
    """The host waits until the compute stream has passed a mark: the newest (0), or an earlier one."""

    lag: int


@dataclass(slots=True)
class AwaitEnd:
    """Entry of a machine's log: the compute stream has been made to wait."""


Op = Begin | EndStep | Span | SpanEnd | Host | Launch | Call | Await | AwaitEnd | Mark | Sync


@dataclass(slots=True, kw_only=True)
class Kernel:
    """Interval of a compute stream: a kernel, or a wait for a call."""

    step: int
    phase: str
    enqueue_ns: int
    start_ns: int
    end_ns: int | None
    waits_for: Collective | None = None


@dataclass(slots=True, kw_only=True)
class Collective:
    """One call of a group over its members."""

    group: str
    number: int
    members: tuple[int, ...]
    ops: dict[int, tuple[str, int]] = field(default_factory=dict)
    """By rank: operation and count, since they may differ."""
    enqueue_ns: dict[int, int] = field(default_factory=dict)
    start_ns: dict[int, int] = field(default_factory=dict)
    end_ns: dict[int, int] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    transfer_ns: int | None = None

    @property
    def last_start_ns(self) -> int:
        """Time at which the last member arrived."""
        return max(self.start_ns.values())


@dataclass(slots=True)
class _Event:
    """A point of a stream; its time is known once the stream has reached it."""

    ns: int | None = None


@dataclass(slots=True)
class _Item:
    """Work in a stream's queue."""

    enqueue_ns: int
    step: int
    phase: str
    duration_ns: int | None = 0
    event: _Event | None = None
    """Set when the stream reaches this item."""
    after: _Event | None = None
    """Event that the stream waits for."""
    call: Collective | None = None
    awaited: Collective | None = None
    begun: bool = False

    @property
    def is_launch(self) -> bool:
        """True for a kernel; waits of streams take no place in the driver's queue."""
        return self.duration_ns != 0 or self.call is not None


@dataclass(slots=True)
class _Stream:
    queue: deque[_Item] = field(default_factory=deque)
    free_ns: int = 0


LAUNCH_NS = 6_000
"""Host time of one launch."""
LAUNCH_QUEUE = 1_000
"""Launches that the driver queues; a further one blocks until the oldest has ended."""


class Machine:
    """One rank: its host, its program and its device."""

    def __init__(self, rank: int, program: Iterator[Op]) -> None:
        self.rank = rank
        self.host_ns = 0
        self.kernels: list[Kernel] = []
        self.log: list[tuple[int, Op]] = []
        """Recorded operations of the host, with their times."""
        self.reached: list[_Event] = []
        """Time at which the compute stream reached each entry of `log`, as a CUDA event recorded there would show."""
        self.step, self.phase = 0, ""
        self.marks: list[_Event] = []
        self.is_done = False
        self._program = program
        self._streams: dict[str, _Stream] = {COMPUTE: _Stream()}
        self._over: dict[str, tuple[_Event, Collective]] = {}
        self._blocked: _Event | None = None
        self._num_launched = 0
        self._stopped = False

    @property
    def is_idle(self) -> bool:
        """True if the program has ended and the device has no work."""
        return self.is_done and not any(stream.queue for stream in self._streams.values())

    def advance(self, world: World) -> bool:
        """Advance as far as possible; returns True if anything moved."""
        moved = False
        while self._one_operation(world) or self._one_item(world):
            moved = True
        return moved

    # The host.

    def _one_operation(self, world: World) -> bool:
        if self.is_done or self._stopped:
            return False
        if self._blocked is not None:
            if self._blocked.ns is None:
                return False
            self.host_ns = max(self.host_ns, self._blocked.ns)
            self._blocked = None
            return True
        if self._num_launched >= LAUNCH_QUEUE:
            return False
        op = next(self._program, None)
        if op is None:
            self.is_done = True
            return False
        if isinstance(op, (Begin, EndStep, Span, SpanEnd, Call, Await)):
            self._see(op)
        self._do(op, world)
        if isinstance(op, Await):
            self._see(AwaitEnd())
        return True

    def _see(self, op: Op) -> None:
        self.log.append((self.host_ns, op))
        self.reached.append(_Event())
        self._push(COMPUTE, event=self.reached[-1])

    def _do(self, op: Op, world: World) -> None:
        match op:
            case Begin(step=step):
                self.step = step
            case Span(kind=kind):
                self.phase = kind
            case SpanEnd():
                self.phase = ""
            case Host(ns=ns):
                self._stopped = ns is None
                self.host_ns += ns or 0
            case Launch(ns=ns):
                self.host_ns += LAUNCH_NS
                self._push(COMPUTE, duration_ns=ns)
            case Call():
                self._make(op, world)
            case Await(handle=handle):
                event, call = self._over.pop(handle)
                self._push(COMPUTE, after=event, awaited=call)
            case Mark():
                self.marks.append(_Event())
                self._push(COMPUTE, event=self.marks[-1])
            case Sync(lag=lag):
                if len(self.marks) > lag:
                    self._blocked = self.marks[-1 - lag]
            case EndStep() | AwaitEnd():
                pass

    def _push(
        self,
        stream: str,
        *,
        duration_ns: int | None = 0,
        event: _Event | None = None,
        after: _Event | None = None,
        call: Collective | None = None,
        awaited: Collective | None = None,
    ) -> None:
        item = _Item(self.host_ns, self.step, self.phase, duration_ns, event, after, call, awaited)
        self._num_launched += item.is_launch
        self._streams.setdefault(stream, _Stream()).queue.append(item)

    def _make(self, op: Call, world: World) -> None:
        ready, over = _Event(), _Event()
        self._push(COMPUTE, event=ready)
        call = world.call_of(self.rank, op)
        call.enqueue_ns[self.rank], call.steps[self.rank] = self.host_ns, self.step
        self.host_ns += LAUNCH_NS
        stream = op.group if op.peer is None else f"{op.group} {op.op} {op.peer}"
        self._push(stream, after=ready)
        self._push(stream, call=call, event=over)
        self._over[op.handle] = (over, call)

    # The device.

    def _one_item(self, world: World) -> bool:
        return any(self._take(name, stream, world) for name, stream in self._streams.items())

    def _take(self, name: str, stream: _Stream, world: World) -> bool:
        if not stream.queue:
            return False
        item = stream.queue[0]
        start = max(stream.free_ns, item.enqueue_ns)
        end: int | None = start
        if item.after is not None:
            end = None if item.after.ns is None else max(start, item.after.ns)
        elif item.call is not None:
            if not item.begun:
                item.begun = True
                item.call.start_ns[self.rank] = start
                world.settle(item.call)
                return True
            end = item.call.end_ns.get(self.rank)
        elif item.duration_ns is None:
            end = None
        else:
            end = start + item.duration_ns
        if name == COMPUTE and not item.begun and (item.duration_ns != 0 or item.awaited is not None):
            item.begun = True
            self.kernels.append(
                Kernel(
                    step=item.step, phase=item.phase, enqueue_ns=item.enqueue_ns, start_ns=start, end_ns=end,
                    waits_for=item.awaited,
                )
            )  # fmt: skip
        if end is None:
            return False
        if name == COMPUTE and item.begun and self.kernels[-1].end_ns is None:
            self.kernels[-1].end_ns = end
        stream.free_ns = end
        if item.event is not None:
            item.event.ns = end
        stream.queue.popleft()
        if item.is_launch:
            if self._num_launched >= LAUNCH_QUEUE:  # the host was blocked until this one ended
                self.host_ns = max(self.host_ns, end)
            self._num_launched -= 1
        return True


class World:
    """All ranks and their calls. `transfer_ns(call)` is the duration of a call; None: never ends."""

    def __init__(
        self,
        machines: Sequence[Machine],
        groups: dict[str, list[tuple[int, ...]]],
        transfer_ns: Callable[[Collective], int | None],
    ) -> None:
        self.machines = list(machines)
        self.groups = groups
        self.calls: list[Collective] = []
        self.stuck: tuple[int, int] | None = None
        """(rank, step) whose first call never ends on that rank, while the other members leave it."""
        self._transfer_ns = transfer_ns
        self._known: dict[tuple[object, ...], Collective] = {}
        self._numbers: dict[tuple[object, ...], int] = {}

    def run(self) -> None:
        """Advance all ranks until none can go on."""
        moved = True
        while moved:
            moved = False
            for machine in self.machines:
                moved |= machine.advance(self)

    @property
    def is_stuck(self) -> bool:
        """True if a rank has work that never ends."""
        return not all(machine.is_idle for machine in self.machines)

    def members(self, group: str, rank: int) -> tuple[int, ...]:
        """Members of the group of this name that the rank belongs to."""
        return next(members for members in self.groups[group] if rank in members)

    def call_of(self, rank: int, op: Call) -> Collective:
        """The collective that a rank's call belongs to: the n-th of its group, or of its pair and direction."""
        members = self.members(op.group, rank)
        key: tuple[object, ...] = (op.group, members)
        if op.peer is not None:
            pair = (rank, op.peer) if op.op == "send" else (op.peer, rank)
            key, members = (*key, *pair), tuple(sorted(pair))
        number = self._numbers.get((rank, op.op if op.peer is not None else "", *key), 0)
        self._numbers[rank, op.op if op.peer is not None else "", *key] = number + 1
        call = self._known.get((*key, number))
        if call is None:
            call = self._known[*key, number] = Collective(group=op.group, number=number, members=members)
            self.calls.append(call)
        call.ops[rank] = (op.op, op.count)
        return call

    def settle(self, call: Collective) -> None:
        """Set a call's end once all members' kernels have started."""
        if len(call.start_ns) < len(call.members):
            return
        if any(op in ("send", "recv") for op, _ in call.ops.values()):
            differs = len({count for _, count in call.ops.values()}) > 1
        else:
            differs = len(set(call.ops.values())) > 1
        call.transfer_ns = None if differs else self._transfer_ns(call)
        if call.transfer_ns is not None:
            call.end_ns = dict.fromkeys(call.members, call.last_start_ns + call.transfer_ns)
            if self.stuck is not None and call.steps.get(self.stuck[0]) == self.stuck[1]:
                call.end_ns.pop(self.stuck[0])
                self.stuck = None
