"""Detect restarts of a program that appends to the same log, by repetitions of the log's first lines.

    starts = Starts()
    starts.learn(texts)                       # the messages of the file's first lines
    starts.literal                            # bytes to search for; empty if these lines are not distinctive
    starts.note_failure(120)                  # a line that may report the program's end
    starts.restart(text, following, 300, wall_ns, steps)  # {"steps_before": 80} if line 300 is another start

Two lines are compared in order and without numbers, because job ids, pids and times differ between starts.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice

__all__ = ["Starts"]

MIN_CHARS = 12
"""Minimum length of the part of a line that is searched for."""
MAX_BETWEEN = 3
"""The second line must occur within this many lines after the first."""
APART_S = 60.0
"""Minimum seconds between two starts: processes of one start print their first lines within this time."""
_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|\d+")
_WORD = re.compile(r"[A-Za-z]{3}")
_REPEATED = re.compile(r"warn|deprecat|error|exception|traceback|epoch|step|iter|loss|\d+%\|", re.IGNORECASE)
"""Parts of lines that programs print repeatedly, or on a failure."""


class Starts:
    """The first two distinctive lines of a file, and what has been read since they last occurred."""

    def __init__(self) -> None:
        self.literal = b""
        self._first = self._second = ""
        self._since = self._failed = 0
        self._since_ns: int | None = None

    def learn(self, messages: Iterable[str]) -> None:
        """Choose the two lines from the file's first lines."""
        found: dict[str, str] = {}
        for message in messages:
            text = message.strip()
            if "Traceback (most" in text:
                return
            if message[:2].isspace() or _REPEATED.search(text) or len(_WORD.findall(text)) < 2:
                continue
            if found or max(map(len, _VARIABLE.split(text))) >= MIN_CHARS:
                found.setdefault(_plain(text), text)
            if len(found) == 2:
                self._first, self._second = found
                self.literal = max(_VARIABLE.split(found[self._first]), key=len).encode()
                return

    def note_failure(self, line: int) -> None:
        """Note a line that reports a failure."""
        self._failed = line

    def restart(
        self, message: str, following: Iterable[str], line: int, wall_ns: int | None, step_lines: Sequence[int]
    ) -> dict[str, int] | None:
        """Return the steps since the last start if this line is another start: there must have been a failure, and
        steps or time, in between.
        """
        if _plain(message) != self._first or all(
            _plain(text) != self._second for text in islice(following, MAX_BETWEEN)
        ):
            return None
        (since, since_ns), (self._since, self._since_ns) = (self._since, self._since_ns), (line, wall_ns)
        if not since or self._failed <= since:
            return None
        steps = len(step_lines) - bisect_right(step_lines, since)
        apart_s = (wall_ns - since_ns) / 1e9 if since_ns is not None and wall_ns is not None else 0.0
        return {"steps_before": steps} if steps or apart_s >= APART_S else None


def _plain(message: str) -> str:
    return _VARIABLE.sub("#", message.strip())
