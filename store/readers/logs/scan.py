"""Scan one text log in chunks: lines that match a rule become events, lines with a loss become steps.

    log = read_log(path)
    log.events[0].kind, log.events[0].rank, log.events[0].fields

0. UTF-16, colours and JSON lines are converted to plain text first (`plain_text`).
1. Chunks of 4 MiB are searched for all rules' literals in a few passes. Only lines with a literal are decoded and
   matched.
2. Memory is bounded: lines are cut at 16 KiB, and a literal with too many hits is reported and no longer searched for.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from store.readers.logs.blocks.exceptions import (
    MAX_LINES,
    frames_above,
    rank_in_head,
    read_error_file,
    read_last_line,
    read_quoted_traceback,
    read_terminate,
    read_traceback,
)
from store.readers.logs.blocks.reports import READERS_OF_BLOCK, READERS_OF_LINE, READERS_OF_LINE_AND_BLOCK, read_frames
from store.readers.logs.blocks.wrapped import unwrapped
from store.readers.logs.constant_prefix import NEAR_LINES, LearnedPrefixes
from store.readers.logs.file_names import rank_of_log
from store.readers.logs.line_filter import (
    LONG_LINE_BYTES,
    LineFilter,
    WindowLines,
    begin_of_line,
    end_of_line,
)
from store.readers.logs.log_file import LogEvent, LogStep, ReadLog
from store.readers.logs.opening import Starts
from store.readers.logs.plain_text import CHUNK_BYTES, is_endless, plain_chunks, windows
from store.readers.logs.prefix import Prefix, clean, start_after_bar
from store.readers.logs.rules import Rule, continues, field_value, is_claim, most_specific, rules_by_literal
from store.readers.logs.step_lines import LITERALS, StepLine, epoch_heading_of, heading_of, read_step
from store.readers.logs.timestamps import Clock
from store.readers.untrusted.external_files import SourceError, modified_ns, unpacked

__all__ = ["read_log"]

MAX_UNPACKED_BYTES = 64 << 30
MAX_HITS = 20_000
"""Maximum hits of one literal in one file."""
MAX_STARTS = 5_000
"""Maximum number of repetitions of a file's first line that are examined as possible restarts of the program."""
TAIL_BYTES = 3_000
MAX_STEP_LINES = 200_000
KEPT_OF_A_KIND = 40
"""Maximum events kept per kind and writer: further repeats of a warning add nothing."""
KEPT_LAST = 10
"""Number of newest events kept in addition, for errors and other kinds that show how the process ended."""
MAX_EVENTS = 60_000
LATER_LINES = 1_000
"""If so many lines follow an error, the program continued. A program that is ending prints fewer."""
FINITE_STEPS = 3
"""If at least this many finite losses follow a line about NaN, the job continued and its loss was finite."""
HEADING_LINES = 40
"""Lines below a step heading that may hold its values."""
EPOCH_LINES = 500
"""Lines below an epoch's heading that may hold its losses."""
ABOVE_LINES = 60
"""Lines above the last line of a traceback that may be its frames."""

_RESTART = Rule(kind="started_again", role="context", literals=(), source="the first lines of the file again")
_NAMES = ("host", "node", "address")
"""Fields that hold the name of a machine. Published logs may have dots in its place."""
_FAILURES = ("root", "victim", "hang", "death", "outside", "nccl", "exception")
"""Roles of lines that may report a program's end. The kind "finished" does so, too."""
_KEPT_KINDS = ("error_line", "working", "in_thread", "quorum")
"""Further kinds whose newest events are kept."""


def read_log(path: Path, *, year: int | None = None, progress: Callable[[int], None] | None = None) -> ReadLog:
    """Read one log. `year`: the year of times that are printed without one. The default is the year in which the file
    was last modified. `progress` is called with the bytes done so far. No content raises an error.
    """
    year = year or time.gmtime((modified_ns(path) or time.time_ns()) / 1e9).tm_year
    clock = Clock(year=year)
    scan = _Scan(ReadLog(path=path, rank=rank_of_log(path), year=year, years=clock.years), clock)
    try:
        for window, end in windows(plain_chunks(unpacked(path, MAX_UNPACKED_BYTES))):
            scan.take(window, end)
            if progress is not None:
                progress(scan.log.num_bytes)
    except SourceError as error:
        scan.log.problem = str(error)
    scan.finish()
    return scan.log


