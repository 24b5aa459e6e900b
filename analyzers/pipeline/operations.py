"""Findings from files with the times of single operations: the worker or stage that causes the slowdown.

slow_workers(FILES.read(survey(folder)))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from analyzers.analysis import FileAnalysis
from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.whatif.pipeline_jobs import PASSES, what_if_of_operations
from analyzers.whatif.what_if import WhatIf
from analyzers.wording import ranks_text
from store.readers.operations import Operations, read_operations
from store.readers.untrusted.external_files import SourceError, Survey

__all__ = ["FILES", "slow_workers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The operations of a job, and its replay."""

    operations: Operations
    what_if: WhatIf


def _read(found: Survey) -> _Job | None:
    """The first file that can be read; the others are listed in `found.problems`."""
    for path in found.paths:
        try:
            jobs = read_operations(path)
            what_if = what_if_of_operations(jobs)
        except SourceError as error:
            found.add_problem(path, str(error))
            continue
        if jobs.left_out:
            found.add_problem(path, f"{jobs.left_out:,} operations with missing numbers were left out")
        for other in found.paths[found.paths.index(path) + 1 :]:
            found.add_problem(other, f"belongs to a second job: only {path.name} was read")
        return _Job(operations=jobs, what_if=what_if)
    return None


def slow_workers(job: _Job | None) -> list[Finding]:
    """The worker or stage that explains most of the slowdown, if the replay shows one."""
    if job is None:
        return [Finding.insufficient("operations", "straggler", "No per-operation table could be read.")]
    jobs, what_if = job.operations, job.what_if
    if what_if.slowdown < 1 + SHARED.cost_ratio or not what_if.is_beyond_error:
        return []
    gain = f"balanced workers would make the step {what_if.slowdown:.2f}x faster"
    stage, worker = what_if.last_stage_ratio or 0.0, what_if.worst_ranks_ratio or 0.0
    if max(stage, worker) < SHARED.explained_ratio:
        return []
    evidence = {"slowdown_ratio": round(what_if.slowdown, 4), "replay_error_ratio": round(what_if.error_ratio, 4)}
    last = int(jobs.stage.max())
    ranks = tuple(int(rank) for rank in np.unique(jobs.rank[jobs.stage == last]))
    if stage > worker or (stage == worker and ranks == what_if.worst_ranks):
        work = _work_ms(jobs)
        return [
            Finding(
                analyzer="operations", kind="stage_imbalance", severity="warning", status="fired", ranks=ranks,
                cause="last_stage", cost_s=_cost_s(jobs, what_if),
                summary=f"The last pipeline stage ({last}) takes {work[-1] / max(float(np.mean(work)), 1e-9):.2f}x the "
                f"mean of all stages: {gain}.",
                evidence={**evidence, "work_ms_by_coordinate": [round(value, 3) for value in work],
                          "removed_by_last_stage_ratio": round(stage, 3)},
                advice="stage-imbalance",
            )
        ]  # fmt: skip
    who = ranks_text(what_if.worst_ranks)
    return [
        Finding(
            analyzer="operations", kind="straggler", severity="warning", status="fired", ranks=what_if.worst_ranks,
            cause="compute", cost_s=_cost_s(jobs, what_if),
            summary=f"{who.capitalize()} slow{'s' * (len(what_if.worst_ranks) == 1)} the job: {gain}.",
            evidence={**evidence, "phase_factors_ratio": _factors(jobs, what_if.worst_ranks),
                      "removed_by_worst_ranks_ratio": round(worker, 3),
                      "slowdown_by_rank_ratio": {str(r): round(v, 4) for r, v in list(what_if.by_rank.items())[:8]}},
            advice="straggler-compute",
        )
    ]  # fmt: skip


def _factors(jobs: Operations, ranks: tuple[int, ...]) -> dict[str, float]:
    """By kind of pass, the factor by which passes take longer on some ranks than on the others."""
    chosen, found = np.isin(jobs.rank, ranks), {}
    for number, name in enumerate(jobs.optype):
        rows = jobs.kind == number
        others = jobs.duration_ms[rows & ~chosen]
        if name in PASSES and len(others) and others.mean() > 0:
            found[name.removesuffix("-compute")] = round(
                float(jobs.duration_ms[rows & chosen].mean() / others.mean()), 4
            )
    return found


def _work_ms(jobs: Operations) -> list[float]:
    """Milliseconds of computation per step of one worker, by stage."""
    computes = np.isin(jobs.kind, [number for number, name in enumerate(jobs.optype) if name in PASSES])
    found = []
    for stage in np.unique(jobs.stage):
        rows = computes & (jobs.stage == stage)
        workers = len(np.unique(np.stack([jobs.dp_rank[rows], jobs.step[rows]]), axis=1).T)
        found.append(float(jobs.duration_ms[rows].sum()) / max(1, workers))
    return found


def _cost_s(jobs: Operations, what_if: WhatIf) -> float:
    return float((what_if.step_ms - what_if.ideal_step_ms) / 1e3 * len(np.unique(jobs.step)))


def _facts(job: _Job | None) -> dict[str, Any]:
    if job is None:
        return {}
    return {"num_ranks": len(np.unique(job.operations.rank)), "steps": len(np.unique(job.operations.step))}


FILES = FileAnalysis(
    format="operations", kind="straggler", read=_read, run=slow_workers, facts=_facts,
    what_if=lambda job: job.what_if if job else None,
)  # fmt: skip
