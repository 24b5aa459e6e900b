"""The rows of `log_events` as one ordered list, with facts about the job from all of them: ranks, hosts, interfaces.

book = LogBook.load(source)
book.of("exception")          # lines of that kind, the earliest first
book.world_size, book.seen    # ranks that the lines state, and those that printed something
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import merge
from operator import itemgetter
from typing import Any

from analyzers.policy import SHARED
from analyzers.source import Source
from store.readers.logs.rules import Rule, load_rules
from store.readers.programs.sacct import wall_ns_of

__all__ = ["ATTEMPT", "MAX_QUOTED", "SAME_END_LINES", "SAME_END_NS", "LogBook", "LogLine", "quotes"]

_SCHEDULER_ENDS = ("slurm_cancelled", "node_failed", "preempted", "evicted")
_LAUNCHER_ENDS = ("root_failure",)
"""Kinds of lines that a launcher prints at its end. A start after such a line is a new launch that appends to the file.
"""
_START_ERRORS = ("SyntaxError", "IndentationError", "TabError", "ArgumentError")
"""Errors in a program's source or command line, which are the same for all processes of a launch."""
_END_ROLES = ("root", "victim", "hang", "death", "exception", "numerics", "nccl", "outside")
_RULES = {rule.kind: rule for rule in load_rules()}
_ROLES = {kind: rule.role for kind, rule in _RULES.items()} | {"started_again": "context"}
_STREAM = re.compile(r"(?<![A-Za-z0-9])(?:std)?(?:out|err)(?![A-Za-z0-9])")
"""Part of a file name that distinguishes a process's two streams: `88123_0_log.out`, `slurm-88123.err`,
`stderr.log`."""
ATTEMPT = re.compile(r"(?:(.*)/)?attempt_(\d{1,6})/")
"""Files of an attempt in the folder that torchrun's `--log-dir` made for it."""
_THREAD = re.compile(r"\bblock: \[[\d,]+\], thread: \[[\d,]+\] ")
SAME_END_LINES = 10
"""Maximum distance in lines between reports of the same end, which each node, each job step and srun may print."""
SAME_END_NS = 600 * 10**9
"""Maximum difference in time (ns) between reports of the same end: the hosts' clocks differ, and Slurm has a grace
period.
"""
MAX_QUOTED = 160
"""Characters of a line that are quoted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One log line that matches a rule."""

    kind: str
    rank: int | None
    wall_ns: int | None
    host: str | None
    pid: int | None
    source: str
    line: int
    message: str
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """`job.log:18`; the name alone if the file has no lines."""
        return f"{self.source}:{self.line}" if self.line else self.source

    @property
    def quoted(self) -> str:
        """`job.log:18: RuntimeError: ...`, cut to a line."""
        message = self.message
        if self.kind == "exception" and self.text("type") and self.text("type") not in message:
            message = f"{self.text('type')}: {self.text('message')}".splitlines()[0]
        return f"{self.place}: {message[:MAX_QUOTED]}"

    def number(self, name: str) -> int | None:
        """A field that is a whole number."""
        value = self.fields.get(name)
        return value if isinstance(value, int) else None

    def text(self, name: str) -> str:
        """A field as text, empty if not present."""
        value = self.fields.get(name)
        return "" if value is None else str(value)

    def ranks(self, name: str = "ranks") -> tuple[int, ...]:
        """A field that lists ranks: `1, 3` or `0-2,5`."""
        found: list[int] = []
        for part in self.text(name).replace(" ", "").split(","):
            first, _, last = part.partition("-")
            if first.isdecimal():
                found += range(int(first), min(int(last) if last.isdecimal() else int(first), int(first) + 4096) + 1)
        return tuple(found)


def quotes(lines: Iterable[LogLine], limit: int = 8) -> list[str]:
    """At most `limit` lines with their places. If each thread of a kernel prints an assertion, only the first is
    quoted."""
    first: dict[str, LogLine] = {}
    for line in lines:
        is_of_thread = _THREAD.search(line.message) is not None
        first.setdefault(_THREAD.sub("", line.message) if is_of_thread else line.place, line)
    return [f"{line.place}: {line.message[:200]}" for line in list(first.values())[:limit]]


