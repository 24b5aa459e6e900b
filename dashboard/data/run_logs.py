"""Lines printed by the processes of a run, each with its rank and, if it can be determined, its step.

    found = run_logs(store, "runs/demo-20260101-120000")
    found.lines[0].rank, found.lines[0].step, found.lines[0].step_from, found.lines[0].text

The ends of the regular files below `logs` in the run's folder are read. A line belongs to the step that it names, or to
the step of its rank in which its timestamp lies. Lines without either belong to the step of the line above them. If no
line gives a step for the end of a file (a traceback, or the last line), the file's modification time does.
"""

from __future__ import annotations

import os
import re
import stat
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from analyzers.source import Source, ints
from probes.tape.files.safe_open import folder_problem, read_plain
from store.readers.logs.file_names import rank_of_log
from store.readers.logs.prefix import clean, read_prefix
from store.readers.logs.step_lines import step_of
from store.readers.logs.timestamps import Clock

__all__ = ["LogLine", "RunLogs", "lines_at", "run_logs"]

WATCH = "watch-node"
"""Prefix of the names of the logs of `watch`."""
MAX_FILES = 4_096
MAX_FILE_BYTES = 1 << 20
MAX_BYTES = 24 << 20
"""Maximum bytes over all files; beyond that, each file contributes a shorter tail."""
MIN_FILE_BYTES = 4 << 10
MAX_LINE_CHARS = 2_000
SLACK_NS = 60 * 10**9
"""A file modified later than this after the run's last event counts as a copy; its modification time is not used."""
TRACEBACK = "Traceback (most recent call last)"
_ATTEMPT = re.compile(r"attempt[-_](\d{1,6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line. `step_from`: source of `step`: line, time, above (the line above), last write; empty: not known."""

    source: str
    line: int
    attempt: int | None
    rank: int | None
    text: str
    wall_ns: int | None = None
    step: int | None = None
    step_from: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLogs:
    """Lines in order of files, and what was not read."""

    lines: tuple[LogLine, ...] = ()
    num_files: int = 0
    """Number of files found. Empty files count, files of `watch` do not."""
    num_cut: int = 0
    """Number of files that were read only at their end."""
    problems: tuple[str, ...] = ()


def run_logs(source: Source, path: str) -> RunLogs:
    """Read the lines of a run's logs. Unsafe or unreadable files are listed in `problems`."""
    folder = Path(path) / "logs"
    if problem := folder_problem(folder):
        return RunLogs(problems=(f"logs: {problem}",))
    files = list(_plain_files(folder))
    limit = max(MIN_FILE_BYTES, min(MAX_FILE_BYTES, MAX_BYTES // max(1, len(files))))
    clocks = _StepClocks(source)
    lines: list[LogLine] = []
    problems: list[str] = []
    num_cut = 0
    for file, num_bytes, written_ns in files[:MAX_FILES]:
        name = file.relative_to(folder).as_posix()
        try:
            content = read_plain(file, limit, max(0, num_bytes - limit))
        except OSError as error:
            problems.append(f"logs/{name}: {error.strerror or error}")
            continue
        num_cut += num_bytes > limit
        lines += _with_end(
            list(_aligned(_lines_of(name, content, is_cut=num_bytes > limit), clocks)), written_ns, clocks
        )
    if len(files) > MAX_FILES:
        problems.append(f"{len(files) - MAX_FILES:,} more files were not read")
    return RunLogs(
        lines=tuple(lines),
        num_files=sum(not file.name.startswith(WATCH) for file, *_ in files),
        num_cut=num_cut,
        problems=tuple(problems),
    )


def lines_at(lines: Sequence[LogLine], *, rank: int, step: int, attempt: int) -> list[LogLine]:
    """Lines that a rank printed in one step of an attempt. Files without an attempt in their name match any attempt."""
    return [line for line in lines if (line.rank, line.step) == (rank, step) and line.attempt in (None, attempt)]


def _plain_files(folder: Path) -> Iterator[tuple[Path, int, int]]:
    """Yield (path, size, modification time) of regular files, two folders deep. Links are skipped, because they may
    lead out of the run.

    JSON files are skipped, since a `rank-00000.error.json` repeats the traceback in the log.
    """
    for parent, folders, names in os.walk(folder):
        depth = len(Path(parent).relative_to(folder).parts)
        folders[:] = sorted(folders) if depth < 2 else []
        for name in sorted(names):
            try:
                found = (Path(parent) / name).lstat()
            except OSError:
                continue
            if stat.S_ISREG(found.st_mode) and not name.endswith(".json"):
                yield Path(parent) / name, found.st_size, found.st_mtime_ns


def _lines_of(name: str, content: bytes, *, is_cut: bool) -> Iterator[LogLine]:
    """Lines of one file, numbered from the start of the part that was read."""
    attempt = _ATTEMPT.search(name)
    rank = rank_of_log(Path(name))
    clock = Clock(year=1970)
    raw = content.replace(b"\r\n", b"\n").split(b"\n")
    for number, line in enumerate(raw[1:] if is_cut else raw, 1):
        text = clean(line.rsplit(b"\r", 1)[-1][: 4 * MAX_LINE_CHARS])
        if not text.strip():
            continue
        prefix = read_prefix(text, clock)
        step = step_of(text)
        yield LogLine(
            source=name, line=number, attempt=int(attempt[1]) if attempt else None,
            rank=prefix.rank if rank is None else rank, text=text[:MAX_LINE_CHARS].rstrip(),
            wall_ns=prefix.wall_ns if prefix.wall_ns and prefix.wall_ns > 10**18 else None,
            step=step, step_from="line" if step is not None else "",
        )  # fmt: skip


def _aligned(lines: Iterator[LogLine], clocks: _StepClocks) -> Iterator[LogLine]:
    """Add the step from the line's timestamp, or from the line above it in the same file."""
    above: int | None = None
    for line in lines:
        if line.step is None and line.wall_ns is not None and line.rank is not None:
            above = clocks.step(line.attempt, line.rank, line.wall_ns)
            line = replace(line, step=above, step_from="" if above is None else "time")
        elif line.step is None and above is not None:
            line = replace(line, step=above, step_from="above")
        above = line.step
        yield line


def _with_end(lines: list[LogLine], written_ns: int, clocks: _StepClocks) -> list[LogLine]:
    """Assign the end of a file to the step in which the file was last written."""
    rank = lines[-1].rank if lines else None
    if rank is None or lines[-1].step is not None or written_ns > clocks.last_event_ns + SLACK_NS:
        return lines
    step = clocks.step(lines[-1].attempt, rank, written_ns)
    first = max((i for i, line in enumerate(lines) if TRACEBACK in line.text), default=len(lines) - 1)
    if step is None or any(line.step is not None for line in lines[first:]):
        return lines
    return lines[:first] + [replace(line, step=step, step_from="last write") for line in lines[first:]]


class _StepClocks:
    """Start times of the steps of each rank, read once per rank."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._has_steps = source.has("steps")
        self._known: dict[tuple[int | None, int], tuple[list[int], list[int], int]] = {}
        rows = source.rows("SELECT max(wall_ns) FROM events") if source.has("events") else [(None,)]
        self.last_event_ns = int(rows[0][0] or 0)

    def step(self, attempt: int | None, rank: int, wall_ns: int) -> int | None:
        """The step that the rank was in; None before its first and after its last record."""
        if not self._has_steps:
            return None
        key = (attempt, rank)
        if key not in self._known:
            self._known[key] = self._read(attempt, rank)
        starts, steps, end_ns = self._known[key]
        num_started = bisect_right(starts, wall_ns)
        return steps[num_started - 1] if num_started and wall_ns <= end_ns else None

    def _read(self, attempt: int | None, rank: int) -> tuple[list[int], list[int], int]:
        found = self._source.query(
            "SELECT step, start_ns, duration_ns FROM steps WHERE rank = ? AND (? IS NULL OR attempt = ?) "
            "ORDER BY start_ns",
            [rank, attempt, attempt],
        )
        starts = ints(found["start_ns"]).tolist()
        last_ns = int(ints(found["duration_ns"])[-1]) if starts else -1
        # A rank whose last step never ended is in that step until the end of the run's records.
        open_until_ns = max(self.last_event_ns, starts[-1] if starts else 0) + SLACK_NS
        end_ns = open_until_ns if last_ns < 0 else starts[-1] + last_ns
        return starts, ints(found["step"]).tolist(), end_ns
