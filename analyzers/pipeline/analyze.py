"""Pipelines: the measured bubble, and the stage that makes it larger than necessary.

    findings = pipeline(store, Scope(manifest=manifest))      # kinds bubble (a measurement) and stage_imbalance

1. `pipeline_bubble` measures the idle share of each pipeline's steps, and computes the idle share that the schedule
   would have with equal stages. It splits the excess into imbalance, communication and waiting for data, and names the
   stage to lighten.
2. The work of a pp rank is its computing time in a step, median over steps and pipelines.
3. Imbalance: the same pp rank has the most work on every pipeline, in the first and last third of the steps. Its work
   is at least `excess_ratio` x the median of the others. A rank that is slow on one pipeline only, or from some
   step on, is a straggler instead, also if ranks of the same stage wait for it inside their spans.
4. On GPUs no bubble is measured: spans are host times, and hosts run ahead. A rank's work is then its step time
   without waits, from stamps or durations of calls (`account.device.device_timings`). The excess of a heavy stage is a
   lower bound.
5. If ranks wait for cores (`is_crowded`), spans are longer than the work in them, especially on the stage that waits
   least for others. A rank's work is then the CPU time of its step. The excess is again a lower bound.
6. The first stage also has the embedding, and the last stage the head and the loss. If one of them is heavy and no
   other cut of the layers is better (`better_cut`), the finding is only advice.

Gain of a balanced split: the slowest stage sets the pace. With the same total work, the pipeline would take (mean work
/ largest work) of its present time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from analyzers.account.bubble import StepIdle
from analyzers.account.device.measured_by import has_device_calls, is_stamped
from analyzers.account.timings import load_timings
from analyzers.account.wait_split import pipelines
from analyzers.analysis import Analysis
from analyzers.finding import Finding
from analyzers.pipeline.pipeline_bubble import (
    FEW_STEPS,
    HOST_SPANS,
    MAX_PIPELINES,
    NOT_MEASURED,
    Bubble,
    Pipeline,
    load_pipelines,
    summarise,
)
from analyzers.pipeline.policy import PipelinePolicy
from analyzers.policy import SHARED
from analyzers.scope import Scope
from analyzers.source import Floats, Ints, Source, lacking, missing_tables
from analyzers.stragglers.comparison.cpu_comparison import cpu_times, is_crowded
from probes.settings.described import ModelFacts, ParallelFacts
from probes.settings.section import read

__all__ = ["ANALYSES", "OF_FILES", "better_cut", "heaviest", "pipeline"]

_BY_CALLS = "durations of calls over their members"
_BY_CPU = "CPU time of whole steps"


def pipeline(source: Source, scope: Scope, policy: PipelinePolicy | None = None) -> list[Finding]:
    """Judge the newest attempt that has a pipeline; no findings if there is none."""
    policy = policy or PipelinePolicy()
    if missing_tables(source, "ranks", "spans"):
        return []  # missing tables are reported by `run`
    found = [one for one in pipelines(source) if scope.attempt in (None, one[0])]
    if not found:
        return []
    attempt = max(number for number, _ in found)
    members = [ranks for number, ranks in found if number == attempt]
    if has_device_calls(source, attempt) or is_stamped(source, attempt):
        return [_insufficient(attempt, HOST_SPANS), *_by_steps(source, attempt, members, scope, policy, _BY_CALLS)]
    measured = load_pipelines(source, attempt)
    bubble = summarise(measured, read(ParallelFacts, scope.manifest).schedule)
    if bubble is None:
        return [_insufficient(attempt, FEW_STEPS)]
    has_cpu_times = not missing_tables(source, "steps") and not lacking(source, steps=("cpu_ns", "run_delay_ns"))
    if has_cpu_times and is_crowded(source, attempt, SHARED.warm_up_steps):
        bubble = replace(bubble, heaviest_stage=None, surplus_ms=0.0, surplus_ratio=0.0, is_crowded=True)
        return [_bubble(attempt, bubble, measured), *_by_steps(source, attempt, members, scope, policy, _BY_CPU)]
    heavy = heaviest([[_work(steps, one.ranks) for steps in _thirds(one.steps)] for one in measured], policy)
    if heavy is not None and _waits_for_a_rank(source, attempt, members, heavy, policy):
        heavy, bubble = None, replace(bubble, heaviest_stage=None, surplus_ms=0.0, surplus_ratio=0.0)
    measurement = _bubble(attempt, bubble, measured)
    if heavy is None:
        return [measurement]
    work_ns = [
        median(step.ranks[one.ranks[place]].busy_ns for one in measured for step in one.steps)
        for place in range(len(measured[0].ranks))
    ]
    span = (measured[0].steps[0].step, measured[0].steps[-1].step)
    return [measurement, _imbalance(attempt, heavy, [ranks[heavy] for ranks in members], work_ns, span, scope)]


def _waits_for_a_rank(
    source: Source, attempt: int, members: Sequence[Sequence[int]], heavy: int, policy: PipelinePolicy
) -> bool:
    """Return True if the stage is heavy on some pipeline only because its rank there waits for the same stage of
    another one, in the reduction of a gradient: spans include these waits, the own work of a step does not."""
    found = None if missing_tables(source, "steps") else _own_work(source, attempt, members)
    if found is None:
        return False
    least = 1 + SHARED.explained_ratio * (policy.excess_ratio - 1)
    work_ns = [np.median(own_ns, axis=1) for own_ns in found[0]]
    return any(work[heavy] < least * np.median(np.delete(work, heavy)) for work in work_ns)


def _by_steps(
    source: Source, attempt: int, members: Sequence[Sequence[int]], scope: Scope, policy: PipelinePolicy, measure: str
) -> list[Finding]:
    """Judge the stages by the steps of their ranks, without waits or by CPU time. `members`: ranks of each pipeline."""
    found = _own_work(source, attempt, members, by_cpu=measure == _BY_CPU)
    if found is None:
        return []
    pipelines_ns, steps = found
    third = len(steps) // 3
    parts = (slice(None, third), slice(-third, None))
    work = [[np.median(own[:, part], axis=1).tolist() for part in parts] for own in pipelines_ns]
    heavy = heaviest(work, policy)
    if heavy is None:
        return []
    work_ns = np.median(np.concatenate(pipelines_ns, axis=1), axis=1).tolist()
    span = (int(steps[0]), int(steps[-1]))
    return [_imbalance(attempt, heavy, [ranks[heavy] for ranks in members], work_ns, span, scope, measure)]


def _own_work(
    source: Source, attempt: int, members: Sequence[Sequence[int]], *, by_cpu: bool = False
) -> tuple[list[Floats], Ints] | None:
    """Own work of each pipeline's ranks in each step (nanoseconds), and the steps; None if too little was recorded."""
    timings = load_timings(source, attempt, skip_first=SHARED.warm_up_steps)
    if timings is None or len(timings.steps) < SHARED.min_steps:
        return None
    row = {int(rank): number for number, rank in enumerate(timings.ranks)}
    if any(rank not in row for ranks in members for rank in ranks):
        return None
    own_ms = cpu_times(source, timings, np.arange(len(row))) if by_cpu else timings.compute
    if own_ms is None:
        return None
    own_ns = own_ms.astype(np.float64) * 1e6
    return [own_ns[[row[rank] for rank in ranks]] for ranks in members[:MAX_PIPELINES]], timings.steps


