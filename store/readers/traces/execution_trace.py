"""Read PyTorch execution traces (`ExecutionTraceObserver`, the input of Chakra): a rank's collectives, in order.

    trace = read_execution_trace(Path("et_rank3.json"))
    trace.calls["0"][17].op, trace.calls["0"][17].shape      # by group and number

The traces have no times. With NCCL, each call is a node `record_param_comms` with its sequence number and group. Other
backends record only the operation (`gloo:all_reduce`), so calls are counted, which is meaningful only for a single
group.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from store.readers.dumps.recorded_call import common_op, input_sizes, whole_number
from store.readers.untrusted.confined import confined
from store.readers.untrusted.external_files import SourceError, Survey, rank_of_name, unpacked
from store.readers.untrusted.json_stream import members

__all__ = ["ExecutionTrace", "TracedCall", "is_execution_trace", "read_execution_trace", "read_execution_traces"]

MAX_CALLS = 2_000_000
_BACKEND_CALL = re.compile(r"(?:gloo|nccl|ucc|mpi|xccl|hccl|rccl):([a-z_]{2,40})")
_NO_CALLS = ("wait", "init", "send", "recv", "pointtopoint", "monitored_barrier")
_ELEMENTS = re.compile(r"Tensor\((?:c10::)?([\w ]{1,40})\)")
_ELEMENT_NAMES = {"long int": "Long", "unsigned char": "Byte", "signed char": "Char", "short int": "Short"}
"""{C++ type name: torch dtype name}."""
_INIT = "## process_group:init ##"


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One collective, with the columns of table `collectives`."""

    op: str
    num_bytes: int | None
    dtype: str
    shape: str


@dataclass(slots=True)
class ExecutionTrace:
    """One rank's file. `is_counted`: call numbers are positions in the file, not sequence numbers of the process
    group.
    """

    rank: int
    path: Path
    calls: dict[str, dict[int, TracedCall]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    """Number of ranks of each group."""
    is_counted: bool = False
    problem: str = ""
    """Why it was not read completely; for example, an observer that was not stopped leaves a truncated file."""


def is_execution_trace(first: bytes) -> bool:
    """Return True if a file begins like an execution trace."""
    return b'"schema"' in first and b'"start_ts"' in first and b'"nodes"' in first


def read_execution_traces(found: Survey) -> dict[int, ExecutionTrace]:
    """Read a job's files by rank. Unreadable files are added to `found.problems`."""
    traces: dict[int, ExecutionTrace] = {}
    for path in found.paths:
        try:
            trace = confined(read_execution_trace, path, is_only=len(found.paths) == 1)
        except SourceError as error:
            found.add_problem(path, str(error))
            continue
        if trace.problem:
            found.add_problem(path, f"{trace.problem}: it was read up to there")
        if trace.rank in traces:
            found.add_problem(path, f"is a second execution trace of rank {trace.rank}")
            continue
        traces[trace.rank] = trace
    return traces


def read_execution_trace(path: Path, *, is_only: bool = False) -> ExecutionTrace:
    """Read one file. Raises SourceError if nothing in it is usable."""
    numbered: dict[str, dict[int, TracedCall]] = {}
    counted: dict[int, TracedCall] = {}
    sizes: dict[str, int] = {}
    problem = ""
    num_calls = 0
    try:
        for key, value, is_item in members(unpacked(path), {"nodes"}):
            if key != "nodes" or not is_item or not isinstance(value, dict):
                continue
            name = value.get("name")
            if name == "record_param_comms":
                num_calls += _numbered(value, numbered)
            elif name == _INIT:
                sizes |= _sizes(value)
            elif isinstance(name, str) and (match := _BACKEND_CALL.fullmatch(name)) and match[1] not in _NO_CALLS:
                counted[len(counted)] = TracedCall(common_op(match[1]), *_tensors(value))
                num_calls += 1
            if num_calls > MAX_CALLS:
                raise SourceError(f"holds more than {MAX_CALLS:,} collectives: the rest was not read")
    except SourceError as error:
        problem = str(error)
    if not numbered and not counted:
        raise SourceError(problem or "is an execution trace without collectives")
    rank = rank_of_name(path) if "rank" in path.name.lower() or not is_only else 0
    if rank is None and is_only:
        rank = 0
    if rank is None:
        raise SourceError("has no rank in its name (et_rank3.json)")
    calls = numbered or {next(iter(sizes), "") if len(sizes) < 2 else "": counted}
    return ExecutionTrace(rank=rank, path=path, calls=calls, sizes=sizes, is_counted=not numbered, problem=problem)


def _numbered(node: dict[str, Any], found: dict[str, dict[int, TracedCall]]) -> int:
    """Add the call of a node; returns 1, or 0 if it has none.

    The node's inputs are [tensors,] [sequence number, is p2p], [group, description], rank, operation, ...
    """
    inputs = node.get("inputs")
    values = inputs.get("values") if isinstance(inputs, dict) else None
    if not isinstance(values, list):
        return 0
    for place, value in enumerate(values[:3]):
        if not (isinstance(value, list) and len(value) == 2 and isinstance(value[1], bool)):
            continue
        seq, is_p2p = whole_number(value[0]), value[1]
        group, op = (values[place + n] if len(values) > place + n else None for n in (1, 3))
        name = group[0] if isinstance(group, list) and group else group
        if seq is None or is_p2p or not isinstance(name, str) or not isinstance(op, str) or op.lower() in _NO_CALLS:
            return 0
        found.setdefault(name[:200], {}).setdefault(
            seq, TracedCall(common_op(op[:40]), *_tensors(node, has_tensors=place > 0))
        )
        return 1
    return 0


def _tensors(node: dict[str, Any], *, has_tensors: bool = True) -> tuple[int | None, str, str]:
    """Bytes, element type and shape of the first input: one tensor, or a list of them."""
    inputs = node.get("inputs")
    if not has_tensors or not isinstance(inputs, dict):
        return None, "", ""
    shapes, types = inputs.get("shapes"), inputs.get("types")
    sizes = shapes[0] if isinstance(shapes, list) and shapes and isinstance(shapes[0], list) else []
    sizes = sizes if all(isinstance(size, list) for size in sizes) else [sizes]
    named = _ELEMENTS.findall(str(types[0])[:10_000]) if isinstance(types, list) and types else []
    dtypes = [_ELEMENT_NAMES.get(name, name[:1].upper() + name[1:]) for name in named] or [""]
    return input_sizes(sizes, dtypes + dtypes[-1:] * (len(sizes) - len(dtypes)))


def _sizes(node: dict[str, Any]) -> dict[str, int]:
    inputs = node.get("inputs")
    values = inputs.get("values") if isinstance(inputs, dict) else None
    try:
        groups = json.loads(values[0]) if isinstance(values, list) and values else []
    except (ValueError, TypeError, RecursionError):
        return {}
    return {
        str(group.get("pg_name"))[:200]: whole_number(group.get("group_size"), default=0) or 0
        for group in (groups if isinstance(groups, list) else [])[:100_000]
        if isinstance(group, dict)
    }
