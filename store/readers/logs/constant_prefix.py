"""Learn the prefix that all lines of a file share, for programs with an unknown format.

    pattern = common_prefix(lines)            # the longest prefix that nearly all of these sample lines share
    pattern = prefix_before(line, at)         # the text of one line before the known start of its message
    prefixes = LearnedPrefixes(clock)         # of one file: prefixes.learn(window), prefixes.read(line)

Numbers, stream and level may differ from line to line; other words may not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from store.readers.logs.line_filter import LINE_BYTES, begin_of_line, end_of_line
from store.readers.logs.prefix import Prefix, clean, read_prefix
from store.readers.logs.timestamps import Clock

__all__ = ["FRAME", "NEAR_LINES", "LearnedPrefixes", "common_prefix", "prefix_before"]

MAX_LENGTH = 120
"""Maximum characters of a prefix."""
MIN_LINES = 6
"""Minimum lines of different shapes; with fewer, a common prefix may be chance."""
MIN_SHARE = 0.9
MIN_LABELS = 3
"""Minimum lines with a process label."""
MIN_WORDS = 5
"""Number of different words that must follow the prefix: if all lines continue the same way, the start is part of the
message.
"""
MAX_TOKENS = 40
MAX_PREFIXES = 16
MAX_RECENT = 1200
"""The prefixes of this many lines are remembered: twice as many as a block may have."""
SAMPLE_BYTES = 64 << 10
SAMPLE_LINES = 200
NEAR_LINES = 6
"""Maximum lines from a traceback's first or last line to the nearest frame."""
FRAME = re.compile(r'(?: {2}|\t)File "[^"\n]{1,500}", line \d+')
"""Start of a frame in a Python traceback."""
_STRIPPED = re.compile(r'(?:(?<=[\]:|>-] )|(?<=INFO )|(?<=DEBUG )|(?<=ERROR ))File "[^"\n]{1,500}", line \d+')
"""Start of a frame that a log collector stripped of its indentation."""
_TOKEN = re.compile(r"\d+|[A-Za-z]+|\s+|.")
_STREAM = r"(?:stdout|stderr|out|err)"
_LEVEL = r"(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL|NOTICE|debug|info|warning|warn|error)"
_HAS_LEVEL = re.compile(rf"\b{_LEVEL}\b")
_KNOWN = re.compile(
    rf"- [\w.]{{1,40}} - {_LEVEL} - |(?=\S*\d)[a-z]\w*(?:-\w+)+ [a-z][\w-]{{0,40}}(?: |$)|"
    r"(?=[\w.-]*[A-Za-z])[\w.-]{2,63} +\| |"
    r"<\d{1,3}>1 \d{4}-\d\d-\d\dT\S{1,40} [\w.-]{1,80} \S{1,60} \S{1,20} \S{1,40} - "
)
"""Logger name and level (Python's logging); pod and container (stern); container (docker compose); RFC 5424 syslog
header."""
_RANK = re.compile(r"\[(?:rank|default)\d")
_RANK_PART = re.compile(r"\[(?:rank|default)\d{1,6}\]")
_TRACEBACK = "Traceback (most recent call last)"
_LAST_LINE = re.compile(r"(?:Error|Exception)\b")
_BOUNDARY = frozenset(":]|>)- ")
_LABEL = re.compile(r"\[(\d{1,6})\] ?(?=[^\]])")
"""A process label as `mpiexec -l` and Intel MPI write it before each line."""
_LABEL_OF_TASK = re.compile(r"\[(?P<task>\d{1,6})\] ?")
_LABEL_OF_ONE = re.compile(r"\[\d{1,6}\] ?")


