"""Comparison of the ranks' execution traces: the first position at which their collectives differ.

    mismatches_of_traces(read_execution_traces(survey(folder)))

The traces have no times and end where the observer was stopped, so fewer calls on one rank mean nothing. Different
calls under one number are a mismatch: proven if the process group numbers them, suspected if they were only counted.
The traces do not show whether calls ended, so they are not read into `collectives`, where a row without an end is a
call in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from analyzers.analysis import FileAnalysis
from analyzers.finding import Finding
from analyzers.hangs.analyze import hang_finding
from analyzers.hangs.culprits import cause_of_mismatch
from analyzers.hangs.files.dumps import hangs_not_checked, hangs_partly_checked
from analyzers.hangs.mismatches import Mismatch, compare_calls
from analyzers.run.calls.recorded_calls import Call
from analyzers.run.calls.snapshot import AttemptView, RankView
from analyzers.wording import ranks_text
from store.readers.traces.execution_trace import ExecutionTrace, TracedCall, read_execution_traces

__all__ = ["FILES", "mismatches_of_traces"]


def mismatches_of_traces(traces: Mapping[int, ExecutionTrace]) -> list[Finding]:
    """The first mismatch, or why none can be determined."""
    if len(traces) < 2:
        return [hangs_not_checked("execution traces of two ranks are needed")]
    is_counted = any(trace.is_counted for trace in traces.values())
    if is_counted and any(len(trace.sizes) > 1 for trace in traces.values()):
        return [hangs_not_checked("these execution traces have no call numbers, and the job has several groups")]
    num_compared = 0
    for group in dict.fromkeys(group for trace in traces.values() for group in trace.calls):
        calls = {rank: trace.calls[group] for rank, trace in traces.items() if group in trace.calls}
        for seq in sorted({seq for by_seq in calls.values() for seq in by_seq}):
            made = {rank: by_seq[seq] for rank, by_seq in calls.items() if seq in by_seq}
            num_compared += len(made) > 1
            if len(set(made.values())) > 1 and (found := compare_calls(_calls(group, seq, made))):
                return [_mismatch(found, is_counted=is_counted)]
    ranks = ranks_text(sorted(traces))
    if not num_compared:
        return [hangs_not_checked(f"the execution traces of {ranks} have no collective in common")]
    same = "1 collective" if num_compared == 1 else f"{num_compared:,} collectives"
    agree = f"{same} of {ranks} agree{'s' * (num_compared == 1)}, and execution traces have no times"
    return [hangs_partly_checked(agree)]


def _calls(group: str, seq: int, made: Mapping[int, TracedCall]) -> list[Call]:
    return [
        Call(rank=rank, group=group, seq=seq, op=one.op, num_bytes=one.num_bytes, dtype=one.dtype, shape=one.shape)
        for rank, one in sorted(made.items())
    ]


def _mismatch(found: Mismatch, *, is_counted: bool) -> Finding:
    ranks = sorted(rank for side in found.differs.values() for rank in side)
    view = AttemptView(attempt=0, ranks={rank: RankView(rank=rank) for rank in ranks})
    finding = hang_finding(view, cause_of_mismatch(found))
    doubt = " Suspected: the calls were counted, and the traces may begin at different steps." if is_counted else ""
    return replace(
        finding,
        status="suspect" if is_counted else "fired",
        attempt=None,
        summary=f"{finding.summary}{doubt}",
        evidence={**finding.evidence, "silent_s": None},
        cost_s=None,
    )


def _facts(traces: Mapping[int, ExecutionTrace]) -> dict[str, Any]:
    largest = max((size for trace in traces.values() for size in trace.sizes.values()), default=0)
    return {"num_ranks": largest or len(traces), "ended": "not in the execution traces"}


FILES = FileAnalysis(
    format="execution_trace", kind="hang", read=read_execution_traces, run=mismatches_of_traces, facts=_facts
)
