"""Read logs of NCCL's inspector (`ext-profiler/inspector`): completed collectives of one process, one JSON object per
line.

    read = read_inspector(Path("nccl-inspector-771/gpu-01-pid-71.log"))
    read.calls["0x7f8c", 3].seq, read.calls["0x7f8c", 3].exec_us      # by communicator and rank within it

    job = read_inspector_job(survey(folder))     # all processes of a job
    job.largest, job.num_ranks, job.columns()    # ranks as in the largest communicator; columns of `collectives`

The inspector logs only completed collectives, so never the call in which a rank hangs. It records durations without
start times, so each row starts at 0 and clocks of ranks are not compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from store.arrays import Floats, Ints
from store.readers.dumps.recorded_call import short_text, whole_number
from store.readers.untrusted.confined import confined
from store.readers.untrusted.external_files import SourceError, Survey, head, unpacked

__all__ = ["InspectedCalls", "InspectedJob", "InspectorLog", "is_inspector", "read_inspector", "read_inspector_job"]

MAX_CALLS = 5_000_000
MAX_LINE_BYTES = 1 << 20
_PARTS = (b"coll_perf", b"p2p_perf", b"dump_stats")
"""Keys of a line's payload: a collective, a send or receive, or statistics of the log (format 4.2)."""
_METRIC = b"nccl_collective_exec_time_microseconds"
_LABEL = re.compile(rb'(\w{1,40})="((?:[^"\\]|\\.){0,300})"')


@dataclass(slots=True)
class InspectedCalls:
    """One rank's completed collectives of one communicator, in order of completion."""

    num_ranks: int
    process: tuple[str, int]
    """Host and pid, by which the rank is found in other communicators."""
    _seq: list[int] = field(default_factory=list)
    _exec_us: list[float] = field(default_factory=list)
    ops: dict[str, int] = field(default_factory=dict)

    def add(self, seq: int, exec_us: int, op: str) -> None:
        self._seq.append(seq)
        self._exec_us.append(float(exec_us))
        self.ops[op] = self.ops.get(op, 0) + 1

    @property
    def seq(self) -> Ints:
        """Sequence numbers."""
        return np.array(self._seq, dtype=np.int64)

    @property
    def exec_us(self) -> Floats:
        """Microseconds from the start of a collective on this rank to its end."""
        return np.array(self._exec_us, dtype=np.float64)

    def by_number(self) -> tuple[Ints, Floats]:
        """Ascending sequence numbers and their times. If a number is repeated, its last time is taken."""
        seq, newest = np.unique(self.seq[::-1], return_index=True)
        return seq, self.exec_us[::-1][newest]


