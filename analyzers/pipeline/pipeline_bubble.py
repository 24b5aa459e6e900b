"""Bubble of an attempt's pipelines by step, rank and stage; its excess over the schedule's own bubble, and the causes.

    bubble = summarise(load_pipelines(source, attempt=0), schedule="1f1b")
    bubble.idle_ratio, bubble.expected_ratio, bubble.imbalance_ratio, bubble.communication_ratio, bubble.data_ratio
    bubble.heaviest_stage, bubble.surplus_ms

All numbers are means over the typical steps (`bubble_causes.typical`), so that the parts add up to the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from analyzers.account.bubble import COMPUTATIONS, PipelineSpans, StepIdle, complete_steps, expected_idle, step_idle
from analyzers.account.time_classes import own
from analyzers.account.wait_split import pipelines
from analyzers.pipeline.bubble_causes import StepSplit, split_idle, typical
from analyzers.policy import SHARED
from analyzers.source import Source, ints, lacking
from analyzers.wording import number

__all__ = [
    "FEW_STEPS",
    "HOST_SPANS",
    "NOT_MEASURED",
    "Bubble",
    "Pipeline",
    "load_pipeline",
    "load_pipelines",
    "summarise",
]

NOT_MEASURED = "The pipeline bubble was not measured: {why}."
HOST_SPANS = "spans are those of the host, which runs ahead of its device"
FEW_STEPS = "too few steps have all spans of all ranks"
MAX_PIPELINES = 16
"""Maximum number of pipelines that are read."""
MAX_STEPS = 120
"""Maximum number of steps that are read, evenly spaced over the run."""
MAX_SHOWN = 256
"""Maximum number of ranks and steps that are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One pipeline: its ranks in pp order, and its complete steps in execution order."""

    ranks: Sequence[int]
    steps: Sequence[StepIdle]
    """Idle time from the first forward to the last backward."""
    splits: Sequence[StepSplit]
    """Idle time by cause, from the start of the first stage's loading."""
    num_microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubble:
    """The bubble of an attempt. Ratios are shares of the pipeline's time, which is from the start of the first stage's
    loading to the last backward.
    """

    schedule: str
    idle_ratio: float
    expected_ratio: float
    is_formula: bool
    """True if `expected_ratio` is the schedule's closed form; False if the recorded order was replayed with equal
    stages."""
    imbalance_ratio: float
    communication_ratio: float
    data_ratio: float
    order_ratio: float
    """Bubble of the recorded order with equal stages, minus the formula's bubble; 0 if there is no formula."""
    imbalance_ms: float
    total_ms: float
    num_microbatches: int
    num_pipelines: int
    num_steps: int
    idle_ratio_by_rank: Mapping[int, float]
    idle_ratio_by_step: Mapping[int, float]
    """Mean over all pipelines. If a step ran more than once, its newest execution counts."""
    stages_by_rank: Mapping[int, tuple[int, ...]]
    work_ms_by_stage: Mapping[int, float]
    heaviest_stage: int | None
    """The stage with the most work among the stages of the pp rank with the most work. None if no pp rank has clearly
    more work than the mean throughout the run."""
    surplus_ms: float
    """Work of that pp rank above the mean of all pp ranks, milliseconds per step."""
    surplus_ratio: float
    """`surplus_ms` as a share of that pp rank's work."""
    is_crowded: bool = False
    """True if ranks waited for cores, so that spans are longer than the work in them."""

    @property
    def excess_ratio(self) -> float:
        """Idle share in excess of what the schedule itself causes."""
        return self.idle_ratio - self.expected_ratio

    @property
    def text(self) -> str:
        """Describe the bubble, its excess and the stage to lighten, in one to four sentences."""
        expected = f"{self.schedule or 'the same order'} with equal stages has {100 * self.expected_ratio:.1f} %"
        parts = [f"The pipeline bubble is {100 * self.idle_ratio:.1f} % ({expected})."]
        if self.excess_ratio >= 0.005:
            split = f"imbalance {100 * self.imbalance_ratio:.1f}, communication {100 * self.communication_ratio:.1f}"
            split += f", data {100 * self.data_ratio:.1f}"
            split += f", order {100 * self.order_ratio:.1f}" if abs(self.order_ratio) >= 0.001 else ""
            parts.append(f"Excess {100 * self.excess_ratio:.1f} points: {split}.")
        if self.is_crowded:
            parts.append("Ranks wait for cores, so this is the bubble of a busy machine.")
        if self.heaviest_stage is not None:
            parts.append(
                f"Stage {self.heaviest_stage} has the most work: moving {100 * self.surplus_ratio:.0f} % of it "
                f"({number(self.surplus_ms)} ms per step) away would balance it."
            )
        return " ".join(parts)

    def evidence(self) -> dict[str, Any]:
        """The bubble as plain values, for the evidence of a finding."""
        return {
            "idle_ratio": round(self.idle_ratio, 4),
            "idle_expected_ratio": round(self.expected_ratio, 4),
            "idle_expected_from": "formula" if self.is_formula else "order",
            "excess_ratio": round(self.excess_ratio, 4),
            "excess_imbalance_ratio": round(self.imbalance_ratio, 4),
            "excess_communication_ratio": round(self.communication_ratio, 4),
            "excess_data_ratio": round(self.data_ratio, 4),
            "excess_order_ratio": round(self.order_ratio, 4),
            "pipeline_ms": round(self.total_ms, 3),
            "imbalance_ms": round(self.imbalance_ms, 3),
            "heaviest_stage": self.heaviest_stage,
            "surplus_ms": round(self.surplus_ms, 3),
            "surplus_ratio": round(self.surplus_ratio, 4),
            "num_microbatches": self.num_microbatches,
            "num_pipelines_measured": self.num_pipelines,
            "num_steps_measured": self.num_steps,
            "idle_ratio_by_rank": {str(rank): round(value, 4) for rank, value in self.idle_ratio_by_rank.items()},
            "idle_ratio_by_step": {str(step): round(value, 4) for step, value in self.idle_ratio_by_step.items()},
            "work_ms_by_stage": {str(stage): round(value, 3) for stage, value in self.work_ms_by_stage.items()},
        }