@dataclass(frozen=True, slots=True)
class LogBook:
    """All lines, ordered by time. Lines of a file without times stay together, in the order of the file."""

    lines: tuple[LogLine, ...]
    earlier: tuple[LogLine, ...] = ()
    """Lines of earlier attempts of the job in the same files."""
    _positions: dict[int, int] = field(default_factory=dict, repr=False, compare=False)
    _by_kind: dict[str, list[tuple[int, LogLine]]] = field(default_factory=dict, repr=False, compare=False)
    _seen: list[tuple[int, ...]] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def load(cls, source: Source) -> LogBook:
        """The lines of a store; empty if it has none."""
        if not source.has("log_events"):
            return cls(())
        rows = source.rows("SELECT kind, rank, wall_ns, host, pid, source, line, message, fields FROM log_events")
        lines = [
            LogLine(
                kind=kind, rank=rank, wall_ns=wall_ns, host=host, pid=pid, source=file, line=line,
                message=message or "", fields=json.loads(fields) if isinstance(fields, str) else {},
            )
            for kind, rank, wall_ns, host, pid, file, line, message, fields in rows
        ]  # fmt: skip
        last, earlier = _split_attempts(lines)
        return cls(tuple(_in_order(last)), tuple(_in_order(earlier)))

    def of(self, *kinds: str) -> Iterator[LogLine]:
        """Lines of these kinds, in order."""
        return (entry for _, entry in self._of(kinds))

    def of_role(self, *roles: str) -> Iterator[tuple[LogLine, Rule]]:
        """Lines that matched a rule with one of these roles, and the rule."""
        kinds = [kind for kind, rule in _RULES.items() if rule.role in roles]
        return ((entry, _RULES[entry.kind]) for _, entry in self._of(kinds))

    def _of(self, kinds: Iterable[str]) -> Iterable[tuple[int, LogLine]]:
        """Lines of some kinds with their positions among all lines; cached, because it is called for every error."""
        if not self._by_kind:
            for place, entry in enumerate(self.lines):
                self._by_kind.setdefault(entry.kind, []).append((place, entry))
        found = [self._by_kind[kind] for kind in dict.fromkeys(kinds) if kind in self._by_kind]
        return found[0] if len(found) == 1 else merge(*found, key=itemgetter(0))

    def position(self, entry: LogLine) -> int:
        """Index of a line in the order of all lines."""
        if not self._positions:
            self._positions.update((id(one), place) for place, one in enumerate(self.lines))
        return self._positions[id(entry)]

    @property
    def seen(self) -> tuple[int, ...]:
        """Ranks to which any line belongs. Ranks that only the kernel or a launcher names are left out. Cached: it is
        read for every error."""
        if not self._seen:
            self._seen.append(tuple(sorted({entry.rank for entry in self.lines if entry.rank is not None})))
        return self._seen[0]

    @property
    def ranks_with_errors(self) -> frozenset[int]:
        """Ranks that reported an exception or the loss of another rank."""
        reports = (entry for entry, _ in self.of_role("exception", "victim", "nccl", "root"))
        return frozenset(entry.rank for entry in reports if entry.rank is not None)

    @property
    def ranks_per_node(self) -> int:
        """Ranks per node in the launch command; 0 if none is printed."""
        return max((entry.number("nproc") or 0 for entry in self.of("launch_command")), default=0)

    @property
    def world_size(self) -> int | None:
        """The largest number of ranks in any line: NCCL's nranks, the rendezvous, the launch command, sizes of gathered
        tensors; None if no line has one."""
        sizes = [size for entry in self.lines if (size := entry.number("world_size"))]
        sizes += [
            nodes * self.ranks_per_node for entry in self.of("launch_command") if (nodes := entry.number("nnodes"))
        ]
        for entry in self.of("watchdog_timeout"):
            small, large = sorted((entry.number("numel_in") or 0, entry.number("numel_out") or 0))
            if (
                small
                and large > small
                and large % small == 0
                and entry.text("op").lower().strip("_").startswith(("allgather", "reduce_scatter", "all_gather"))
            ):
                sizes.append(large // small)
        return max((size for size in sizes if size), default=None)


def _split_attempts(lines: list[LogLine]) -> tuple[list[LogLine], list[LogLine]]:
    """In each file, separate the lines of the last attempt from the lines of earlier attempts, because only the last
    end is the job's. An attempt ends before

    1. a launcher's start that follows a scheduler's line on a job's end, or a launcher's table of failures: the job was
       queued or launched again, and appended to its log;
    2. a second start of the same node's launcher, or on a single node Rankscope's line on a resume;
    3. a restart by a launcher, if steps or an error follow it. Lost connections alone may belong to the earlier
       attempt;
    4. an exception that follows an error in the program's source or command line, because such an error ends every
       process of its start;
    5. the lines after a scheduler's line on the end of another job: all lines up to that line belong to the other job;
    6. the lines after a scheduler's line on a job's end, if the process's other stream shows a later start;
    7. torchrun's last attempt folder whose files show an end;
    8. a repetition of the file's first lines after a failure, if only one process writes the file (otherwise they may
       belong to another rank), and if steps or a long time separate the two.
    """
    files: dict[str, list[LogLine]] = {}
    twins: dict[str, set[str]] = {}
    for entry in lines:
        files.setdefault(entry.source, []).append(entry)
    for source in files:
        twins.setdefault(_STREAM.sub("", source), set()).add(source)
    ranks = {entry.rank for entry in lines if entry.rank is not None}
    is_alone = len(ranks) < 2 and (LogBook(tuple(lines)).world_size or 1) < 2
    starts = {(_STREAM.sub("", entry.source), entry.source): entry.wall_ns for entry in lines
              if entry.kind == "started" and entry.wall_ns is not None}  # fmt: skip
    begins = {source: _last_begin(found, is_alone=is_alone) for source, found in files.items()}
    for (stream, started), wall_ns in starts.items():
        for source in twins[stream] - {started}:
            begins[source] = max(begins[source], _after_end(files[source], wall_ns))
    earlier_files = _earlier_attempts(files)
    split: tuple[list[LogLine], list[LogLine]] = [], []
    for entry in lines:
        # A line that describes the job, such as its number of ranks, is kept: it holds for all attempts.
        is_earlier = (entry.line < begins[entry.source] or entry.source in earlier_files) and (
            (_ROLES[entry.kind] in (*_END_ROLES, "context") and entry.kind not in ("nccl_comm", "nodes", "restarted"))
            or entry.kind == "error_line"
        )
        split[is_earlier].append(entry)
    return split


def _earlier_attempts(files: Mapping[str, list[LogLine]]) -> set[str]:
    """Files in torchrun's folders `attempt_0`, `attempt_1`, ... before the last that shows how it ended."""
    attempts = {source: (match[1], int(match[2])) for source in files if (match := ATTEMPT.match(source))}
    last: dict[str, int] = {}
    for source, (job, number) in attempts.items():
        if any(_ROLES[entry.kind] in _END_ROLES for entry in files[source]):
            last[job] = max(last.get(job, 0), number)
    return {source for source, (job, number) in attempts.items() if number < last.get(job, 0)}


def _last_begin(lines: list[LogLine], *, is_alone: bool) -> int:
    """Line at which the last attempt of a file begins; 0 if the file has only one."""
    lines = sorted(lines, key=lambda entry: entry.line)
    stopped, begin = False, 0
    launches: Counter[int] = Counter()
    for entry in lines:
        if entry.kind in (*_SCHEDULER_ENDS, *_LAUNCHER_ENDS):
            stopped = True
        elif entry.kind == "started":
            node = entry.number("node")
            before = max(launches.values(), default=0)
            if node is not None:
                launches[node] += 1
            is_new = max(launches.values(), default=0) > max(before, 1) or (
                node is None and entry.text("how") + entry.text("environment") != ""
            )
            if stopped or is_new:
                begin = entry.line
            stopped = False
        elif entry.kind == "started_again" and is_alone:
            begin, stopped = entry.line, False
    restart = max((entry.line for entry in lines if entry.kind == "restarted"), default=0)
    trained_on = any(
        entry.line == restart and entry.kind == "restarted" and (entry.number("later_steps") or 0) >= SHARED.min_times
        for entry in lines
    )
    has_later_end = trained_on or any(
        entry.line > restart
        and _ROLES[entry.kind] in _END_ROLES
        and _ROLES[entry.kind] not in ("victim", "nccl")
        and "RendezvousClosedError" not in f"{entry.text('type')} {entry.message}"
        for entry in lines
    )
    return max(
        begin, _after_another_job(lines), _after_refused(lines) if is_alone else 0, restart if has_later_end else 0
    )


def _after_end(lines: list[LogLine], started_ns: int) -> int:
    """Line after a scheduler's last line on a job's end before a start; 0 if there is none."""
    ends = ((entry.line, entry.wall_ns or wall_ns_of(entry.text("at"))) for entry in lines
            if entry.kind in _SCHEDULER_ENDS)  # fmt: skip
    return max((line + 1 for line, wall_ns in ends if wall_ns is not None and wall_ns < started_ns), default=0)


def _after_refused(lines: list[LogLine]) -> int:
    """Line of the first exception with a traceback after the last of `_START_ERRORS`, which ended all processes of its
    start; 0 if there is none."""
    ends = [entry for entry in lines if entry.kind == "exception" and not entry.number("chained")]
    refused = [entry for entry in ends if entry.text("type") in _START_ERRORS]
    if not refused:
        return 0
    later = (entry for entry in ends if entry.line > refused[-1].line and entry.text("traceback")
             and entry.text("type") not in (*_START_ERRORS, "SystemExit"))  # fmt: skip
    return next((entry.line for entry in later), 0)


def _after_another_job(lines: list[LogLine]) -> int:
    """Line after the last end of a job other than the one that ended last; 0 if one job wrote the file."""
    ends = [(entry.line, entry.text("job").partition(".")[0]) for entry in lines if entry.kind == "slurm_cancelled"]
    ends = [(line, job) for line, job in ends if job]
    others = [line for line, job in ends if job != ends[-1][1]]
    return others[-1] + 1 if others and ends[-1][0] - others[-1] > SAME_END_LINES else 0


def _in_order(lines: Iterable[LogLine]) -> list[LogLine]:
    """Sort lines by time; a line without a time follows the line before it in its file."""
    by_file: dict[str, list[LogLine]] = {}
    for entry in lines:
        by_file.setdefault(entry.source, []).append(entry)
    keyed: list[tuple[int, str, int, LogLine]] = []
    for name, found in sorted(by_file.items()):
        found.sort(key=lambda entry: entry.line)
        last = min((entry.wall_ns for entry in found if entry.wall_ns is not None), default=0)
        for entry in found:
            last = max(last, entry.wall_ns or 0)
            keyed.append((last, name, entry.line, entry))
    keyed.sort(key=lambda key: key[:3])
    return [entry for *_, entry in keyed]