def heaviest(work: Sequence[Sequence[Sequence[float]]], policy: PipelinePolicy) -> int | None:
    """Find the pp rank with too much work on every pipeline in every part of the run; None if there is none. Pure.

    `work[pipeline][part]` holds one number per pp rank.
    """
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


def _thirds(steps: Sequence[StepIdle]) -> list[Sequence[StepIdle]]:
    """The first and the last third."""
    third = len(steps) // 3
    return [steps[:third], steps[-third:]]


def _work(steps: Sequence[StepIdle], ranks: Sequence[int]) -> list[float]:
    """Work per step of each pp rank (ns)."""
    return [median(step.ranks[rank].busy_ns for step in steps) for rank in ranks]


def _bubble(attempt: int, bubble: Bubble, measured: Sequence[Pipeline]) -> Finding:
    return Finding(
        analyzer="stage_balance",
        kind="bubble",
        severity="info",
        status="ok",
        first_step=measured[0].steps[0].step,
        last_step=measured[0].steps[-1].step,
        summary=bubble.text,
        evidence=bubble.evidence(),
        advice="bubble",
        attempt=attempt,
    )


def _imbalance(
    attempt: int,
    heavy: int,
    ranks: Sequence[int],
    work_ns: Sequence[float],
    span: tuple[int, int],
    scope: Scope,
    measure: str = "",
) -> Finding:
    """Make the finding. `work_ns`: work per step of each pp rank; `span`: first and last step; `measure`: method of
    measurement, if not by spans.
    """
    mean = sum(work_ns) / len(work_ns)
    factor = work_ns[heavy] / median(value for place, value in enumerate(work_ns) if place != heavy)
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
    layers = _layers_and_stages(scope, len(work_ns))
    away = f"Moving {100 * (1 - mean / work_ns[heavy]):.0f} % of its {'work' if layers is None else 'layers'} away"
    is_edge, balance = heavy in (0, len(work_ns) - 1), f"{away} would balance it."
    better = None if layers is None else better_cut(factor, *layers)
    if better is False:
        balance = "No other split of the layers is better"
        more = "the embedding" if heavy == 0 else "the head and the loss"
        balance += f": this stage also has {more}." if is_edge else ", so its device may be slow."
    return Finding(
        analyzer="stage_balance",
        kind="stage_imbalance",
        severity="info",
        status="advice" if better is False and is_edge else "fired",
        ranks=tuple(sorted(ranks)),
        first_step=span[0],
        last_step=span[1],
        cause="imbalance",
        summary=(
            f"Pipeline stage {heavy} ({who}) has {'at least ' if measure else ''}{factor:.2f}x the work of the others"
            f"{' by CPU time, since ranks wait for cores' if measure == _BY_CPU else ''}. {balance}"
        ),
        evidence={
            "work_ms_by_coordinate": [round(value / 1e6, 3) for value in work_ns],
            "work_factor_ratio": round(factor, 3),
            "pipeline_speedup_ratio": round(work_ns[heavy] / mean, 3),
            **({} if better is None else {"has_better_partition": better}),
            **({"measured_by": measure} if measure else {}),
        },
        advice="stage-imbalance",
        attempt=attempt,
    )


def better_cut(factor: float, layers: float, stages: float) -> bool:
    """True if moving one layer from the heavy pp rank to another shortens the pipeline. Pure.

    `layers` and `stages`: number per pp rank. A layer is 1 / layers of a pp rank's work, and every stage
    keeps at least one layer.
    """
    return layers / stages >= 2 and (factor - 1) * layers > 1


def _layers_and_stages(scope: Scope, num_pp_ranks: int) -> tuple[float, float] | None:
    """Return (layers, stages) of each pp rank; None if the configuration lacks them, or distributes layers by
    `stage_costs`."""
    layers, parallel = read(ModelFacts, scope.manifest).num_layers, read(ParallelFacts, scope.manifest)
    if layers is None or parallel.stage_costs:
        return None
    single = parallel.schedule in ("", "gpipe", "1f1b")
    return layers / num_pp_ranks, parallel.stages_per_rank or (1 if single else 2)


def _insufficient(attempt: int, why: str) -> Finding:
    return Finding.insufficient("stage_balance", "bubble", NOT_MEASURED.format(why=why), attempt=attempt)


OF_FILES = ("operations",)
ANALYSES = (Analysis(kinds=("bubble", "stage_imbalance"), run=pipeline),)
