"""Program of a rank in a training step: its operations, in order, for each layout.

    ops = step_program(layout, job, stage=0)

A program names the pieces of work, the collectives and the point-to-point calls with their sizes, and which tensors
each reads and writes, so that a NaN spreads as in a real run. `engine` computes the times.
The order of calls is that of torch: DDP reduces buckets from the last block to the first while backward goes on; FSDP2
gathers a block before it is used, once more for backward, and scatters its gradients after; tensor parallel sums twice
a block and direction; a pipeline follows GPipe or 1F1B.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from .layout import WORLD, Layout

__all__ = [
    "PARAMETERS",
    "Call",
    "Job",
    "Op",
    "Recv",
    "Send",
    "SpanBegin",
    "SpanEnd",
    "StepBegin",
    "StepEnd",
    "Wait",
    "Work",
    "step_program",
]

PARAMETERS = ("attention.query.weight", "attention.out.weight", "mlp.up.weight", "mlp.down.weight")
"""Parameters of one block, in the model's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Size of the training: seconds for one microbatch of one stage, bytes for one block."""

    forward_s: float = 0.040
    backward_s: float = 0.080
    optimizer_s: float = 0.008
    data_s: float = 0.002
    gap_s: float = 100e-6
    """Own work in each gap between phases."""
    batch_by_hand: bool = False
    """Batches are made after the optimizer, where an attached loop's step ends, and not in a `data` span."""
    block_bytes: int = 32 << 20
    activation_bytes: int = 8 << 20
    local_tokens: int = 16384
    memory_bytes: int = 40 << 30
    checkpoint_interval: int = 25
    checkpoint_s: float = 0.05
    evaluate_interval: int = 0
    evaluate_s: float = 0.3
    stage_work: tuple[float, ...] = ()
    """Relative work of each pipeline stage; empty: even."""
    link_bytes_per_s: float = 40e9
    """Between ranks of one node."""
    network_bytes_per_s: float = 20e9
    """Between nodes, per rank."""
    latency_s: float = 15e-6


@dataclass(slots=True)
class StepBegin:
    """Begin of a training step."""


@dataclass(slots=True)
class StepEnd:
    """End of a training step."""


@dataclass(slots=True)
class SpanBegin:
    """Begin of a span of a kind."""

    kind: str
    microbatch: int = -1
    stage: int = -1


@dataclass(slots=True)
class SpanEnd:
    """End of the innermost span."""


@dataclass(slots=True)
class Work:
    """The rank's own work: `what` is a phase, or a gap between phases."""

    what: str
    seconds: float
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    microbatch: int = -1
    block: int = -1


@dataclass(slots=True)
class Call:
    """A collective on the group along `dim`. With a `handle` the caller goes on, and waits for it later."""

    dim: str
    op: str
    tensor: str
    num_bytes: int
    shape: str
    caller: str
    handle: str = ""
    dtype: str = "float32"


@dataclass(slots=True)
class Wait:
    """Wait for handles."""

    handles: tuple[str, ...]


@dataclass(slots=True)
class Send:
    """Send to the stage `distance` further; the caller goes on."""

    distance: int
    tensor: str
    num_bytes: int
    shape: str


@dataclass(slots=True)
class Recv:
    """Receive from the stage `distance` away (-1: the one before); blocks."""

    distance: int
    tensor: str
    num_bytes: int
    shape: str


Op = StepBegin | StepEnd | SpanBegin | SpanEnd | Work | Call | Wait | Send | Recv
SENDS = "sends"
"""Handle under which a step's sends are waited for at the end of its pipeline."""

_FORWARD = "trainer/training/rank_training.py:118 forward_backward"
_BACKWARD = "trainer/training/rank_training.py:121 forward_backward"
_PIPELINE = "trainer/parallel/pipeline.py:104 _call"
_LOSS = "trainer/rank/loop.py:121 _agree"
_NORM = "trainer/training/clipping.py:71 gradient_norm"
_SAVE = "trainer/checkpoint/agreement.py:31 all_agree"


