"""Steps of DDP, FSDP2, tensor and pipeline parallel training, as operations of a host and its device.

    layout = LAYOUTS["fsdp2"]
    for op in training(layout, Job(), rank=3, steps=60, noise=noise): ...

The order of calls is torch's: DDP reduces buckets while backward goes on; FSDP2 gathers a layer ahead, once more for
backward, and scatters gradients after; tensor parallel sums twice a layer and direction; the pipeline runs 1F1B. The
host waits once a step until its device has finished the step before, or only while its launch queue is full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from tests.support.played.streams import Await, Begin, Call, EndStep, Host, Launch, Mark, Op, Span, SpanEnd, Sync

__all__ = ["LAYOUTS", "Job", "Layout", "training"]

WORLD = "world"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the mesh, in the order pp, dp_replicate, dp_shard, tp."""

    name: str
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    ranks_per_node: int = 4
    ranks_per_device: int = 1

    @property
    def num_ranks(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def sizes(self) -> dict[str, int]:
        return {"pp": self.pp, "dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a rank in the mesh."""
        found = {}
        for name in ("tp", "dp_shard", "dp_replicate", "pp"):
            found[name], rank = rank % self.sizes[name], rank // self.sizes[name]
        return found

    def groups(self) -> dict[str, list[tuple[int, ...]]]:
        """Members of the groups of each mesh dimension, and of the world."""
        coordinates = {rank: self.coordinates(rank) for rank in range(self.num_ranks)}
        found: dict[str, list[tuple[int, ...]]] = {WORLD: [tuple(range(self.num_ranks))]}
        for dim, size in self.sizes.items():
            if size > 1:
                by_others: dict[tuple[int, ...], list[int]] = {}
                for rank, at in coordinates.items():
                    by_others.setdefault(tuple(at[other] for other in self.sizes if other != dim), []).append(rank)
                found[dim] = [tuple(members) for members in by_others.values()]
        return found

    def node(self, rank: int) -> int:
        """Number of the rank's node."""
        return rank // self.ranks_per_node

    def device(self, rank: int) -> str:
        """UUID of the rank's device."""
        return f"GPU-{rank // self.ranks_per_device:08d}"

    def network_links(self) -> list[tuple[int, int]]:
        """(from, to) of the links between nodes that large transfers use: rings of groups, neighbours of a pipeline."""
        found = []
        for name, groups in self.groups().items():
            for members in groups:
                if name == "pp":
                    pairs = [*pairwise(members), *pairwise(members[::-1])]
                else:
                    pairs = list(zip(members, (*members[1:], members[0]), strict=True))
                large = name != WORLD or len(self.groups()) == 1
                found += [pair for pair in pairs if large and self.node(pair[0]) != self.node(pair[1])]
        return sorted(set(found))

    def neighbor(self, rank: int, distance: int) -> int:
        """The rank `distance` stages further."""
        return rank + distance * (self.num_ranks // self.pp)


LAYOUTS = {
    "ddp": Layout(name="ddp", dp_replicate=8),
    "fsdp2": Layout(name="fsdp2", dp_shard=8),
    "tp": Layout(name="tp", dp_replicate=2, tp=4),
    "pp": Layout(name="pp", pp=4, dp_replicate=2, ranks_per_node=2),
    "one_gpu": Layout(name="one_gpu", dp_replicate=3, ranks_per_node=3, ranks_per_device=3),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Size of the training; times of one rank and step, ns."""

    layers: int = 8
    forward_ns: int = 24_000_000
    backward_ns: int = 48_000_000
    optimizer_ns: int = 4_000_000
    data_ns: int = 1_000_000
    """Host time."""
    layer_count: int = 4 << 20
    """Elements of one layer's parameters."""
    activation_count: int = 2 << 20
    microbatches: int = 8
    reduces_by_hand: bool = False
    """The loop reduces gradients itself, between backward and optimizer, outside of any phase."""
    lag: int | None = 1
    """Steps by which the host is ahead when it waits for its device; None: it waits only for its launch queue."""
    host_ns: int = 40_000
    """Host time for one layer, less than the device's."""


@dataclass(slots=True)
class _Writer:
    """Makes the operations of one step of one rank."""

    layout: Layout
    job: Job
    rank: int
    scale: Callable[[str, int | None], int | None]
    """(kind of work, ns) -> ns of this rank in this step."""
    ops: list[Op] = field(default_factory=list)

    @property
    def stage(self) -> int:
        return self.layout.coordinates(self.rank)["pp"]

    def span(self, kind: str, body: Callable[[], None], microbatch: int = -1) -> None:
        self.ops.append(Span(kind=kind, microbatch=microbatch, stage=self.stage if self.layout.pp > 1 else -1))
        body()
        self.ops.append(SpanEnd())

    def host(self, ns: int) -> None:
        self.ops.append(Host(ns=self.scale("host", ns)))

    def kernel(self, what: str, ns: int) -> None:
        self.ops += [Host(ns=self.scale("host", self.job.host_ns)), Launch(ns=self.scale(what, ns))]

    def call(self, group: str, op: str, count: int, handle: str, peer: int | None = None) -> None:
        self.ops.append(Call(group=group, op=op, count=count, handle=handle, peer=peer))

    def wait(self, handle: str) -> None:
        self.ops.append(Await(handle=handle))

    def step(self, number: int) -> list[Op]:
        self.ops.append(Begin(step=number))
        self.span("data", lambda: self.ops.append(Host(ns=self.scale("data", self.job.data_ns))))
        if self.layout.pp > 1:
            self.pipeline()
        else:
            self.span("forward", lambda: self.forward(self.job.layers))
            by_hand = self.job.reduces_by_hand
            self.span("backward", lambda: self.backward(self.job.layers, reduce=not by_hand))
            if by_hand:
                self.reduce()
        self.span("optimizer", self.update)
        self.ops.append(EndStep())
        return self.ops

    def update(self) -> None:
        self.call(WORLD, "AllReduce", 2, "norm")
        self.wait("norm")
        self.kernel("optimizer", self.job.optimizer_ns)
        if self.job.lag is not None:
            self.ops += [Mark(), Sync(lag=self.job.lag)]

    def halves(self, what: str, ns: int) -> None:
        """A layer: attention and feed-forward, each summed over the tensor-parallel ranks."""
        for _ in range(2):
            self.kernel(what, ns // 2)
            if self.layout.tp > 1:
                self.call("tp", "AllReduce", self.job.activation_count, "tp")
                self.wait("tp")

    def forward(self, layers: int, share: int = 1) -> None:
        job, shards = self.job, self.layout.dp_shard
        if shards > 1:
            self.call("dp_shard", "AllGather", job.layer_count // shards, "gather0")
        for layer in range(layers):
            if shards > 1:
                self.wait(f"gather{layer}")
                if layer + 1 < layers:
                    self.call("dp_shard", "AllGather", job.layer_count // shards, f"gather{layer + 1}")
            self.halves("forward", job.forward_ns // job.layers // share)

    def backward(self, layers: int, share: int = 1, *, reduce: bool) -> None:
        job, shards, replicas = self.job, self.layout.dp_shard, self.layout.dp_replicate
        handles = []
        for layer in range(layers - 1, -1, -1):
            if shards > 1:
                if layer == layers - 1:
                    self.call("dp_shard", "AllGather", job.layer_count // shards, f"again{layer}")
                self.wait(f"again{layer}")
                if layer:
                    self.call("dp_shard", "AllGather", job.layer_count // shards, f"again{layer - 1}")
            self.halves("backward", job.backward_ns // job.layers // share)
            if shards > 1:
                self.call("dp_shard", "ReduceScatter", job.layer_count // shards, f"scatter{layer}")
                handles.append(f"scatter{layer}")
            if reduce and replicas > 1:
                self.call("dp_replicate", "AllReduce", job.layer_count // self.layout.tp, f"bucket{layer}")
                handles.append(f"bucket{layer}")
        for handle in handles:
            self.wait(handle)

    # 1F1B: warm up, then one backward for each forward.

    def pipeline(self) -> None:
        count = self.job.microbatches
        first = min(count, self.layout.pp - self.stage)
        for number in range(first):
            self.forward_of(number)
        for number in range(count):
            self.backward_of(number)
            if first + number < count:
                self.forward_of(first + number)
        if self.layout.dp_replicate > 1:
            self.span("backward", self.reduce)

    def reduce(self) -> None:
        layers = self.job.layers // self.layout.pp
        for layer in range(layers):
            self.call("dp_replicate", "AllReduce", self.job.layer_count, f"bucket{layer}")
        for layer in range(layers):
            self.wait(f"bucket{layer}")

    def forward_of(self, number: int) -> None:
        job, layers = self.job, self.job.layers // self.layout.pp
        if self.stage:
            self.message("recv", -1)
        self.span("forward", lambda: self.forward(layers, job.microbatches), number)
        if self.stage < self.layout.pp - 1:
            self.message("send", 1)

    def backward_of(self, number: int) -> None:
        job, layers = self.job, self.job.layers // self.layout.pp
        if self.stage < self.layout.pp - 1:
            self.message("recv", 1)
        self.span("backward", lambda: self.backward(layers, job.microbatches, reduce=False), number)
        if self.stage:
            self.message("send", -1)

    def message(self, op: str, distance: int) -> None:
        """A message to or from a neighbor, on a stream of its pair and direction, as torch has them."""
        peer = self.layout.neighbor(self.rank, distance)
        handle = f"{op}{distance}"
        self.ops.append(Call(group="pp", op=op, count=self.job.activation_count, handle=handle, peer=peer))
        if op == "recv":
            self.wait(handle)


def training(
    layout: Layout,
    job: Job,
    rank: int,
    steps: int,
    scale: Callable[[int, int, str, int | None], int | None],
    change: Callable[[int, int, list[Op]], list[Op]],
) -> Iterator[Op]:
    """All steps of a rank. `scale(rank, step, kind, ns)` gives work its time, `change` alters the step's operations."""
    for step in range(1, steps + 1):
        writer = _Writer(layout, job, rank, lambda what, ns, step=step: scale(rank, step, what, ns))  # type: ignore[misc]
        yield from change(rank, step, writer.step(step))
