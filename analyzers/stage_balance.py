"""The pipeline's bubble, measured, and the stage that makes it larger than it must be.

    findings = analyze(store, schedule="1f1b")      # kinds bubble (a measurement) and stage_imbalance

1. Idle share of each step of each pipeline (`analyzers.bubble`), beside what the schedule has with equal stages.
2. Work of a pipeline coordinate: the median over steps and pipelines of what its ranks computed in a step.
3. Imbalance: the one coordinate with the most work is over the median of the others by `excess_ratio`, on every
   pipeline, in the first third of the steps as in the last. A rank that is slow by itself is slow on one pipeline or
   from some step on: that is the straggler's business.

What a balanced split would gain: the slowest stage sets the pace, so a step's pipeline takes mean / largest of what it
takes now, with the same total work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from .bubble import COMPUTATIONS, PipelineSpans, StepIdle, expected_idle, measure_idle
from .finding import Finding
from .source import Source, ints, missing_tables
from .wait_split import pipelines

__all__ = ["StageBalancePolicy", "analyze", "heaviest", "measured_steps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBalancePolicy:
    """When a stage is too heavy, and how much is looked at."""

    excess_ratio: float = 1.15
    """Work over the median of the other stages: less than a layer more in ten is how layers divide."""
    min_steps: int = 12
    """Steps from which a median of a third of them means something."""
    warm_up_steps: int = 3
    """First steps, which allocate and compile."""
    max_steps: int = 120
    """Steps that are looked at, evenly over the run."""
    max_pipelines: int = 16
    """Pipelines that are looked at."""


def analyze(source: Source, schedule: str = "", policy: StageBalancePolicy | None = None) -> list[Finding]:
    """Findings of the newest attempt that has a pipeline; none without one."""
    policy = policy or StageBalancePolicy()
    if missing_tables(source, "ranks", "spans"):
        return []  # said by `coverage`
    found = pipelines(source)
    if not found:
        return []
    attempt = max(number for number, _ in found)
    members = [ranks for number, ranks in found if number == attempt][: policy.max_pipelines]
    measured = [(ranks, steps) for ranks in members if (steps := measured_steps(source, attempt, ranks, policy))]
    if not measured:
        return [_insufficient(attempt)]
    everybody = [ranks for number, ranks in found if number == attempt]
    bubble = _bubble(source, attempt, measured, schedule)
    heavy = heaviest([[_work(steps, ranks) for steps in _thirds(steps)] for ranks, steps in measured], policy)
    if heavy is None:
        return [bubble]
    return [bubble, _imbalance(attempt, heavy, [ranks[heavy] for ranks in everybody], measured)]


def heaviest(work: Sequence[Sequence[Sequence[float]]], policy: StageBalancePolicy) -> int | None:
    """The coordinate that has too much work on every pipeline in every part of the run: `work[pipeline][part]` holds
    one number a coordinate. None if there is no such one. Pure."""
    candidates = {max(range(len(part)), key=part.__getitem__) for parts in work for part in parts}
    if len(candidates) != 1:
        return None
    (heavy,) = candidates
    for parts in work:
        for part in parts:
            others = median(value for number, value in enumerate(part) if number != heavy)
            if part[heavy] < policy.excess_ratio * others:
                return None
    return heavy


def measured_steps(source: Source, attempt: int, ranks: Sequence[int], policy: StageBalancePolicy) -> list[StepIdle]:
    """Busy and idle time of the pipeline of `ranks`, over at most `max_steps` steps; empty below `min_steps`."""
    marks = ", ".join(map(str, ranks))
    kinds = ", ".join(f"'{kind}'" for kind in COMPUTATIONS)
    ((first, last),) = source.rows(
        f"SELECT min(step), max(step) FROM spans WHERE attempt = ? AND stage IS NOT NULL AND rank IN ({marks})",
        [attempt],
    )
    if first is None:
        return []
    every = max(1, (last - first + 1) // policy.max_steps)
    table = source.query(
        f"""
        SELECT rank, step, stage, coalesce(microbatch, -1) AS microbatch, kind, start_ns, coalesce(end_ns, -1) AS end_ns
        FROM spans WHERE attempt = ? AND stage IS NOT NULL AND kind IN ({kinds}) AND rank IN ({marks})
          AND step >= ? AND step % ? = 0
        ORDER BY rank, start_ns
        """,
        [attempt, first + policy.warm_up_steps, every],
    )
    columns = ("rank", "step", "stage", "microbatch", "start_ns", "end_ns")
    spans = PipelineSpans(**{name: ints(table[name]) for name in columns}, kind=table["kind"])
    steps = measure_idle(spans, ranks)
    return steps if len(steps) >= policy.min_steps else []


def _thirds(steps: list[StepIdle]) -> list[list[StepIdle]]:
    third = len(steps) // 3
    return [steps[:third], steps[-third:]]


def _work(steps: Sequence[StepIdle], ranks: Sequence[int]) -> list[float]:
    """Nanoseconds of work a step, one number a coordinate."""
    return [median(step.ranks[rank].busy_ns for step in steps) for rank in ranks]


def _bubble(
    source: Source, attempt: int, measured: Sequence[tuple[list[int], list[StepIdle]]], schedule: str
) -> Finding:
    ranks, steps = measured[0]
    idle = median(step.idle_ratio for _, own in measured for step in own)
    stages = max(len(step.ranks[rank].busy_ns_by_stage) for step in steps[:1] for rank in ranks)
    ((microbatches,),) = source.rows("SELECT max(microbatch) + 1 FROM spans WHERE attempt = ?", [attempt])
    expected = expected_idle(schedule, ranks=len(ranks), microbatches=int(microbatches or 1), stages_per_rank=stages)
    beside = "" if expected is None else f"; {schedule} with equal stages has {100 * expected:.1f} %"
    return Finding(
        analyzer="stage_balance",
        kind="bubble",
        severity="info",
        status="ok",
        first_step=steps[0].step,
        last_step=steps[-1].step,
        summary=f"the pipeline's ranks have nothing to do for {100 * idle:.1f} % of its time{beside}",
        evidence={
            "idle_ratio": round(idle, 4),
            "idle_expected_ratio": None if expected is None else round(expected, 4),
            "num_microbatches": microbatches,
            "num_pipelines_measured": len(measured),
        },
        advice="bubble",
        attempt=attempt,
    )


def _imbalance(
    attempt: int, heavy: int, ranks: Sequence[int], measured: Sequence[tuple[list[int], list[StepIdle]]]
) -> Finding:
    by_coordinate: Mapping[int, float] = {
        place: median(step.ranks[members[place]].busy_ns for members, steps in measured for step in steps)
        for place in range(len(measured[0][0]))
    }
    mean = sum(by_coordinate.values()) / len(by_coordinate)
    others = median(value for place, value in by_coordinate.items() if place != heavy)
    gain = by_coordinate[heavy] / mean
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
    return Finding(
        analyzer="stage_balance",
        kind="stage_imbalance",
        severity="info",
        status="fired",
        ranks=tuple(sorted(ranks)),
        first_step=measured[0][1][0].step,
        last_step=measured[0][1][-1].step,
        cause="imbalance",
        summary=(
            f"pipeline coordinate {heavy} ({who}) has {by_coordinate[heavy] / others:.2f}x the work of the others: "
            f"{100 * (1 - mean / by_coordinate[heavy]):.0f} % of its layers moved away would balance it"
        ),
        evidence={
            "work_ms_by_coordinate": [round(value / 1e6, 3) for value in by_coordinate.values()],
            "work_factor_ratio": round(by_coordinate[heavy] / others, 3),
            "pipeline_speedup_ratio": round(gain, 3),
        },
        advice="stage-imbalance",
        attempt=attempt,
    )


def _insufficient(attempt: int) -> Finding:
    return Finding.insufficient(
        "stage_balance",
        "bubble",
        "the pipeline's bubble was not measured: too few steps in which all of its ranks have all their spans",
        attempt=attempt,
    )