@dataclass(slots=True)
class InspectorLog:
    """One process's file. `problem` says why it was not read completely."""

    path: Path
    calls: dict[tuple[str, int], InspectedCalls] = field(default_factory=dict)
    num_calls: int = 0
    damaged_lines: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedJob:
    """A job's calls by communicator and rank within it. The job's ranks are those in its largest communicator."""

    groups: dict[str, dict[int, InspectedCalls]]

    @property
    def largest(self) -> dict[int, InspectedCalls]:
        """The communicator with the most ranks. If several have the most ranks, it is the one with the most files.
        Empty without files."""

        def size(members: dict[int, InspectedCalls]) -> tuple[int, int]:
            return max(calls.num_ranks for calls in members.values()), len(members)

        return max(self.groups.values(), key=size, default={})

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the job, including ranks without a file."""
        return max((calls.num_ranks for calls in self.largest.values()), default=len(self.largest))

    def columns(self) -> dict[str, np.ndarray[Any, Any]]:
        """All calls of known ranks, as columns of `collectives`."""
        rank_of = {calls.process: rank for rank, calls in self.largest.items()}
        known = [(group, rank_of[calls.process], *calls.by_number()) for group, members in self.groups.items()
                 for calls in members.values() if calls.process in rank_of]  # fmt: skip
        lengths = [len(seq) for _, _, seq, _ in known]
        durations_ns = np.concatenate([exec_us for *_, exec_us in known]) * 1000.0
        return {
            "rank": np.repeat([rank for _, rank, _, _ in known], lengths),
            "process_group": np.repeat([group for group, *_ in known], lengths).astype(object),
            "seq": np.concatenate([seq for _, _, seq, _ in known]),
            "op": np.full(sum(lengths), "collective", dtype=object),
            "step": np.zeros(sum(lengths), dtype=np.int64),
            "issue_ns": np.zeros(sum(lengths), dtype=np.int64),
            "end_ns": durations_ns.astype(np.int64),
        }


def is_inspector(first: bytes) -> bool:
    """Return True for a file that starts with a log line of the inspector, or is output of its Prometheus mode."""
    is_log = b'"inspector_output_format_version"' in first and any(b'"' + part + b'"' in first for part in _PARTS)
    return is_log or is_scrape(first)


def is_scrape(first: bytes) -> bool:
    """Return True for output of the inspector's Prometheus mode (NCCL 2.30), with the newest collective of each
    communicator.
    """
    return _METRIC + b"{" in first


def read_inspector_job(found: Survey) -> InspectedJob:
    """Read the files of a job. Unreadable files are added to `found.problems`."""
    groups: dict[str, dict[int, InspectedCalls]] = {}
    for path in found.paths:
        try:
            log = confined(read_inspector, path)
        except SourceError as error:
            found.add_problem(path, str(error))
            continue
        if log.problem or log.damaged_lines:
            found.add_problem(path, log.problem or f"{log.damaged_lines:,} damaged lines were left out")
        for (group, rank), calls in log.calls.items():
            groups.setdefault(group, {})[rank] = calls
    return InspectedJob(groups=groups)


def read_inspector(path: Path) -> InspectorLog:
    """Read one file; its errors are in `problem` and `damaged_lines`."""
    log = InspectorLog(path=path)
    try:
        if is_scrape(head(path, 64 << 10)):
            for line in _lines(path):
                _take_sample(line, log)
            return log
        for line in _lines(path):
            try:
                entry: Any = json.loads(line)
            except (ValueError, RecursionError):
                log.damaged_lines += bool(line.strip())
                continue
            _take(entry, log)
            if log.num_calls >= MAX_CALLS:
                raise SourceError(f"holds more than {MAX_CALLS:,} collectives: the rest was not read")
    except SourceError as error:
        log.problem = str(error)
    return log


def _lines(path: Path) -> Iterator[bytes]:
    rest = b""
    for chunk in unpacked(path):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
        if len(rest) > MAX_LINE_BYTES:
            raise SourceError("has a line that is too long for the inspector")
    yield rest


def _take_sample(line: bytes, log: InspectorLog) -> None:
    if not line.startswith(_METRIC + b"{"):
        return
    labels = {key.decode(): value.decode("utf-8", "replace") for key, value in _LABEL.findall(line)}
    if "coll_sn" not in labels and "comm_name" in labels:
        log.problem = "holds means of many calls, without ranks and sequence numbers; late ranks need the JSON logs"
        return
    words = line.rpartition(b"}")[2].split()
    device = labels.get("gpu_device_id", "").removeprefix("GPU")  # a file per GPU does not name its process
    texts = labels | {"pid": labels.get("pid", device), "n_ranks": labels.get("nranks", labels.get("n_ranks", ""))}
    numbers = {name: int(texts[name]) for name in ("rank", "n_ranks", "pid", "coll_sn")
               if texts.get(name, "").isdecimal()}  # fmt: skip
    try:
        exec_us: int | None = int(float(words[0])) if words else None
    except (ValueError, OverflowError):
        exec_us = None
    _take(
        {
            "header": {"id": labels.get("comm_id"), "rank": numbers.get("rank"), "n_ranks": numbers.get("n_ranks")},
            "metadata": {"hostname": labels.get("hostname"), "pid": numbers.get("pid", 0)},
            "coll_perf": {
                "coll": labels.get("collective"),
                "coll_sn": numbers.get("coll_sn"),
                "coll_exec_time_us": exec_us,
            },
        },
        log,
    )


def _take(entry: Any, log: InspectorLog) -> None:
    if isinstance(entry, dict) and "coll_perf" not in entry and ("p2p_perf" in entry or "dump_stats" in entry):
        return
    parts = [entry.get(name) if isinstance(entry, dict) else None for name in ("header", "metadata", "coll_perf")]
    header, metadata, call = (part if isinstance(part, dict) else {} for part in parts)
    name, rank = short_text(header.get("id"), 40), whole_number(header.get("rank"), 1_000_000)
    seq, exec_us = whole_number(call.get("coll_sn")), whole_number(call.get("coll_exec_time_us"))
    if not name or rank is None or seq is None or exec_us is None:
        log.damaged_lines += 1
        return
    found = log.calls.get((name, rank))
    if found is None:
        process = (short_text(metadata.get("hostname"), 200), whole_number(metadata.get("pid"), default=0) or 0)
        found = InspectedCalls(num_ranks=whole_number(header.get("n_ranks"), default=0) or 0, process=process)
        log.calls[name, rank] = found
    found.add(seq, exec_us, short_text(call.get("coll"), 40))
    log.num_calls += 1
