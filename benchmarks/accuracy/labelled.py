"""Labelled runs: the fault in each, and the findings expected from a diagnosis.

    scenario, ranks = make(Case(fault="hang", seed=0, index=3))
    EXPECTED["hang"].causes

The labels are derived from the list of faults (F1 to F48) and not from the analyzers' output; only the names of kinds
and causes come from the analyzers.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from probes.step_clock import GAPS
from tests.support.simulator import OVERSUBSCRIBED, QUIET, SHARED_HOST, Clock, Fault, Job, Layout, Scenario

__all__ = ["EXPECTED", "Case", "Expected", "make"]

RANKS = (*[8] * 40, *[16] * 30, *[32] * 20, *[64] * 7, 128, 256, 1024)
ANY, ONE, MEMBERS, SIDE, NO_RANK = "any", "one", "members", "side", "no rank"
"""The ranks that a finding must name. ANY: any. ONE: exactly the faulty rank. MEMBERS: none outside the pair, group or
node. SIDE: the faulty rank, or both of two ranks that contradict each other without a majority. NO_RANK: none, or all.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Expected findings of a fault. `also`: kinds that may follow from it and are not counted."""

    ids: str
    kinds: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    ranks: str = ONE
    also: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ("ddp", "fsdp", "fsdp_tp", "hsdp", "pp", "pp_fsdp")
    steps: bool = False
    """Whether the steps to detection are measured."""
    places: tuple[str, ...] = ()
    """Phases or gaps, one of which the finding must name."""
    insufficient: str = ""
    """Kind that must be reported as `insufficient_data`."""

    @property
    def is_clean(self) -> bool:
        return not self.kinds


_DATA_PARALLEL = ("ddp", "fsdp", "fsdp_tp", "hsdp")
_WIDE = ("ddp", "fsdp", "hsdp")  # the ranks of one node are a minority of the ranks with the same work
_COMPUTE = ("compute", "forward", "backward")
_HANG = {"kinds": ("hang",)}
_LOST = {"kinds": ("rank_lost",)}
_SLOW = {"kinds": ("straggler",), "steps": True}
_SPIKE = {"kinds": ("spike", "loss_spike"), "ranks": ANY, "steps": True}

EXPECTED: dict[str, Expected] = {
    # Processes that end.
    "kill": Expected(ids="F1", causes=("signal", "killed"), **_LOST),
    "segfault": Expected(ids="F3", causes=("signal", "killed"), **_LOST),
    "exception": Expected(ids="F4", causes=("exception",), **_LOST),
    "out_of_memory": Expected(ids="F44", causes=("out_of_memory", "oom", "exception"), also=("memory", "oom"), **_LOST),
    "data_exhausted": Expected(ids="F13", causes=("data", "data_exhausted", "exception"), **_LOST),
    # Processes that hang.
    "stop": Expected(ids="F2", causes=("stopped",), **_HANG),
    "gil": Expected(ids="F5", causes=("not_entered", "p2p_unmatched", "gil"), **_HANG),
    "hang": Expected(ids="F10", causes=("not_entered", "p2p_unmatched"), **_HANG),
    "slow_loader_hang": Expected(ids="F17", causes=("data", "not_entered", "p2p_unmatched"), **_HANG),
    "checkpoint_hang": Expected(ids="F36", causes=("checkpoint",), **_HANG),
    "data_finished": Expected(
        ids="F13", causes=("finished", "not_entered", "data", "exited"), also=("rank_lost",), **_HANG
    ),
    "dead_link": Expected(ids="F18", causes=("all_entered", "network", "p2p_unmatched"), ranks=MEMBERS, **_HANG),
    # Programs that differ.
    "mismatch_op": Expected(ids="F8", causes=("mismatch_op", "mismatch_operation"), ranks=SIDE, **_HANG),
    "mismatch_size": Expected(ids="F9", causes=("mismatch_size", "mismatch_shape"), ranks=SIDE, **_HANG),
    "skip_collective": Expected(
        ids="F10", ranks=SIDE, **_HANG,
        causes=("not_entered", "skipped", "mismatch_op", "mismatch_operation", "mismatch_size", "order_inversion"),
    ),
    "order_inversion": Expected(
        ids="F11", causes=("order_inversion",), ranks=MEMBERS, layouts=("ddp", "fsdp"), **_HANG
    ),
    "missing_recv": Expected(ids="F12", causes=("p2p_unmatched",), ranks=MEMBERS, layouts=("pp", "pp_fsdp"), **_HANG),
    # Slow ranks.
    "slow_compute_2": Expected(ids="F15", causes=_COMPUTE, **_SLOW),
    "slow_compute_5": Expected(ids="F15", causes=_COMPUTE, **_SLOW),
    "slow_compute_10": Expected(ids="F15", causes=_COMPUTE, **_SLOW),
    "slow_compute_50": Expected(ids="F15", causes=_COMPUTE, **_SLOW),
    "slow_forward": Expected(ids="F15", causes=("compute", "forward"), **_SLOW),
    "slow_backward": Expected(ids="F15", causes=("compute", "backward"), **_SLOW),
    "slow_node": Expected(ids="F15", causes=("node", "host", *_COMPUTE), ranks=MEMBERS, layouts=_WIDE, **_SLOW),
    "core_taken": Expected(ids="F15", causes=("host",), **_SLOW),
    "slow_data": Expected(ids="F16", causes=("data",), **_SLOW),
    # Slow ranks outside phases: in each gap, in garbage collection, in batches that the loop creates.
    **{f"slow_{gap}": Expected(ids="F15", causes=("compute", "host"), places=(gap,), **_SLOW) for gap in GAPS},
    "slow_hand_made_batch": Expected(ids="F16", causes=("compute", "host"), places=("after_optimizer",), **_SLOW),
    "collections": Expected(ids="F15", causes=("host",), places=("after_optimizer",), **_SLOW),
    "slow_link": Expected(ids="F18", causes=("communication", "network", "link"), ranks=MEMBERS, **_SLOW),
    "uneven_stages": Expected(
        ids="F21", kinds=("imbalance", "stage_imbalance"), causes=("imbalance", "stages"),
        ranks=MEMBERS, layouts=("pp", "pp_fsdp"),
    ),
    # Numbers.
    "nan_grad": Expected(ids="F22", kinds=("non_finite",), causes=("backward",)),
    "inf_activation": Expected(ids="F23", kinds=("non_finite",), causes=("forward",)),
    "overflow": Expected(ids="F24", kinds=("non_finite",), causes=("reduction",), ranks=NO_RANK),
    "bad_batch": Expected(ids="F25", causes=("batch", "data", "bad_batch"), **_SPIKE),
    "lr_spike": Expected(ids="F26", causes=("learning_rate", "lr", "configuration"), **_SPIKE),
    "divergence": Expected(
        ids="F27", kinds=("divergence", "slow_divergence"), ranks=ANY, steps=True,
        also=("spike", "loss_spike"),
    ),
    "bit_flip": Expected(
        ids="F28", kinds=("corruption", "replica_mismatch"), layouts=("ddp", "hsdp"),
    ),
    "bit_flip_optimizer": Expected(
        ids="F29", kinds=("corruption", "replica_mismatch"), layouts=("ddp", "hsdp"),
    ),
    "bit_flip_shard": Expected(
        ids="F28", kinds=("fingerprint_chain_broken",), layouts=("fsdp", "fsdp_tp", "pp_fsdp"),
    ),
    # No fault, or a fault that belongs to no rank. These runs also check replicas and shards.
    "clean": Expected(ids="-"),
    "clean_quiet": Expected(ids="-"),
    "clean_busy": Expected(ids="-"),
    "jitter": Expected(ids="F19"),
    "rank0_busy": Expected(ids="F20"),
    "uneven_sequences": Expected(ids="F21", layouts=_DATA_PARALLEL, also=("imbalance",)),
    "clock_skew": Expected(ids="F40"),
    "clock_step_back": Expected(ids="F40"),
    "missing_collectives": Expected(ids="7.", insufficient="exposed_communication"),
    "missing_spans": Expected(ids="7.", insufficient="records"),
    "missing_steps": Expected(ids="7.", insufficient="straggler"),
    "missing_ranks": Expected(ids="7.", insufficient="records"),
}  # fmt: skip
"""Expected findings by fault; `ids` are the numbers in the list of faults (7.: missing data)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run to simulate and judge."""

    fault: str
    seed: int
    index: int
    ranks: int = 0
    with_prefixes: bool = True
    device: str = "cpu"
    """`cuda`: the records that ranks on GPUs would write."""


def make(case: Case) -> tuple[Scenario, list[int]]:
    """The scenario of a case, and the ranks that a finding has to name."""
    expected = EXPECTED[case.fault]
    rng = np.random.default_rng([case.seed, zlib.crc32(case.fault.encode()), case.index])
    drawn = int(rng.choice(RANKS))  # always drawn, so that later draws do not depend on --ranks
    num_ranks = case.ranks or drawn
    layout = _layout(str(rng.choice(expected.layouts)), num_ranks, rng)
    quiet = bool(rng.random() < 0.75) or case.fault == "slow_compute_2"
    scale = 10 ** rng.uniform(-0.5, 0.4)
    job = Job(
        forward_s=0.04 * scale,
        backward_s=0.08 * scale,
        optimizer_s=0.008 * scale,
        data_s=0.002 * rng.uniform(0.5, 2.0),
        block_bytes=int(rng.choice([8, 32, 64])) << 20,
        evaluate_interval=int(rng.choice([0, 0, 30])),
    )
    scenario = Scenario(
        seed=int(rng.integers(2**31)), layout=layout, job=job, noise=QUIET if quiet else SHARED_HOST,
        backend="nccl" if quiet else "gloo", recovers=bool(rng.random() < 0.5),
        clock=Clock(skew_s=tuple(rng.normal(0.0, 0.005, 256))),
    )  # fmt: skip
    scenario, ranks = _with_fault(case.fault, scenario, rng)
    if case.device == "cuda":
        scenario = replace(scenario, on_devices=True, stamped=True, backend="nccl")
    return scenario, ranks


def _layout(kind: str, num_ranks: int, rng: np.random.Generator) -> Layout:
    per_node = 8 if num_ranks <= 256 else 64
    common: dict[str, Any] = {"layers": int(rng.choice([2, 4])), "ranks_per_node": per_node}
    tp = int(rng.choice([2, 4]))
    stages = int(rng.choice([2, 4])) if num_ranks <= 16 else 8
    match kind:
        case "ddp":
            return Layout(dp_replicate=num_ranks, **common)
        case "fsdp":
            return Layout(dp_shard=num_ranks, **common)
        case "fsdp_tp":
            return Layout(dp_shard=num_ranks // tp, tp=tp, **common)
        case "hsdp":
            return Layout(dp_replicate=4, dp_shard=num_ranks // 4, **common)
        case "pp":
            common["layers"] = 1
            schedule = str(rng.choice(["1f1b", "gpipe"]))
            data = {"dp_replicate": num_ranks // stages}
            return Layout(pp=stages, microbatches=2 * stages, schedule=schedule, **data, **common)
        case _:
            common["layers"] = 1
            data = {"dp_shard": num_ranks // stages}
            return Layout(pp=stages, microbatches=2 * stages, **data, **common)


def _with_fault(name: str, scenario: Scenario, rng: np.random.Generator) -> tuple[Scenario, list[int]]:
    layout = scenario.layout
    rank, step = int(rng.integers(layout.num_ranks)), int(rng.integers(22, 45))
    at = {
        "rank": rank,
        "step": step,
        "block": int(rng.integers(layout.layers)),
        "microbatch": int(rng.integers(layout.microbatches)),
        "ending": str(rng.choice(["frozen", "interrupted", "timeout"])),
    }
    what = str(rng.choice(["forward", "backward"]))
    long, short = replace(scenario, steps=step + 45), replace(scenario, steps=step + 5)
    everyone = list(range(layout.num_ranks))
    match name:
        case "clean" | "clean_quiet" | "clean_busy":
            noise = {"clean": scenario.noise, "clean_quiet": QUIET, "clean_busy": OVERSUBSCRIBED}[name]
            return replace(scenario, steps=int(rng.integers(60, 140)), noise=noise), []
        case "jitter" | "rank0_busy" | "uneven_sequences":
            factor = float(rng.uniform(0.03, 0.15))
            return replace(scenario, steps=90, fault=Fault(kind=name, step=6, factor=factor)), []
        case "clock_skew":
            nodes = int(layout.nodes().max()) + 1
            skew = tuple(float(x) for x in rng.choice([-600.0, 0.0, 600.0], nodes))
            return replace(scenario, steps=70, clock=Clock(skew_s=skew)), []
        case "clock_step_back":
            clock = Clock(step_back_s=float(rng.uniform(1, 600)), step_back_after_s=float(rng.uniform(4, 8)))
            return replace(scenario, steps=90, clock=clock), []
        case "missing_collectives" | "missing_spans" | "missing_steps":
            return replace(scenario, steps=60, missing_tables=(name.removeprefix("missing_"),)), []
        case "missing_ranks":
            gone = rng.choice(layout.num_ranks, max(1, layout.num_ranks // 8), replace=False)
            return replace(scenario, steps=60, missing_ranks=tuple(int(r) for r in gone)), []
        case "slow_compute_2" | "slow_compute_5" | "slow_compute_10" | "slow_compute_50":
            factor = 1.0 + int(name.rsplit("_", 1)[1]) / 100
            length = replace(scenario, steps=step + 210) if name == "slow_compute_2" else long
            return replace(length, fault=Fault(kind="slow_compute", rank=rank, step=step, factor=factor)), [rank]
        case "slow_forward" | "slow_backward" | "slow_data" | "core_taken":
            factor = float(rng.uniform(1.08, 1.5))
            return replace(long, fault=Fault(kind=name, rank=rank, step=step, factor=factor)), [rank]
        case "slow_hand_made_batch" | "collections":
            return _in_gap(scenario, rng, rank, step, kind="collections" if name == "collections" else "slow_gap",
                           gap="after_optimizer", by_hand=name == "slow_hand_made_batch")  # fmt: skip
        case _ if name.removeprefix("slow_") in GAPS:
            return _in_gap(scenario, rng, rank, step, kind="slow_gap", gap=name.removeprefix("slow_"))
        case "slow_node":
            nodes = layout.nodes()
            if int(nodes.max()) < 3:  # a slow node must be the exception among the nodes
                layout = replace(layout, ranks_per_node=layout.num_ranks // 4)
                long, nodes = replace(long, layout=layout), layout.nodes()
            slow = [int(r) for r in np.flatnonzero(nodes == nodes[rank])]
            return replace(
                long, fault=Fault(kind=name, rank=rank, step=step, factor=float(rng.uniform(1.1, 1.5)))
            ), slow
        case "slow_link":
            return replace(long, fault=Fault(kind=name, rank=rank, step=step, factor=float(rng.uniform(4, 12)))), [rank]
        case "uneven_stages":
            stage = layout.coordinates()["pp"]
            slow = [int(r) for r in np.flatnonzero(stage == stage[rank])]
            return replace(long, fault=Fault(kind=name, rank=rank, factor=float(rng.uniform(1.25, 1.6)))), slow
        case "order_inversion":
            return replace(short, fault=Fault(kind=name, **at)), everyone
        case "missing_recv":
            return replace(short, fault=Fault(kind=name, **at)), [rank, *_stage_peers(layout, rank)]
        case "dead_link":
            return replace(short, fault=Fault(kind=name, **at)), [rank]
        case "mismatch_op" | "mismatch_size" | "skip_collective":
            which = str(rng.choice(["gradient", "loss", "tensor_parallel"]))
            return replace(short, fault=Fault(kind=name, what=which, **at)), [rank]
        case "checkpoint_hang":
            at["step"] = scenario.job.checkpoint_interval
            return replace(short, steps=40, fault=Fault(kind=name, **at)), [rank]
        case "inf_activation" | "nan_grad" | "overflow":
            last = layout.coordinates()["pp"] == layout.pp - 1
            if name == "inf_activation":  # must be found where it is produced, also in a pipeline
                at["rank"] = rank = int(rng.choice(np.flatnonzero(last)))
            culprits = everyone if name == "overflow" else [rank]  # a wrong sum belongs to no rank
            return replace(long, steps=step + 8, fault=Fault(kind=name, **at)), culprits
        case "bad_batch":
            data = layout.width // layout.tp
            only = int(rng.integers(data)) if rng.random() < 0.3 and data <= 4 else -1
            share = 1.0 if only < 0 else 1.0 / data
            return replace(long, steps=step + 20, fault=Fault(kind=name, step=step, other=only, factor=share)), everyone
        case "lr_spike":
            return replace(long, steps=step + 20, fault=Fault(kind=name, step=step)), everyone
        case "divergence":
            factor = float(rng.uniform(0.003, 0.008))
            return replace(long, steps=step + 210, fault=Fault(kind=name, step=step, factor=factor)), everyone
        case "bit_flip" | "bit_flip_optimizer" | "bit_flip_shard":
            return replace(long, fault=Fault(kind=name, **at)), [rank]
        case "exception" | "kill" | "segfault" | "out_of_memory" | "stop" | "gil" | "hang":
            where = "forward" if name == "out_of_memory" else what
            return replace(short, fault=Fault(kind=name, what=where, **at)), [rank]
        case _:
            return replace(short, fault=Fault(kind=name, **at)), [rank]


def _in_gap(
    scenario: Scenario, rng: np.random.Generator, rank: int, step: int, *, kind: str, gap: str, by_hand: bool = False
) -> tuple[Scenario, list[int]]:
    """Scenario of a rank that is slow between phases, asleep or computing, from the start or later."""
    begin = 1 if rng.random() < 0.3 else step
    factor, asleep = float(rng.uniform(1.08, 1.5)), bool(rng.random() < 0.5)
    fault = Fault(kind=kind, what=gap, rank=rank, step=begin, factor=factor, asleep=asleep)
    job = replace(scenario.job, batch_by_hand=by_hand)
    return replace(scenario, steps=begin + 45, job=job, fault=fault, backend="gloo"), [rank]


def _stage_peers(layout: Layout, rank: int) -> list[int]:
    found = [rank - layout.width, rank + layout.width]
    return [r for r in found if 0 <= r < layout.num_ranks]