@dataclass(slots=True)
class _Builder:
    layout: Layout
    job: Job
    stage: int
    ops: list[Op] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Relative work of this stage."""
        return self.job.stage_work[self.stage] if self.job.stage_work else 1.0

    def span(self, kind: str, body: Callable[[], None], microbatch: int = -1) -> None:
        self.ops.append(SpanBegin(kind, microbatch, self.stage if self.layout.pp > 1 else -1))
        body()
        self.ops.append(SpanEnd())

    def gap(self, name: str, seconds: float = 0.0) -> None:
        """Add the rank's own work between two phases."""
        self.ops.append(Work(name, self.job.gap_s + seconds))

    def step(self, *, checkpoint: bool, evaluate: bool) -> list[Op]:
        self.ops.append(StepBegin())
        if not self.job.batch_by_hand:
            self.span("data", lambda: self.ops.append(Work("data", self.job.data_s, (), ("batch",))))
        self.gap("before_forward")
        if self.layout.pp > 1:
            self.pipeline()
        else:
            for number in range(self.layout.microbatches):
                last = number == self.layout.microbatches - 1
                self.span("forward", partial(self.forward, number), number)
                if last:
                    self.gap("forward_to_backward")
                self.span("backward", partial(self.backward, number, reduce=last), number)
        self.gap("backward_to_optimizer")
        if self.layout.num_ranks > 1:
            self.span("optimizer", self.agree)
            self.span("optimizer", self.clip)
        self.span("optimizer", self.update)
        self.gap("after_optimizer", self.job.data_s if self.job.batch_by_hand else 0.0)
        if checkpoint:
            self.span("checkpoint", self.save)
        if evaluate:
            self.span("evaluate", lambda: self.ops.append(Work("evaluate", self.job.evaluate_s)))
        self.ops.append(StepEnd())
        return self.ops

    # One microbatch.

    def forward(self, number: int) -> None:
        job, layout = self.job, self.layout
        seconds = job.forward_s * self.share / layout.layers
        if layout.dp_shard > 1:
            self.gather(0, _FORWARD)
        for block in range(layout.layers):
            if layout.dp_shard > 1:
                self.ops.append(Wait((f"gather{block}",)))
                if block + 1 < layout.layers:
                    self.gather(block + 1, _FORWARD)
            before = f"act{number}.{block - 1}" if block or self.stage else "batch"
            self.compute(
                "forward", seconds, number, block, (before, f"weight{block}"), f"act{number}.{block}", _FORWARD
            )
        if self.stage == layout.pp - 1:
            self.head(number, 0.05 * seconds)

    def head(self, number: int, seconds: float) -> None:
        """The loss of a microbatch, on the last stage."""
        last, losses = f"act{number}.{self.layout.layers - 1}", ("loss", "local_loss", f"loss{number}")
        self.ops.append(Work("forward", seconds, (last,), losses, number, self.layout.layers))

    def backward(self, number: int, *, reduce: bool) -> None:
        job, layout = self.job, self.layout
        seconds = job.backward_s * self.share / layout.layers
        handles = []
        top = layout.layers - 1
        again = layout.dp_shard > 1 and layout.pp == 1  # a pipeline keeps parameters gathered between microbatches
        for block in range(top, -1, -1):
            if again and block != top:
                self.ops.append(Wait((f"gather{block}",)))
            if again and block > 0:
                self.gather(block - 1, _BACKWARD)
            above = f"dact{number}.{block + 1}"
            if block == top:
                above = f"loss{number}" if self.stage == layout.pp - 1 else f"dact{number}.in"
            reads = (above, f"act{number}.{block}", f"weight{block}")
            self.compute("backward", seconds, number, block, reads, f"dact{number}.{block}", _BACKWARD)
            self.ops.append(Work("backward", 0.0, (f"dact{number}.{block}",), (f"grad{block}",), number, block))
            if reduce:
                handles += self.reduce(block)
        if handles:
            self.ops.append(Wait(tuple(handles)))

    def compute(
        self, what: str, seconds: float, number: int, block: int, reads: tuple[str, ...], writes: str, caller: str
    ) -> None:
        """A block's attention and feed-forward, each followed by a sum over the tensor-parallel ranks."""
        if self.layout.tp == 1:
            self.ops.append(Work(what, seconds, reads, (writes,), number, block))
            return
        size, shape = self.job.activation_bytes, f"4x2048x{self.job.activation_bytes // (4 * 2048 * 2)}"
        half = f"{writes}.half"
        self.ops.append(Work(what, seconds / 2, reads, (half,), number, block))
        self.ops.append(Call("tp", "all_reduce", half, size, shape, caller, "", "bfloat16"))
        self.ops.append(Work(what, seconds / 2, (half,), (writes,), number, block))
        self.ops.append(Call("tp", "all_reduce", writes, size, shape, caller, "", "bfloat16"))

    def gather(self, block: int, caller: str) -> None:
        size = self.job.block_bytes // self.layout.dp_shard // self.layout.tp
        tensor, handle = f"weight{block}", f"gather{block}"
        self.ops.append(Call("dp_shard", "all_gather", tensor, size, f"{size // 4}", caller, handle))

    def reduce(self, block: int) -> list[str]:
        layout, handles = self.layout, []
        size = self.job.block_bytes // layout.tp
        if layout.dp_shard > 1:
            scatter = Call("dp_shard", "reduce_scatter", f"grad{block}", size, f"{size // 4}", _BACKWARD, f"rs{block}")
            self.ops.append(scatter)
            handles.append(f"rs{block}")
            size //= layout.dp_shard
        if layout.dp_replicate > 1:
            if handles:
                self.ops.append(Wait((f"rs{block}",)))
            whole = Call("dp_replicate", "all_reduce", f"grad{block}", size, f"{size // 4}", _BACKWARD, f"ar{block}")
            self.ops.append(whole)
            handles.append(f"ar{block}")
        return handles

    # The pipeline.

    def pipeline(self) -> None:
        count, stages = self.layout.microbatches, self.layout.pp
        if self.layout.dp_shard > 1:  # gathered once a step
            for block in range(self.layout.layers):
                self.gather(block, _PIPELINE)
            self.ops.append(Wait(tuple(f"gather{block}" for block in range(self.layout.layers))))
        first = count if self.layout.schedule == "gpipe" else min(count, stages - self.stage)
        forwards = list(range(first))
        for number in forwards:
            self.forward_chunk(number)
        self.ops.append(Work("forward_to_backward", 0.0))
        for number in range(count):
            self.backward_chunk(number, last=number == count - 1)
            if first + number < count:
                self.forward_chunk(first + number)
        self.ops.append(Wait((SENDS,)))

    def forward_chunk(self, number: int) -> None:
        size, shape = self.job.activation_bytes, f"4x2048x{self.job.activation_bytes // (4 * 2048 * 2)}"
        if self.stage:
            self.span("recv", lambda: self.ops.append(Recv(-1, f"act{number}.-1", size, shape)), number)
        self.span("forward", lambda: self.forward_pipelined(number), number)
        if self.stage < self.layout.pp - 1:
            tensor = f"act{number}.{self.layout.layers - 1}"
            self.span("send", lambda: self.ops.append(Send(1, tensor, size, shape)), number)

    def forward_pipelined(self, number: int) -> None:
        seconds = self.job.forward_s * self.share / self.layout.layers
        for block in range(self.layout.layers):
            before = f"act{number}.{block - 1}" if block or self.stage else "batch"
            self.compute(
                "forward", seconds, number, block, (before, f"weight{block}"), f"act{number}.{block}", _PIPELINE
            )
        if self.stage == self.layout.pp - 1:
            self.head(number, 0.0)

    def backward_chunk(self, number: int, *, last: bool) -> None:
        size, shape = self.job.activation_bytes, f"4x2048x{self.job.activation_bytes // (4 * 2048 * 2)}"
        if self.stage < self.layout.pp - 1:
            self.span("recv", lambda: self.ops.append(Recv(1, f"dact{number}.in", size, shape)), number)
        self.span("backward", lambda: self.backward(number, reduce=last), number)
        if self.stage:
            self.span("send", lambda: self.ops.append(Send(-1, f"dact{number}.0", size, shape)), number)

    # The end of a step.

    def agree(self) -> None:
        self.ops.append(Call(WORLD, "all_reduce", "loss", 16, "2", _LOSS, "", "float64"))

    def clip(self) -> None:
        grads = tuple(f"grad{block}" for block in range(self.layout.layers))
        self.ops.append(Work("optimizer", 0.1 * self.job.optimizer_s, grads, ("norm",)))
        self.ops.append(Call(WORLD, "all_reduce", "norm", 8, "1", _NORM, "", "float64"))

    def update(self) -> None:
        self.ops.append(Work("optimizer", 0.9 * self.job.optimizer_s))

    def save(self) -> None:
        self.ops.append(Work("checkpoint", self.job.checkpoint_s))
        if self.layout.num_ranks > 1:
            self.ops.append(Call(WORLD, "all_reduce", "agreed", 8, "1", _SAVE, "", "int64"))


def step_program(layout: Layout, job: Job, stage: int, *, checkpoint: bool = False, evaluate: bool = False) -> list[Op]:
    """The operations of one step for the ranks of a stage."""
    return _Builder(layout, job, stage).step(checkpoint=checkpoint, evaluate=evaluate)
