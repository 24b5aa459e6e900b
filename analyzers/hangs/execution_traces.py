"""Comparison of the ranks' execution traces: the first place where they do not make the same collective.

    findings, facts = judge_execution_traces(survey, name="traces")

The traces have no times and end where the observer was stopped: that a rank made fewer calls says nothing. Other calls
at one number are a mismatch, proven where the process group numbers them, suspected where they were counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analyzers.finding import Finding
from analyzers.hangs.watchdogs import fewer_of
from analyzers.wording import ranks_text
from store.readers.confined import confined
from store.readers.execution_trace import ExecutionTrace, TracedCall, read_execution_trace
from store.readers.external_files import SourceError, Survey

__all__ = ["judge_execution_traces"]

_ANY_SIZE = ("all_to_all", "alltoall", "all_to_allv", "alltoallv", "gather", "scatter", "barrier", "allgatherv")
"""Operations whose input may have another size on each rank."""


def judge_execution_traces(found: Survey, *, name: str) -> tuple[list[Finding], dict[str, Any]]:
    """Findings of the traces, and facts for the report. What cannot be read is listed in `found.problems`."""
    traces: dict[int, ExecutionTrace] = {}
    for path in found.paths:
        try:
            trace = confined(read_execution_trace, path, is_only=len(found.paths) == 1)
        except SourceError as error:
            found.add_problem(path, str(error))
            continue
        if trace.problem:
            found.add_problem(path, f"{trace.problem}: read up to there")
        if trace.rank in traces:
            found.add_problem(path, f"is a second execution trace of rank {trace.rank}")
            continue
        traces[trace.rank] = trace
    facts = {
        "run_id": name,
        "input": "execution_trace",
        "num_ranks": max((max(trace.sizes.values(), default=0) for trace in traces.values()), default=0) or len(traces),
        "ended": "not in the execution traces",
        "file_problems": sorted(found.problems, key=lambda problem: problem["path"]),
    }
    return _findings(traces), facts


def _findings(traces: Mapping[int, ExecutionTrace]) -> list[Finding]:
    if len(traces) < 2:
        return [_insufficient("execution traces of two ranks are needed")]
    is_counted = any(trace.is_counted for trace in traces.values())
    if is_counted and any(len(trace.sizes) > 1 for trace in traces.values()):
        return [_insufficient("these execution traces number no calls, and the job has several groups")]
    num_compared = 0
    for group in dict.fromkeys(group for trace in traces.values() for group in trace.calls):
        calls = {rank: trace.calls[group] for rank, trace in traces.items() if group in trace.calls}
        for seq in sorted({seq for own in calls.values() for seq in own}):
            made = {rank: own[seq] for rank, own in calls.items() if seq in own}
            num_compared += len(made) > 1
            difference = _difference(made)
            if difference:
                return [_mismatch(group, seq, made, difference, is_counted=is_counted)]
    same = f"{num_compared:,} collectives of {ranks_text(sorted(traces))} agree, and execution traces have no times"
    return [_insufficient(same)]


def _difference(made: Mapping[int, TracedCall]) -> dict[int, str]:
    """Describe the difference between the ranks' calls, by rank; empty where they fit."""
    ops = {rank: call.op for rank, call in made.items()}
    if len(set(ops.values())) > 1:
        return ops
    if next(iter(ops.values()), "").strip("_").startswith(_ANY_SIZE):
        return {}
    for part in ("shape", "dtype"):
        values = {rank: getattr(call, part) for rank, call in made.items() if getattr(call, part)}
        if len(set(values.values())) > 1:
            return values
    return {}


def _mismatch(
    group: str, seq: int, made: Mapping[int, TracedCall], difference: Mapping[int, str], *, is_counted: bool
) -> Finding:
    by_op = len({call.op for call in made.values()}) > 1
    by_type = not by_op and set(difference.values()) == {call.dtype for call in made.values() if call.dtype}
    cause = "mismatch_operation" if by_op else "mismatch_dtype" if by_type else "mismatch_size"
    shown = {rank: " ".join(part for part in (call.op, call.shape, call.dtype) if part) for rank, call in made.items()}
    calls = " and ".join(f"rank {rank} {shown[rank]}" for rank in _examples(difference))
    doubt = " Suspected: the calls were counted, and the traces may begin at different steps." if is_counted else ""
    return Finding(
        analyzer="execution_trace",
        kind="hang",
        severity="critical",
        status="suspect" if is_counted else "fired",
        ranks=fewer_of(difference),
        cause=cause,
        summary=f"Ranks made different calls at collective #{seq} of group {group or '?'}: {calls}.{doubt}",
        evidence={
            "seq": seq,
            "process_group": group,
            "calls": {str(rank): text for rank, text in sorted(shown.items())[:32]},
        },
        advice=f"hang-{cause}",
    )


def _examples(difference: Mapping[int, str]) -> Sequence[int]:
    """One rank of each kind of call."""
    first: dict[str, int] = {}
    for rank, value in sorted(difference.items()):
        first.setdefault(value, rank)
    return list(first.values())[:3]


def _insufficient(why: str) -> Finding:
    return Finding.insufficient("execution_trace", "hang", f"Hangs were not fully checked: {why}.")