def load_pipeline(
    source: Source, attempt: int, ranks: Sequence[int], *, first_steps: int = 0, max_steps: int = 120
) -> Pipeline | None:
    """The pipeline of `ranks` over about `max_steps` evenly spaced steps. The first `first_steps` steps are left out.
    None if no complete step remains."""
    rank_list = ", ".join(map(str, ranks))
    kinds = ", ".join(f"'{kind}'" for kind in COMPUTATIONS)
    ((first, last),) = source.rows(
        f"SELECT min(step), max(step) FROM spans WHERE attempt = ? AND stage IS NOT NULL AND rank IN ({rank_list})",
        [attempt],
    )
    if first is None:
        return None
    every = max(1, (last - first + 1) // max_steps)
    table = source.query(
        f"""
        SELECT rank, step, stage, coalesce(microbatch, -1) AS microbatch, kind, start_ns, coalesce(end_ns, -1) AS end_ns
        FROM spans WHERE attempt = ? AND stage IS NOT NULL AND kind IN ({kinds}) AND rank IN ({rank_list})
          AND step >= ? AND step % ? = 0
        ORDER BY rank, start_ns
        """,
        [attempt, first + first_steps, every],
    )
    columns = ("rank", "step", "stage", "microbatch", "start_ns", "end_ns")
    spans = PipelineSpans(**{name: ints(table[name]) for name in columns}, kind=table["kind"])
    steps = complete_steps(spans, ranks)
    if not steps:
        return None
    return Pipeline(
        ranks=tuple(ranks),
        steps=[step_idle(step, ranks) for step in steps],
        splits=split_idle(
            steps, ranks, _loading(source, attempt, rank_list, sorted({int(at.step[0]) for at in steps}))
        ),
        num_microbatches=int(steps[-1].microbatch.max()) + 1,
    )


def load_pipelines(source: Source, attempt: int) -> list[Pipeline]:
    """Pipelines of an attempt with enough complete steps to measure their bubble."""
    loaded = (
        load_pipeline(source, attempt, ranks, first_steps=SHARED.warm_up_steps, max_steps=MAX_STEPS)
        for ranks in [ranks for number, ranks in pipelines(source) if number == attempt][:MAX_PIPELINES]
    )
    return [one for one in loaded if one is not None and len(one.steps) >= SHARED.min_steps]


def _loading(source: Source, attempt: int, rank_list: str, steps: Sequence[int]) -> dict[tuple[int, int], int]:
    """{(step, rank): nanoseconds in which the rank loaded its batch}, without waits."""
    if lacking(source, steps=("data_ns",)):
        return {}
    rows = source.rows(
        f"SELECT step, rank, CAST(avg(coalesce({own('data')}, 0)) AS BIGINT) FROM steps "
        f"WHERE attempt = ? AND rank IN ({rank_list}) AND step BETWEEN ? AND ? "
        f"AND step IN ({', '.join(map(str, steps))}) AND duration_ns IS NOT NULL GROUP BY ALL",
        [attempt, steps[0], steps[-1]],
    )
    return {(step, rank): own_ns for step, rank, own_ns in rows}


def summarise(found: Sequence[Pipeline], schedule: str = "") -> Bubble | None:
    """Summarise the pipelines of one attempt; None if no step could be split. Pure."""
    least = SHARED.min_change_ratio
    measured = [(pipeline, typical(pipeline.splits)) for pipeline in found if pipeline.splits]
    splits = [split for _, part in measured for split in part]
    if not splits:
        return None
    (first, _), *_ = measured
    by_rank = first.splits[0].idle.ranks
    stages_per_rank = max(len(one.busy_ns_by_stage) for one in by_rank.values())
    even = fmean(split.even_ratio for split in splits)
    times = [fmean(split.times_ns[kind] for split in splits) for kind in range(3)]
    formula = expected_idle(
        schedule, ranks=len(first.ranks), microbatches=first.num_microbatches, stages_per_rank=stages_per_rank,
        times=(times[0], times[1], times[2]),
    )  # fmt: skip
    expected = even if formula is None else formula
    by_stage = _work_by_stage(splits)
    place, over_ms, over_ratio = _heaviest(measured)
    stages = sorted(by_rank[first.ranks[place]].busy_ns_by_stage)
    imbalance = fmean(split.imbalance_ratio for split in splits)
    always = _is_always_heaviest([pipeline for pipeline, _ in measured], place, least)
    is_heavy = over_ratio >= least and imbalance > 0 and always
    listed = [(rank, part) for pipeline, part in measured for rank in pipeline.ranks][:MAX_SHOWN]
    return Bubble(
        schedule=schedule,
        idle_ratio=fmean(split.idle.idle_ratio for split in splits),
        expected_ratio=expected,
        is_formula=formula is not None,
        imbalance_ratio=imbalance,
        communication_ratio=fmean(split.communication_ratio for split in splits),
        data_ratio=fmean(split.data_ratio for split in splits),
        order_ratio=even - expected,
        imbalance_ms=fmean(split.imbalance_ns for split in splits) / 1e6,
        total_ms=fmean(split.idle.total_ns for split in splits) / 1e6,
        num_microbatches=first.num_microbatches,
        num_pipelines=len(measured),
        num_steps=len({split.idle.step for split in splits}),
        idle_ratio_by_rank={rank: fmean(split.idle.ranks[rank].idle_ratio for split in part) for rank, part in listed},
        idle_ratio_by_step=_by_step(found),
        stages_by_rank={rank: tuple(sorted(part[0].idle.ranks[rank].busy_ns_by_stage)) for rank, part in listed},
        work_ms_by_stage=by_stage,
        heaviest_stage=max(stages, key=lambda stage: by_stage[stage]) if is_heavy else None,
        surplus_ms=over_ms if is_heavy else 0.0,
        surplus_ratio=over_ratio if is_heavy else 0.0,
    )


def _by_step(found: Sequence[Pipeline]) -> dict[int, float]:
    """Idle share of each measured step, as a mean over the pipelines. At most MAX_SHOWN steps are listed."""
    steps: dict[int, list[float]] = {}
    for pipeline in found:
        newest = {split.idle.step: split.idle.idle_ratio for split in pipeline.splits}
        for step, ratio in newest.items():
            steps.setdefault(step, []).append(ratio)
    every = max(1, -(-len(steps) // MAX_SHOWN))
    return {step: fmean(steps[step]) for step in sorted(steps)[::every]}


def _work_by_stage(splits: Sequence[StepSplit]) -> dict[int, float]:
    """Work per step in each stage, of one of its ranks, in milliseconds."""
    found: dict[int, list[float]] = {}
    for split in splits:
        for rank in split.idle.ranks.values():
            for stage, busy_ns in rank.busy_ns_by_stage.items():
                found.setdefault(stage, []).append(busy_ns / 1e6)
    return {stage: fmean(found[stage]) for stage in sorted(found)}


def _heaviest(splits: Sequence[tuple[Pipeline, Sequence[StepSplit]]]) -> tuple[int, float, float]:
    """Return (pp rank with the most work, its excess over the mean of all in milliseconds per step, excess / its
    work)."""
    work = [
        fmean(split.idle.ranks[pipeline.ranks[place]].busy_ns for pipeline, part in splits for split in part) / 1e6
        for place in range(min(len(pipeline.ranks) for pipeline, _ in splits))
    ]
    place = max(range(len(work)), key=work.__getitem__)
    over_ms = work[place] - fmean(work)
    return place, over_ms, over_ms / work[place] if work[place] else 0.0


def _is_always_heaviest(found: Sequence[Pipeline], place: int, least: float) -> bool:
    """Return True if the pp rank has too much work in the first third of the steps and also in the last third.

    Otherwise the rank became slow, and moving its layers would only make another stage heavy.
    """
    first, last = [], []
    for pipeline in found:
        third = max(1, len(pipeline.splits) // 3)
        first.append((pipeline, pipeline.splits[:third]))
        last.append((pipeline, pipeline.splits[-third:]))
    of_parts = [_heaviest(part) for part in (first, last)]
    return all(heaviest == place and over_ratio >= least for heaviest, _, over_ratio in of_parts)
