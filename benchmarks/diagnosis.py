"""How often the analyzers are right: labelled faulty and clean simulated runs, through the store and `diagnose`.

    python -m benchmarks.diagnosis --quick                       # one run a fault, under a minute
    python -m benchmarks.diagnosis --faulty 500 --clean 500 --json diagnosis.json
    python -m benchmarks.diagnosis --fault slow_compute_5 --runs 20 --ranks 64 --seed 7 --verbose

Each run is simulated (`benchmarks.simulator`), written as tapes, ingested into a store and diagnosed as any run on
disk is. `EXPECTED` says, for each fault, what the findings have to say; it was written from the list of faults.

| column | meaning |
|---|---|
| seen | runs in which anything was fired |
| kind, rank, cause | runs in which a fired finding has the expected kind; and names the rank; and gives the cause |
| wrong | fired findings that are not about the fault, or name another rank |
| steps | steps from onset to detection: median and 90th percentile of the shortest prefix of the run that shows it |

Intervals are Wilson's, 95 %. A fault whose analyzer is not there is listed as `not offered` and counts nowhere.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import shutil
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from analyzers.diagnose import diagnose
from analyzers.finding import Finding
from benchmarks.simulator import QUIET, SHARED_HOST, Clock, Fault, Job, Layout, Scenario, simulate, write
from probes.store import Store

RANKS = (8, 8, 8, 8, 16, 16, 16, 32, 32, 64)
PREFIXES = (3, 5, 10, 15, 20, 40, 80, 120, 200)
"""Steps after the onset at which a run is looked at, to see from when on it is diagnosed."""
ANY, ONE, MEMBERS, SIDE = "any", "one", "members", "side"
"""Whom a finding has to name: anybody; exactly the rank; nobody outside a pair, group or node; the rank, or both sides
where two ranks contradict each other and neither has a majority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What is to be said of a fault. `also`: kinds that are true as well (fallout), and count neither way."""

    ids: str
    module: str
    kinds: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    ranks: str = ONE
    also: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ("ddp", "fsdp", "fsdp_tp", "hsdp", "pp", "pp_fsdp")
    steps: bool = False

    @property
    def is_clean(self) -> bool:
        return not self.kinds


_DATA_PARALLEL = ("ddp", "fsdp", "fsdp_tp", "hsdp")
_WIDE = ("ddp", "fsdp", "hsdp")  # where a node of several is a minority among the ranks with the same work
_COMPUTE = ("compute", "forward", "backward")
_HANG = {"module": "hang", "kinds": ("hang",)}
_LOST = {"module": "rank_lost", "kinds": ("rank_lost",)}
_SLOW = {"module": "straggler", "kinds": ("straggler",), "steps": True}
_SPIKE = {"module": "loss_spike", "kinds": ("spike", "loss_spike"), "ranks": ANY, "steps": True}

EXPECTED: dict[str, Expected] = {
    # Processes that end.
    "kill": Expected(ids="F1", causes=("signal", "killed"), **_LOST),
    "segfault": Expected(ids="F3", causes=("signal", "killed"), **_LOST),
    "exception": Expected(ids="F4", causes=("exception",), **_LOST),
    "out_of_memory": Expected(ids="F44", causes=("out_of_memory", "oom", "exception"), also=("memory", "oom"), **_LOST),
    "data_exhausted": Expected(ids="F13", causes=("data", "data_exhausted", "exception"), **_LOST),
    # Processes that stand still.
    "stop": Expected(ids="F2", causes=("stopped",), **_HANG),
    "gil": Expected(ids="F5", causes=("not_entered", "p2p_unmatched", "gil"), **_HANG),
    "hang": Expected(ids="F10", causes=("not_entered", "p2p_unmatched"), **_HANG),
    "slow_loader_hang": Expected(ids="F17", causes=("data", "not_entered", "p2p_unmatched"), **_HANG),
    "checkpoint_hang": Expected(ids="F36", causes=("checkpoint",), **_HANG),
    "data_finished": Expected(
        ids="F13", causes=("finished", "not_entered", "data", "exited"), also=("rank_lost",), **_HANG
    ),
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
    "slow_data": Expected(ids="F16", causes=("data",), **_SLOW),
    "slow_link": Expected(ids="F18", causes=("communication", "network", "link"), ranks=MEMBERS, **_SLOW),
    "uneven_stages": Expected(
        ids="F21", module="bubble", kinds=("imbalance", "stage_imbalance", "bubble"), causes=("imbalance", "stages"),
        ranks=MEMBERS, layouts=("pp", "pp_fsdp"),
    ),
    # Numbers.
    "nan_grad": Expected(ids="F22", module="nonfinite", kinds=("non_finite",), causes=("backward",)),
    "inf_activation": Expected(ids="F23", module="nonfinite", kinds=("non_finite",), causes=("forward",)),
    "overflow": Expected(ids="F24", module="nonfinite", kinds=("non_finite",), causes=("reduction",), ranks=ANY),
    "bad_batch": Expected(ids="F25", causes=("batch", "data", "bad_batch"), **_SPIKE),
    "lr_spike": Expected(ids="F26", causes=("learning_rate", "lr", "configuration"), **_SPIKE),
    "divergence": Expected(
        ids="F27", module="divergence", kinds=("divergence", "slow_divergence"), ranks=ANY, steps=True,
        also=("spike", "loss_spike"),
    ),
    "bit_flip": Expected(
        ids="F28", module="corruption", kinds=("corruption", "replica_mismatch"), layouts=("ddp", "hsdp"),
    ),
    "bit_flip_optimizer": Expected(
        ids="F29", module="corruption", kinds=("corruption", "replica_mismatch"), layouts=("ddp", "hsdp"),
    ),
    # Nothing is wrong, or nothing that is a rank's fault.
    "clean": Expected(ids="-", module=""),
    "clean_quiet": Expected(ids="-", module=""),
    "jitter": Expected(ids="F19", module=""),
    "rank0_busy": Expected(ids="F20", module=""),
    "uneven_sequences": Expected(ids="F21", module="", layouts=_DATA_PARALLEL, also=("imbalance",)),
    "clock_skew": Expected(ids="F40", module=""),
    "clock_step_back": Expected(ids="F40", module=""),
    "missing_collectives": Expected(ids="7.", module=""),
    "missing_spans": Expected(ids="7.", module=""),
    "missing_steps": Expected(ids="7.", module=""),
    "missing_ranks": Expected(ids="7.", module=""),
}  # fmt: skip
"""By fault; `ids` are those of the list of faults (7.: what issue 5 says of missing data)."""

ALARMS = frozenset(kind for expected in EXPECTED.values() for kind in expected.kinds)
"""Kinds of findings that say that something went wrong: fired on a clean run they are false alarms. Other analyzers
(bubble, communication, goodput, ...) may say what they measured; those are counted by kind, not as alarms."""
_MEASURES = ("bubble",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run to be made and judged."""

    fault: str
    seed: int
    index: int
    ranks: int = 0
    with_prefixes: bool = True


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of a case."""

    fault: str
    seed: int
    index: int
    layout: str
    num_ranks: int
    truth_ranks: list[int]
    onset: int
    seen: bool = False
    kind: bool = False
    rank: bool = False
    cause: bool = False
    wrong: int = 0
    wrong_kinds: list[str] = field(default_factory=list)
    right: int = 0
    insufficient: bool = False
    steps: int | None = None
    seconds: float = 0.0
    diagnose_s: float = 0.0
    findings: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""


def make(case: Case) -> tuple[Scenario, list[int]]:
    """The scenario of a case, and the ranks that a finding has to name."""
    expected = EXPECTED[case.fault]
    rng = np.random.default_rng([case.seed, zlib.crc32(case.fault.encode()), case.index])
    drawn = int(rng.choice(RANKS))  # drawn in any case: the rest must not depend on --ranks
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
    return _with_fault(case.fault, scenario, rng)


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
        case "clean" | "clean_quiet":
            noise = QUIET if name == "clean_quiet" else scenario.noise
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
        case "slow_forward" | "slow_backward" | "slow_data":
            factor = float(rng.uniform(1.08, 1.5))
            return replace(long, fault=Fault(kind=name, rank=rank, step=step, factor=factor)), [rank]
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
            return replace(short, fault=Fault(kind=name, **at)), [rank, *_neighbours(layout, rank)]
        case "mismatch_op" | "mismatch_size" | "skip_collective":
            which = str(rng.choice(["gradient", "loss", "tensor_parallel"]))
            return replace(short, fault=Fault(kind=name, what=which, **at)), [rank]
        case "checkpoint_hang":
            at["step"] = scenario.job.checkpoint_interval
            return replace(short, steps=40, fault=Fault(kind=name, **at)), [rank]
        case "inf_activation" | "nan_grad" | "overflow":
            last = layout.coordinates()["pp"] == layout.pp - 1
            if name == "inf_activation":  # where it is made is where it must be named, also in a pipeline
                at["rank"] = rank = int(rng.choice(np.flatnonzero(last)))
            return replace(long, steps=step + 8, fault=Fault(kind=name, **at)), [rank]
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
        case "bit_flip" | "bit_flip_optimizer":
            return replace(long, fault=Fault(kind=name, **at)), [rank]
        case "exception" | "kill" | "segfault" | "out_of_memory" | "stop" | "gil" | "hang":
            where = "forward" if name == "out_of_memory" else what
            return replace(short, fault=Fault(kind=name, what=where, **at)), [rank]
        case _:
            return replace(short, fault=Fault(kind=name, **at)), [rank]


def _neighbours(layout: Layout, rank: int) -> list[int]:
    found = [rank - layout.width, rank + layout.width]
    return [r for r in found if 0 <= r < layout.num_ranks]


def judge(case: Case) -> Outcome:
    """Simulate, write, ingest, diagnose and compare."""
    warnings.simplefilter("ignore", RuntimeWarning)
    start = time.perf_counter()
    expected = EXPECTED[case.fault]
    scenario, truth = make(case)
    onset = scenario.fault.step if scenario.fault else 0
    outcome = Outcome(
        fault=case.fault, seed=case.seed, index=case.index, layout=scenario.layout.name,
        num_ranks=scenario.layout.num_ranks, truth_ranks=truth, onset=onset,
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="diagnosis-"))
    try:
        recording = simulate(scenario)
        run = write(recording, folder / "whole")
        findings, outcome.diagnose_s = _diagnosed(run.path)
        _compare(outcome, expected, findings, truth, case.fault)
        if expected.steps and outcome.kind and outcome.rank and case.with_prefixes:
            outcome.steps = _steps_to_detection(recording, expected, truth, onset, folder)
    except Exception as error:  # a run that cannot be diagnosed is a result, too
        outcome.error = f"{type(error).__name__}: {error}"[:500]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    outcome.seconds = time.perf_counter() - start
    return outcome


def _diagnosed(path: Path) -> tuple[list[Finding], float]:
    from probes.rundir import RunDir

    run = RunDir.open(path)
    with Store.open(run) as store:
        start = time.perf_counter()
        findings = list(diagnose(store, run.manifest(), stacks_dir=run.stacks).findings)
        return findings, time.perf_counter() - start


def _compare(
    outcome: Outcome, expected: Expected, findings: Sequence[Finding], truth: Sequence[int], fault: str
) -> None:
    fired = [finding for finding in findings if finding.status == "fired"]
    outcome.findings = [
        {key: value for key, value in finding.to_json().items() if key in _KEPT} for finding in findings
        if finding.status in ("fired", "suspect") or finding.status == "insufficient_data"
    ]  # fmt: skip
    outcome.insufficient = any(finding.status == "insufficient_data" for finding in findings)
    alarms = [finding for finding in fired if finding.kind in ALARMS and finding.kind not in _MEASURES]
    outcome.seen = bool(alarms) or any(finding.kind in expected.kinds for finding in fired)
    of_kind = [finding for finding in fired if finding.kind in expected.kinds]
    named = [finding for finding in of_kind if _names(expected, finding, truth)]
    outcome.kind, outcome.rank = bool(of_kind), bool(named)
    outcome.cause = any(not expected.causes or finding.cause in expected.causes for finding in named)
    outcome.right = len(named)
    wrong = [f for f in alarms if f not in named and f.kind not in expected.also]
    outcome.wrong, outcome.wrong_kinds = len(wrong), [f"{f.kind}/{f.cause} {list(f.ranks)[:6]}" for f in wrong]
    del fault


_KEPT = ("analyzer", "kind", "severity", "status", "ranks", "first_step", "last_step", "cause", "summary")


def _names(expected: Expected, finding: Finding, truth: Sequence[int]) -> bool:
    found, true = set(finding.ranks), set(truth)
    match expected.ranks:
        case "one":
            return found == true
        case "members":  # a pair, a group or a node: nobody is named who has no part in it
            return bool(found & true) and (found <= true or true <= found)
        case "side":
            return found >= true and len(found) <= 2
        case _:
            return True


def _steps_to_detection(
    recording: Any, expected: Expected, truth: Sequence[int], onset: int, folder: Path
) -> int | None:
    """The shortest prefix of the run that is diagnosed, by bisection over `PREFIXES`."""
    last = recording.scenario.steps
    prefixes = [n for n in PREFIXES if onset + n - 1 < last]

    def is_seen(number: int) -> bool:
        path = folder / f"prefix-{number}"
        write(recording, path, until_step=onset + prefixes[number] - 1)
        findings, _ = _diagnosed(path)
        return any(f.status == "fired" and f.kind in expected.kinds and _names(expected, f, truth) for f in findings)

    low, high = 0, len(prefixes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_seen(middle) else (middle + 1, high)
    return prefixes[low] if low < len(prefixes) else last - onset + 1


def offered(expected: Expected) -> bool:
    """Whether the analyzer that a fault needs is there."""
    if not expected.module:
        return True
    try:
        return hasattr(importlib.import_module(f"analyzers.{expected.module}"), "analyze")
    except ImportError:
        return False


def wilson(hits: int, total: int) -> tuple[float, float]:
    """95 % interval of a share."""
    if not total:
        return (0.0, 1.0)
    z, share = 1.96, hits / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return (max(0.0, middle - half), min(1.0, middle + half))


def summarize(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts by fault, and over all of them."""
    table: dict[str, dict[str, Any]] = {}
    for name, expected in EXPECTED.items():
        own = [outcome for outcome in outcomes if outcome.fault == name]
        if not own and offered(expected):
            continue
        steps = sorted(outcome.steps for outcome in own if outcome.steps is not None)
        row = {
            "ids": expected.ids, "offered": offered(expected), "clean": expected.is_clean, "runs": len(own),
            **{key: sum(getattr(o, key) for o in own) for key in ("seen", "kind", "rank", "cause", "wrong", "right")},
            "errors": sum(bool(o.error) for o in own), "insufficient": sum(o.insufficient for o in own),
            "steps_median": steps[len(steps) // 2] if steps else None,
            "steps_p90": steps[min(len(steps) - 1, int(0.9 * len(steps)))] if steps else None,
        }  # fmt: skip
        table[name] = row
    faulty = [o for o in outcomes if not EXPECTED[o.fault].is_clean and offered(EXPECTED[o.fault])]
    clean = [o for o in outcomes if EXPECTED[o.fault].is_clean]
    right, wrong = sum(o.right for o in faulty), sum(o.wrong for o in [*faulty, *clean])
    named, caused = sum(o.rank for o in faulty), sum(o.cause for o in faulty)
    alarmed = sum(bool(o.wrong) for o in clean)
    overall = {
        "faulty_runs": len(faulty),
        "clean_runs": len(clean),
        "recall": _share(sum(o.kind for o in faulty), len(faulty)),
        "right_rank": _share(named, len(faulty)),
        "right_cause_of_named": _share(caused, named),
        "precision": _share(right, right + wrong),
        "clean_runs_with_false_alarm": _share(alarmed, len(clean)),
        "not_offered": [name for name, row in table.items() if not row["offered"]],
        "errors": sum(bool(o.error) for o in outcomes),
    }
    return {"faults": table, "overall": overall}


def _share(hits: int, total: int) -> dict[str, Any]:
    low, high = wilson(hits, total)
    return {"hits": hits, "of": total, "share": hits / total if total else None, "low": low, "high": high}


def print_table(summary: dict[str, Any]) -> None:
    """The summary as people read it."""
    print(f"{'fault':20} {'id':4} {'runs':>4} {'seen':>5} {'kind':>5} {'rank':>5} {'cause':>5} {'wrong':>5}  "
          f"{'recall (95 %)':17} steps p50/p90")  # fmt: skip
    for name, row in summary["faults"].items():
        head = f"{name:20} {row['ids']:4} {row['runs']:4}"
        if not row["offered"]:
            print(f"{head}  not offered")
            continue
        tail = f"  {row['errors']} errors" if row["errors"] else ""
        if row["clean"]:
            told = f"  {row['insufficient']} say what is missing" if name.startswith("missing") else ""
            print(f"{head} {row['seen']:5} {'':17} {row['wrong']:5}{told}{tail}")
            continue
        low, high = wilson(row["kind"], row["runs"])
        recall = f"{row['kind'] / row['runs']:.2f} ({low:.2f}-{high:.2f})"
        steps = f"{row['steps_median']}/{row['steps_p90']}" if row["steps_median"] is not None else "-"
        counts = " ".join(f"{row[key]:5}" for key in ("seen", "kind", "rank", "cause", "wrong"))
        print(f"{head} {counts}  {recall:17} {steps}{tail}")
    print()
    for key, value in summary["overall"].items():
        if isinstance(value, dict):
            share = "-" if value["share"] is None else f"{value['share']:.4f}"
            print(
                f"{key:28} {share}  {value['hits']} of {value['of']}  (95 %: {value['low']:.4f} to {value['high']:.4f})"
            )
        else:
            print(f"{key:28} {', '.join(value) if isinstance(value, list) else value}")


def print_mistake(outcome: Outcome) -> None:
    """What was not as it should be in a run, with the options that make it again; nothing if all was right."""
    o, expected = outcome, EXPECTED[outcome.fault]
    good = not o.wrong and not o.error and (expected.is_clean or o.cause)
    if good or not offered(expected):
        return
    again = f"--fault {o.fault} --index {o.index} --seed {o.seed} --ranks {o.num_ranks}"
    print(f"\n{o.fault} on {o.layout}, ranks {o.truth_ranks[:8]} from step {o.onset}: {again}")
    if o.error:
        print(f"    {o.error}")
    for finding in o.findings:
        where = f"ranks {finding['ranks'][:8]} steps {finding['first_step']}-{finding['last_step']}"
        print(f"    {finding['status']} {finding['kind']}/{finding['cause']} {where}: {finding['summary'][:150]}")
    sys.stdout.flush()


def cases_of(options: argparse.Namespace) -> list[Case]:
    """The runs to be made."""
    common = {"seed": options.seed, "ranks": options.ranks}
    if options.fault:
        indices = [options.index] if options.index is not None else range(options.runs)
        return [Case(fault=name, index=i, **common) for name in options.fault for i in indices]
    faulty = [name for name, expected in EXPECTED.items() if not expected.is_clean]
    clean = [name for name, expected in EXPECTED.items() if expected.is_clean]
    if options.quick:
        chosen = [name for name in faulty if offered(EXPECTED[name])]
        common["ranks"] = common["ranks"] or 8
        return [Case(fault=name, index=0, with_prefixes=False, **common) for name in (*chosen, *clean)]
    counts = {name: -(-options.faulty // len(faulty)) for name in faulty}
    counts |= {name: -(-options.clean // len(clean)) for name in clean}
    return [Case(fault=name, index=i, **common) for name, count in counts.items() for i in range(count)]


def judged(cases: Sequence[Case], jobs: int) -> Iterable[Outcome]:
    """The outcomes, as they come."""
    if jobs < 2 or len(cases) < 2:
        yield from map(judge, cases)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(judge, cases, chunksize=2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if there was any mistake of an analyzer that is offered."""
    parser = argparse.ArgumentParser(prog="benchmarks.diagnosis", description="accuracy of the analyzers")
    parser.add_argument("--faulty", type=int, default=500, help="labelled faulty runs, over all faults (500)")
    parser.add_argument("--clean", type=int, default=500, help="clean runs (500)")
    parser.add_argument("--quick", action="store_true", help="one run of 8 ranks a fault, without steps to detection")
    parser.add_argument("--fault", action="append", choices=list(EXPECTED), help="only this fault; repeatable")
    parser.add_argument("--runs", type=int, default=10, help="runs of each --fault (10)")
    parser.add_argument("--index", type=int, help="only this run of each --fault")
    parser.add_argument("--ranks", type=int, default=0, help="ranks of every run; default: 8 to 64, drawn")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything (0)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write counts and every outcome")
    parser.add_argument("--verbose", action="store_true", help="list the mistakes with the commands that repeat them")
    options = parser.parse_args(arguments)
    cases = cases_of(options)
    start = time.perf_counter()
    outcomes = []
    for outcome in judged(cases, options.jobs):
        outcomes.append(outcome)
        if options.verbose:
            print_mistake(outcome)
    summary = summarize(outcomes)
    print_table(summary)
    print(f"{len(cases)} runs in {time.perf_counter() - start:.1f} s; seed {options.seed}")
    if options.json:
        options.json.write_text(json.dumps({**summary, "outcomes": [asdict(o) for o in outcomes]}, indent=1) + "\n")
    overall = summary["overall"]
    return int(overall["precision"]["share"] not in (None, 1.0) or overall["errors"] > 0)


if __name__ == "__main__":
    sys.exit(main())