class LearnedPrefixes:
    """Reads the prefixes of one file's lines: the known ones, and those learned from the file."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._learned: list[re.Pattern[str]] = []
        self._sample: dict[str, Prefix] = {}
        """{sample line: its prefix}, parsed with the known formats and the labels of processes."""
        self._recent: dict[str, Prefix] = {}
        """{line: its prefix} of the last `MAX_RECENT` lines. The lines below a traceback are read again, since lines of
        other ranks may lie between them."""
        self._frames_have_level = False

    def learn(self, window: bytes) -> list[str]:
        """Learn the prefix that lines at both ends of a file's first window share; returns the lines at its start."""
        lines = window[:SAMPLE_BYTES].split(b"\n")[:SAMPLE_LINES] + window[-SAMPLE_BYTES:].split(b"\n")[-SAMPLE_LINES:]
        texts = [clean(line[:LINE_BYTES]) for line in lines if b"\r" not in line.rstrip(b"\r")]
        self._add(_label([text for text in texts if text.strip()]))
        self._sample = {text: read_prefix(text, self._clock, self._learned) for text in dict.fromkeys(texts)}
        self._add(common_prefix([text[self._sample[text].length :].lstrip(" ") for text in texts]))
        return texts[: min(len(texts) // 2, SAMPLE_LINES)]  # the second half is from the end of the window

    @property
    def ranks(self) -> set[int]:
        """Ranks in the known prefixes of the sample."""
        return {prefix.rank for prefix in self._sample.values() if prefix.rank is not None}

    @property
    def tasks(self) -> set[int]:
        """srun's task labels in the sample; empty if many lines lack one, since a program may print such numbers."""
        tasks = [prefix.task for text, prefix in self._sample.items() if text.strip()]
        found = {task for task in tasks if task is not None}
        return found if tasks.count(None) <= (1 - MIN_SHARE) * len(tasks) else set()

    @property
    def has_level(self) -> bool:
        """Return True if a learned prefix, or the prefix of a traceback's frames, contains a log level. A level in such
        a prefix is the log collector's, not the message's.
        """
        return self._frames_have_level or any("DEBUG" in one.pattern for one in self._learned)

    def read(self, text: str) -> Prefix:
        """Parse the prefix of a line that `clean` returned."""
        known = self._recent.get(text) or (None if self._learned else self._sample.get(text))
        if known is None:
            known = self._recent[text] = read_prefix(text, self._clock, self._learned)
            if len(self._recent) > MAX_RECENT:
                del self._recent[next(iter(self._recent))]
        return known

    def learn_from(self, window: bytes, begin: int, text: str) -> None:
        """Learn a prefix from a traceback: text before its first line also precedes its frames."""
        if len(self._learned) >= MAX_PREFIXES:
            return
        at = text.find(_TRACEBACK)
        place = end_of_line(window, begin) if at >= 0 else begin - 1
        if at < 0 and not _LAST_LINE.search(text):
            return
        frame: str | None = None
        for _ in range(NEAR_LINES):
            if at >= 0:
                first = place + 1
                place = end_of_line(window, first) if first < len(window) else len(window)
            else:
                first = begin_of_line(window, place - 1) if place > 0 else 0
                place = first - 1
            if not 0 <= first < len(window):
                break
            near = clean(window[first : end_of_line(window, first)])
            if match := FRAME.search(near) or _STRIPPED.search(near):
                frame = near[: match.start()]
                break
        if frame is None:
            return
        known = read_prefix(frame, self._clock, self._learned).length
        self._frames_have_level |= _HAS_LEVEL.search(frame[:known]) is not None
        before = frame[known:].lstrip(" ")
        rank = _RANK_PART.search(before)  # the constant prefix ends before the rank, which varies from line to line
        self._add(prefix_before(before, rank.start() if rank else len(frame)))

    def _add(self, pattern: re.Pattern[str] | None) -> None:
        if pattern is not None and all(pattern.pattern != one.pattern for one in self._learned):
            self._learned.append(pattern)
            self._recent.clear()


def _label(lines: Sequence[str]) -> re.Pattern[str] | None:
    """Pattern of the label `[3] ` at the start of nearly all lines; None if there is none, or if the numbers only grow,
    since epochs and steps are printed in the same way. A single number is a prefix, but says nothing of the process.
    """
    numbers = [int(found[1]) for line in lines if (found := _LABEL.match(line))]
    if len(numbers) < MIN_LABELS or len(numbers) < MIN_SHARE * len(lines):
        return None
    if len(set(numbers)) == 1:
        return _LABEL_OF_ONE
    are_mixed = sum(later < earlier for earlier, later in pairwise(numbers)) > 1
    return _LABEL_OF_TASK if are_mixed and 2 * len(set(numbers)) <= len(numbers) else None


def common_prefix(lines: Sequence[str]) -> re.Pattern[str] | None:
    """Return the longest prefix that nearly all lines share and that different words follow; None if there is none."""
    by_shape = {re.sub(r"\d+", "0", line)[:200]: line for line in lines if line.strip()}
    rest = list(by_shape.values())
    for first in rest[:3] if len(rest) >= MIN_LINES else ():
        found = _longest(first, rest)
        if found is not None:
            return found
    return _known_prefix(rest)


def _known_prefix(lines: Sequence[str]) -> re.Pattern[str] | None:
    """Return the prefix of a known logger or collector if all lines have it. Used if there are too few lines to learn a
    prefix.
    """
    found = [_pattern(match[0].rstrip()) if (match := _KNOWN.match(line)) else "" for line in lines]
    return re.compile(found[0]) if found and found[0] and all(one == found[0] for one in found) else None


def _longest(first: str, lines: Sequence[str]) -> re.Pattern[str] | None:
    found: re.Pattern[str] | None = None
    text = ""
    num_words = 0
    rank = _RANK.search(first[:MAX_LENGTH])  # the constant prefix ends before the rank, which varies from line to line
    for token in _TOKEN.findall(first[: rank.start() if rank else MAX_LENGTH])[:MAX_TOKENS]:
        if found is not None and token.isspace() and len(token) > 1:
            break  # the indentation belongs to the message
        text += _generalised(token)
        num_words += token.isalpha()
        pattern = re.compile(text)
        ends = [match.end() for line in lines if (match := pattern.match(line))]
        if len(ends) < MIN_SHARE * len(lines):
            break
        if token[-1] in _BOUNDARY and num_words:
            following = {line[pattern.match(line).end() :].lstrip().split(" ", 1)[0] for line in lines  # type: ignore[union-attr]
                         if pattern.match(line)}  # fmt: skip
            if len(following) >= MIN_WORDS:
                found = re.compile(text.removesuffix(r"\s+") if token.isspace() else text)
    return found


def prefix_before(text: str, at: int) -> re.Pattern[str] | None:
    """Pattern for the text before offset `at`, at which the message of the line begins."""
    before = text[:at].rstrip()
    if not before or len(before) > MAX_LENGTH or not re.search(r"[A-Za-z|\]>:]", before) or "%|" in before:
        return None
    return re.compile(_pattern(before))


def _pattern(text: str) -> str:
    return "".join(map(_generalised, _TOKEN.findall(text)))


def _generalised(token: str) -> str:
    if token.isdigit():
        return r"\d+"
    if token.isspace():
        return r"\s+"
    for one in (_STREAM, _LEVEL):
        if re.fullmatch(one, token):
            return one
    return re.escape(token)
