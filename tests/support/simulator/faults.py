"""Faults of a simulated run, and how they change what the ranks do.

    fault = Fault(kind="slow_compute", rank=3, step=40, factor=1.1)

A fault changes causes only: times of work, links, programs, numbers, processes. What is recorded follows from the
simulation. The kinds are those of the fault list (F1 to F48) that tapes of many ranks can show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .engine import Engine
from .layout import WORLD, Layout
from .program import Call, Job, Op, Recv, SpanBegin, SpanEnd
from .roles import Role, Stop

__all__ = ["CONTROL", "DEATHS", "FREEZES", "NUMERIC", "SLOW", "Fault", "condition", "roles_of", "stops_of"]

SLOW = (
    "slow_compute", "slow_forward", "slow_backward", "slow_node", "slow_data", "slow_link", "dead_link", "jitter",
    "rank0_busy", "uneven_stages", "uneven_sequences", "slow_optimizer", "core_taken", "slow_gap", "collections",
)  # fmt: skip
"""Time faults: some pieces of work or transfers take longer."""
DEATHS = ("kill", "segfault", "exception", "out_of_memory", "data_exhausted", "exit")
"""A process ends."""
FREEZES = ("stop", "gil", "hang", "slow_loader_hang", "checkpoint_hang")
"""A process stays alive and makes no progress."""
CONTROL = ("mismatch_op", "mismatch_size", "skip_collective", "order_inversion", "missing_recv", "data_finished")
"""A rank's program differs from its peers'."""
NUMERIC = (
    "nan_grad", "inf_activation", "overflow", "bad_batch", "lr_spike", "divergence", "bit_flip", "bit_flip_optimizer",
    "bit_flip_shard",
)  # fmt: skip
"""Numbers go wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. `factor` = how many times as long (or as far off); `until` = last step, 0 = to the end."""

    kind: str
    step: int = 1
    rank: int = 0
    other: int = -1
    until: int = 0
    factor: float = 1.0
    what: str = ""
    block: int = 0
    microbatch: int = 0
    parameter: str = ""
    asleep: bool = True
    """Of a slow gap: whether the rank sleeps or computes in it."""
    ending: str = "frozen"
    """How a run that stands still ends: frozen (nothing more is written), interrupted, timeout."""

    def is_on(self, step: int) -> bool:
        """Return True if a lasting fault acts in a step."""
        return step >= self.step and (not self.until or step <= self.until)


def adapted(job: Job, fault: Fault | None, layout: Layout) -> Job:
    """The job, changed by the fault."""
    if fault is None or fault.kind != "uneven_stages":
        return job
    work = [1.0] * layout.pp
    work[int(layout.coordinates()["pp"][fault.rank])] = fault.factor
    return replace(job, stage_work=tuple(work))


def condition(engine: Engine, fault: Fault | None, step: int, rng: np.random.Generator) -> None:
    """Set the speed of each rank in a step."""
    for values in engine.factor.values():
        values[:] = 1.0
    for values in (*engine.extra_s.values(), *engine.busy_s.values()):
        values[:] = 0.0
    engine.collections_s[:] = 0.0
    engine.links.slow[:] = 1.0
    engine.taken_ratio[:] = 0.0
    if fault is None or not fault.is_on(step):
        return
    rank, factor = fault.rank, fault.factor
    compute_s = (engine.job.forward_s + engine.job.backward_s) * engine.layout.microbatches
    match fault.kind:
        case "slow_compute":
            engine.factor["forward"][rank] = engine.factor["backward"][rank] = factor
        case "slow_forward" | "slow_backward" | "slow_optimizer":
            engine.factor[fault.kind.removeprefix("slow_")][rank] = factor
        case "core_taken":
            engine.taken_ratio[rank] = factor - 1.0
        case "slow_node":
            lanes = engine.layout.nodes() == engine.layout.nodes()[rank]
            engine.factor["forward"][lanes] = engine.factor["backward"][lanes] = factor
        case "slow_data":
            engine.extra_s["data"][rank] = (factor - 1.0) * compute_s
        case "slow_gap":
            (engine.extra_s if fault.asleep else engine.busy_s)[fault.what][rank] = (factor - 1.0) * compute_s
        case "collections":
            engine.collections_s[rank] = (factor - 1.0) * compute_s
        case "dead_link":
            engine.links.dead_rank = rank
        case "slow_link":
            engine.links.slow[rank] = factor
        case "jitter":
            if rng.random() < 0.05:
                engine.extra_s["backward"][rng.integers(engine.layout.num_ranks)] = rng.uniform(0.05, 0.4)
        case "rank0_busy":
            if step % 5 == 0:  # it formats and prints a line, and every now and then writes a sample to the disk
                engine.extra_s["optimizer"][0] = 0.012 if step % 25 else 0.15
        case "uneven_sequences":
            data = engine.layout.num_ranks // engine.layout.tp
            skew = np.exp(factor * rng.standard_normal(data)).repeat(engine.layout.tp)
            engine.factor["forward"][:] = engine.factor["backward"][:] = skew


def taints_of(fault: Fault | None, step: int, layout: Layout) -> tuple[list[tuple[int, str, bool]], bool]:
    """Tensors that become non-finite in a step, and whether in one element alone."""
    if fault is None or step != fault.step:
        return [], False
    match fault.kind:
        case "nan_grad":
            return [(fault.rank, f"grad{fault.block}", False)], True
        case "inf_activation":
            return [(fault.rank, f"act{fault.microbatch}.{fault.block}", False)], False
        case "overflow":
            members = next(group for group in layout.members(_data_dim(layout)) if fault.rank in group)
            return [(int(member), f"grad{fault.block}", True) for member in members], True
    return [], False


def stops_of(fault: Fault | None) -> list[Stop]:
    """Operation in which a rank stops forever."""
    if fault is None or fault.kind not in (*DEATHS, *FREEZES):
        return []
    phases = {"data_exhausted": "data", "slow_loader_hang": "data", "checkpoint_hang": "checkpoint"}
    what = phases.get(fault.kind) or fault.what or "backward"
    return [
        Stop(
            rank=fault.rank,
            step=fault.step,
            what=what,
            block=fault.block if what in ("forward", "backward") else -1,
            microbatch=fault.microbatch if what in ("forward", "backward") else -1,
            dies=fault.kind in DEATHS,
        )
    ]


def roles_of(programs: Sequence[list[Op]], layout: Layout, steps: list[int], fault: Fault | None) -> list[Role]:
    """The roles of some steps: one per stage, and one for a rank with a different program."""
    width = layout.width
    lanes = [np.arange(stage * width, (stage + 1) * width) for stage in range(layout.pp)]
    if fault is None or fault.kind not in CONTROL or fault.step not in steps:
        return [
            Role(stage_lanes, program * len(steps), steps) for stage_lanes, program in zip(lanes, programs, strict=True)
        ]
    roles = []
    for stage_lanes, program in zip(lanes, programs, strict=True):
        others = stage_lanes[stage_lanes != fault.rank]
        if len(others):
            roles.append(Role(others, program * len(steps), steps))
        if len(others) < len(stage_lanes):
            before = steps.index(fault.step)
            changed = _changed(program, fault, layout)
            if fault.kind == "data_finished":
                roles.append(Role(stage_lanes[stage_lanes == fault.rank], program * before, steps))
            else:
                ops = program * before + changed + program * (len(steps) - before - 1)
                roles.append(Role(stage_lanes[stage_lanes == fault.rank], ops, steps))
    return [role for role in roles if role.ops]


def _changed(program: list[Op], fault: Fault, layout: Layout) -> list[Op]:
    ops = list(program)
    index = target_of(program, fault, layout)
    op = ops[index]
    match fault.kind:
        case "mismatch_op" if isinstance(op, Call):
            other = "all_gather" if op.op != "all_gather" else "broadcast"
            ops[index] = replace(op, op=other, caller="train.py:88 log_metrics")
        case "mismatch_size" if isinstance(op, Call):
            ops[index] = replace(op, num_bytes=op.num_bytes // 2, shape=f"{int(op.shape.split('x')[0]) // 2 or 1}")
        case "skip_collective":
            del ops[index]
        case "missing_recv":
            begin = max(i for i in range(index) if isinstance(ops[i], SpanBegin))
            end = next(i for i in range(index, len(ops)) if isinstance(ops[i], SpanEnd))
            del ops[begin : end + 1]
        case "order_inversion":
            # The loss is summed over the world before the last gradients, not after.
            loss = next(i for i, o in enumerate(ops) if isinstance(o, Call) and o.tensor == "loss" and o.dim == WORLD)
            ops.insert(index, ops.pop(loss))
    return ops


def target_of(program: list[Op], fault: Fault, layout: Layout) -> int:
    """Index of the operation that the faulty rank changes."""
    if fault.kind == "missing_recv":
        return [i for i, op in enumerate(program) if isinstance(op, Recv)][-1]
    calls = [(i, op) for i, op in enumerate(program) if isinstance(op, Call)]
    if fault.kind == "order_inversion":
        dim = _data_dim(layout) if layout.width > layout.tp else "tp"
        return [i for i, op in calls if op.dim == dim and op.tensor.startswith(("grad", "dact"))][-1]
    if fault.what == "gradient" and layout.width > layout.tp:
        found = [i for i, op in calls if op.tensor == f"grad{fault.block}"]
        if found:
            return found[0]
    if fault.what == "tensor_parallel" and layout.tp > 1:
        return next(i for i, op in calls if op.dim == "tp")
    return next(i for i, op in calls if op.tensor == "loss" and op.dim == WORLD)


def _data_dim(layout: Layout) -> str:
    return "dp_replicate" if layout.dp_replicate > 1 else "dp_shard" if layout.dp_shard > 1 else "tp"