class _Scan:
    """State of scanning one file."""

    def __init__(self, log: ReadLog, clock: Clock) -> None:
        self.log = log
        self._hits: Counter[bytes] = Counter()
        self._kept: Counter[tuple[Any, ...]] = Counter()
        self._last: dict[tuple[Any, ...], deque[LogEvent]] = {}
        self._newest_step: int | None = None
        self._heading: tuple[int, tuple[int, int | None], Prefix] | None = None
        """Line number, step and prefix of the newest heading of a step. The step's values follow the heading."""
        self._epoch: tuple[int, int] | None = None
        """Line number and epoch of the newest heading that states nothing else."""
        self._step_lines: list[int] = []
        """Line numbers of new steps."""
        self._steps_before: dict[int, int] = {}
        """Number of steps read before each line about NaN or the end of a training."""
        self._prefixes = LearnedPrefixes(clock)
        self._starts = Starts()
        self._is_in_line = False
        self._filter = LineFilter(rules_by_literal()[0])
        self._step_filter = LineFilter(LITERALS)

    def take(self, window: bytes, end: int) -> None:
        """Read the lines that begin before `end`."""
        if not window:
            self.log.num_bytes += end
            return
        if not self.log.num_bytes:
            window = unwrapped(window) if end == len(window) else window
            lines = self._prefixes.learn(window)
            self.log.printed |= self._prefixes.ranks
            self.log.tasks |= self._prefixes.tasks
            self._starts.learn(text[self._prefixes.read(text).length :] for text in lines)
        counted, at = self.log.num_lines, 0
        for begin, rules in sorted(self._lines(window, end).items()):
            counted += window.count(b"\n", at, begin)
            at = begin
            self._line(window, begin, counted + 1, rules)
        self._is_in_line = is_endless(window)
        is_cut_line = end == len(window) and not window.endswith(b"\n") and not self._is_in_line
        self.log.num_lines = counted + window.count(b"\n", at, end) + is_cut_line
        self.log.num_bytes += end
        if self._is_in_line:
            what = f"line {self.log.num_lines + 1:,} is longer than {CHUNK_BYTES >> 20} MiB"
            self.log.given_up.append(f"{what}: the rest of it was not read")
        self.log.tail = window[max(0, end - TAIL_BYTES) : end]

    def _lines(self, window: bytes, end: int) -> dict[int, list[Rule | None]]:
        """Return {offset of a line: rules with a literal in it}; None instead of a rule marks a line with a step."""
        found: dict[int, list[Rule | None]] = {}
        if len(window) <= LONG_LINE_BYTES:  # compiling the automata would take longer than the search
            literals, rules, index = rules_by_literal()
            for place in index.literals_in(window):
                self._find(window, 0, end, literals[place], rules[place], found)
            for literal in LITERALS:
                self._find(window, 0, end, literal, None, found)
        else:
            self._filtered(window, end, found)
        if self._starts.literal:
            self._find(window, 0, end, self._starts.literal, _RESTART, found)
        return found

    def _filtered(self, window: bytes, end: int, found: dict[int, list[Rule | None]]) -> None:
        """Add the lines of a long window that contain a literal."""
        literals, rules, index = rules_by_literal()
        split = WindowLines(window, end)
        for first, last in self._filter.lines(split):
            for place in index.literals_in(window[first:last]):
                self._find(window, first, last, literals[place], rules[place], found)
        for first, last in self._step_filter.lines(split):
            line = window[first:last]
            for literal in LITERALS:
                if literal in line:
                    self._find(window, first, last, literal, None, found)

    def _find(
        self, window: bytes, first: int, last: int, literal: bytes, rule: Rule | None,
        found: dict[int, list[Rule | None]],
    ) -> None:  # fmt: skip
        """Add the lines between two offsets that contain a literal."""
        place = window.find(literal, first, last)
        if place < 0:
            return
        limit = MAX_STEP_LINES if rule is None else MAX_STARTS if rule is _RESTART else MAX_HITS
        while place >= 0 and self._hits[literal] < limit:
            begin = begin_of_line(window, place)
            rules = found.setdefault(begin, [])
            if rule not in rules:
                rules.append(rule)
            self._hits[literal] += 1
            if self._hits[literal] == limit:
                if rule is None or (rule.role != "hint" and rule is not _RESTART):
                    reason = f"more than {limit:,} lines with {literal.decode()!r}: the rest were not read"
                    self.log.given_up.append(reason)
                (self._filter if rule is not None else self._step_filter).drop(literal)
            place = window.find(literal, end_of_line(window, place), last)

    def _line(self, window: bytes, begin: int, number: int, rules: list[Rule | None]) -> None:
        line_end = end_of_line(window, begin)
        text = clean(window[begin:line_end])
        if rules != [None]:
            self._prefixes.learn_from(window, begin, text)
        prefix = self._prefixes.read(text)
        whole = (text, prefix)
        if prefix.rank is None and (start := start_after_bar(text, prefix.length)):
            self._bar(number, text[:start], prefix)
            text = text[start:]
            prefix = replace(self._prefixes.read(text), wall_ns=prefix.wall_ns)
        for rule in sorted(most_specific(rules, window[begin:line_end]), key=lambda rule: rule is not None):
            if rule is None:
                self._step(number, text, prefix)
            elif not rule.requires or rule.requires in text:
                self._event(window, line_end, number, *(whole if rule.kind == "working" else (text, prefix)), rule)

    def _bar(self, number: int, text: str, prefix: Prefix) -> None:
        """Read a progress bar at the start of a line that continues with another message."""
        if "it/s" in text or "s/it" in text:
            self._step(number, text, prefix)

    def _step(self, number: int, text: str, prefix: Prefix) -> None:
        if ("[step=" in text or "][batch=" in text) and (heading := heading_of(text)) is not None:
            self._heading = (number, heading, prefix)
            return
        if "poch" in text and (epoch := epoch_heading_of(text[prefix.length :])) is not None:
            self._epoch = (number, epoch)
            return
        is_below = (
            self._heading is not None and text[:2] in ("  ", "\t ") and number - self._heading[0] <= HEADING_LINES
        )
        epoch_above = self._epoch[1] if self._epoch and number - self._epoch[0] <= EPOCH_LINES else None
        step_line = read_step(text, self._heading[1] if is_below and self._heading else None, epoch_above)
        prefix = self._heading[2] if is_below and self._heading else prefix
        if prefix.rank is not None:
            self.log.printed.add(prefix.rank)
        if step_line is not None:
            at = step_line.step if step_line.step is not None else step_line.bar.step if step_line.bar else None
            self._newest_step = self._newest_step if at is None else at
            if self._is_new(step_line):
                self._step_lines.append(number)
                self.log.first_step_line = self.log.first_step_line or number
                self.log.last_step_line = number
            self.log.steps.append(LogStep(prefix=prefix, step_line=step_line))

    def _is_new(self, step_line: StepLine) -> bool:
        """Return True if the step differs from the previous line's step. Bars are redrawn many times per step."""
        if not self.log.steps:
            return True
        last = self.log.steps[-1].step_line
        if step_line.bar is not None and step_line.loss is None:
            return last.bar is not None and step_line.bar.step > last.bar.step and step_line.bar.total == last.bar.total
        return step_line.step is None or step_line.step != last.step

    def finish(self) -> None:
        """Append the newest exceptions, and add to each event what follows it in the file: losses, steps, lines."""
        self.log.num_lines += self._is_in_line
        self.log.events += sorted((event for last in self._last.values() for event in last), key=lambda one: one.line)
        for event in self.log.events:
            losses = self._losses_after(event)
            if event.role == "numerics" and len(losses) >= FINITE_STEPS and all(map(math.isfinite, losses)):
                event.fields["stays_finite"] = 1
            if event.kind == "finished" and losses:
                event.fields["later_losses"] = len(losses)
            later = len(self._step_lines) - bisect_right(self._step_lines, event.line)
            if later:
                event.fields["later_steps"] = later
                if event.kind == "exception" and self._begins_again(event.line):
                    event.fields["begins_again"] = 1
            if self.log.num_lines - event.line >= LATER_LINES:
                event.fields["later_lines"] = self.log.num_lines - event.line

    def _losses_after(self, event: LogEvent) -> list[float]:
        """Losses below a line that reports the end of a training, or a value that is not finite."""
        if event.role != "numerics" and event.kind != "finished":
            return []
        later = self.log.steps[self._steps_before.get(event.line, 0) :]
        return [step.step_line.loss for step in later if step.step_line.loss is not None]

    def _begins_again(self, line: int) -> bool:
        """Return True if another training starts after a line: the line precedes all steps, or the next step is at or
        before the file's first step.
        """
        place = bisect_right(self._step_lines, line)
        if len(self.log.steps) != len(self._step_lines):
            return False
        first, after = (_number(self.log.steps[number].step_line) for number in (0, place))
        return place == 0 or (first is not None and after is not None and after <= first)

    def _event(self, window: bytes, line_end: int, number: int, text: str, prefix: Prefix, rule: Rule) -> None:
        key = (rule.kind, prefix.stream)
        is_full = self._kept[key] >= KEPT_OF_A_KIND
        is_kept = rule.role in _FAILURES or rule.kind in _KEPT_KINDS
        if len(self.log.events) >= MAX_EVENTS or (is_full and not is_kept):
            return
        if not is_claim(text, prefix.length, rule):
            return
        fields = self._fields(window, line_end, number, text, prefix, rule)
        if fields is None:
            return
        if rule.role in _FAILURES or rule.kind == "finished":
            self._starts.note_failure(number)
        if self._newest_step is not None:
            fields.setdefault("after_step", self._newest_step)
        if rule.role == "numerics" or rule.kind == "finished":
            self._steps_before[number] = len(self.log.steps)
        # A level in the log collector's prefix says nothing about the message, so the search starts after the prefix.
        is_collected = self._prefixes.has_level and "WARN" not in text[: prefix.length]
        if continues(text, prefix.length if is_collected else 0, rule):
            fields.setdefault("is_warning", 1)
        event = LogEvent(
            kind=rule.kind,
            role=rule.role,
            cause=rule.cause,
            line=number,
            prefix=prefix,
            message=text[prefix.length :].strip()[:600],
            fields=fields,
        )
        if is_full:
            self._last.setdefault(key, deque(maxlen=KEPT_LAST)).append(event)
        else:
            self._kept[key] += 1
            self.log.events.append(event)

    def _fields(
        self, window: bytes, line_end: int, number: int, text: str, prefix: Prefix, rule: Rule
    ) -> dict[str, Any] | None:
        if rule is _RESTART:
            texts = (near for _, near in self._following(window, line_end))
            return self._starts.restart(text[prefix.length :], texts, number, prefix.wall_ns, self._step_lines)
        if rule.block == "traceback":
            quoted = read_quoted_traceback(text, prefix)
            found = quoted or read_traceback(self._following(window, line_end), prefix, text)
            return found and {**rank_in_head(self._before(window, line_end), prefix), **found}
        if rule.block in READERS_OF_BLOCK:
            return READERS_OF_BLOCK[rule.block](self._following(window, line_end))
        if rule.block == "terminate":
            return read_terminate(text, self._following(window, line_end), prefix)
        if rule.block in READERS_OF_LINE_AND_BLOCK:
            return READERS_OF_LINE_AND_BLOCK[rule.block](text, self._following(window, line_end))
        if rule.block in READERS_OF_LINE:
            return READERS_OF_LINE[rule.block](text[prefix.length :].lstrip(" "))
        if rule.block == "raised":
            found = read_last_line(text[prefix.length :], self._following(window, line_end), prefix)
            above = partial(self._before, window, line_end)
            return found and {**rank_in_head(above(), prefix), **found, "traceback": frames_above(above(), prefix)}
        if rule.block == "error_file":
            return read_error_file(text[prefix.length :], self._following(window, line_end), prefix)
        if rule.pattern is None:
            return {}
        match = rule.pattern.search(text, prefix.length if rule.kind == "working" else 0) or rule.pattern.search(
            text[prefix.length :].lstrip()
        )
        if match is None and rule.role != "hint":  # a terminal may have wrapped the line
            following = next(self._following(window, line_end), None)
            if following and not rule.pattern.search(following[1]):  # otherwise it is a message of its own
                match = rule.pattern.search(text.rstrip() + following[1].strip())
            rest = islice(self._following(window, line_end), 1, NEAR_LINES)
            if match is None and rule.role == "hang" and not any(line.strip() for _, line in rest):
                return {"is_cut": 1}  # the file ends before this block is complete
        if match is None:
            return None
        fields = {name: field_value(value) for name, value in match.groupdict().items()
                  if value and (name not in _NAMES or any(map(str.isalnum, value)))}  # fmt: skip
        return fields | (read_frames(self._following(window, line_end)) if rule.block == "frames" else {})

    def _before(self, window: bytes, at: int) -> Iterator[tuple[Prefix, str]]:
        """Lines above the line that ends at an offset, the nearest first."""
        begin = begin_of_line(window, at - 1) if at else 0
        for _ in range(ABOVE_LINES):
            if begin <= 0:
                return
            begin, end = begin_of_line(window, begin - 1), begin - 1
            text = clean(window[begin:end])
            prefix = self._prefixes.read(text)
            rest = text[prefix.length :]
            yield prefix, rest[1:] if prefix.length and rest[:1] == " " else rest

    def _following(self, window: bytes, at: int) -> Iterator[tuple[Prefix, str]]:
        for _ in range(MAX_LINES):
            begin = at + 1
            if begin >= len(window):
                return
            at = end_of_line(window, begin)
            text = clean(window[begin:at])
            prefix = self._prefixes.read(text)
            rest = text[prefix.length :]
            yield prefix, rest[1:] if prefix.length and rest[:1] == " " else rest


def _number(line: StepLine) -> float | None:
    return line.step if line.step is not None else line.bar.step if line.bar is not None else line.epoch
