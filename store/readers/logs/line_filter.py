"""Find the lines of a log that may contain one of many literals, in few passes, and the literals in each line.

    wanted = LineFilter(literals)
    for begin, end in wanted.lines(WindowLines(window, end)): ...
    LiteralIndex(literals).literals_in(b"a line")   # ascending indices into `literals`

pyarrow's RE2 automata search a window for many literals at once. Searching for each of some seven hundred literals
separately takes fifteen times as long, and so does one automaton for all, which exceeds RE2's memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np

__all__ = ["LINE_BYTES", "LONG_LINE_BYTES", "LineFilter", "LiteralIndex", "WindowLines", "begin_of_line", "end_of_line"]

LINE_BYTES = 16 << 10
"""Longer lines are cut to this length."""

_NEWLINE = 10
_PATTERN_BYTES = 7_500
"""Maximum bytes of literals per automaton. Beyond 8 MiB of states, RE2 is forty times slower: 9,000 bytes of literals
stay below that, 18,000 do not. Each automaton is a pass over the bytes, so few large ones are best.
"""

_CUT_BYTES = 12
"""Length to which the automata cut each literal. Shorter cuts need fewer automata but match more irrelevant lines: in
healthy logs 12 bytes match as few as whole literals, 10 bytes three times as many."""

_PART_BYTES = 4
"""Length of the substring by which a literal is indexed. It is the one that the fewest other literals share."""
LONG_LINE_BYTES = 64 << 10
"""Longer texts are searched for each literal in turn, because the set of all their substrings would take too much
memory."""


class LiteralIndex:
    """Finds the literals in a line. A literal is searched for only if its indexed substring occurs in the line."""

    def __init__(self, literals: Sequence[bytes]) -> None:
        self._literals = tuple(literals)
        counts = Counter(part for literal in set(literals) for part in _parts(literal))
        self._places: dict[bytes, list[int]] = {}
        self._short = [place for place, literal in enumerate(literals) if len(literal) < _PART_BYTES]
        for place, literal in enumerate(literals):
            if len(literal) >= _PART_BYTES:
                rarest = min(sorted(_parts(literal)), key=lambda part: counts[part])
                self._places.setdefault(rarest, []).append(place)
        self._all_parts = frozenset(self._places)

    def literals_in(self, line: bytes) -> list[int]:
        """Ascending indices of the literals that the line contains."""
        if len(line) > LONG_LINE_BYTES:
            return [place for place, literal in enumerate(self._literals) if literal in line]
        candidates = [place for part in self._all_parts & _parts(line) for place in self._places[part]]
        return sorted(place for place in (*candidates, *self._short) if self._literals[place] in line)


def _parts(text: bytes) -> set[bytes]:
    return {text[at : at + _PART_BYTES] for at in range(len(text) - _PART_BYTES + 1)}


class WindowLines:
    """The lines of a window that begin before `end`, split once for several filters."""

    def __init__(self, window: bytes, end: int) -> None:
        import pyarrow as pa

        newlines = np.flatnonzero(np.frombuffer(window, dtype=np.uint8, count=end) == _NEWLINE)
        self.offsets = np.concatenate([[0], newlines + 1, [end]]).astype(np.int32)
        buffers = [None, pa.py_buffer(self.offsets), pa.py_buffer(window)]
        self.array = pa.Array.from_buffers(pa.binary(), len(self.offsets) - 1, buffers)


class LineFilter:
    """Finds lines that may contain a literal; `drop` removes a literal that is no longer needed."""

    def __init__(self, literals: Collection[bytes]) -> None:
        self._literals = frozenset(literals)
        self._patterns = _patterns(self._literals)

    def drop(self, literal: bytes) -> None:
        """Stop looking for a literal."""
        self._literals -= {literal}
        self._patterns = _patterns(self._literals)

    def lines(self, split: WindowLines) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of each line with a literal, and of a few lines that contain only the cut of a literal."""
        if not self._literals:
            return
        import pyarrow.compute as pc

        holds = np.zeros(len(split.array), dtype=bool)
        for pattern in self._patterns:
            holds |= pc.match_substring_regex(split.array, pattern=pattern).to_numpy(zero_copy_only=False)
        for place in np.flatnonzero(holds):
            yield int(split.offsets[place]), int(split.offsets[place + 1])


@lru_cache(maxsize=64)
def _patterns(literals: frozenset[bytes]) -> list[str]:
    """Cuts of the literals as regular expressions, with all bytes except letters and digits escaped by number.

    A cut that contains a shorter cut is left out, because the shorter one also finds its lines.
    """
    counts = Counter(part for literal in literals for part in _parts(literal))
    cuts = sorted({_cut(literal, counts) for literal in literals})
    index = LiteralIndex(cuts)
    shortest = [cut for cut in cuts if len(index.literals_in(cut)) == 1]
    patterns: list[list[str]] = [[]]
    num_bytes = 0
    for cut in shortest:
        num_bytes += len(cut)
        if num_bytes > _PATTERN_BYTES and patterns[-1]:
            patterns.append([])
            num_bytes = len(cut)
        patterns[-1].append(
            "".join(chr(byte) if chr(byte).isascii() and chr(byte).isalnum() else f"\\x{byte:02x}" for byte in cut)
        )
    return ["|".join(words) for words in patterns]


def _cut(literal: bytes, counts: Mapping[bytes, int]) -> bytes:
    """The substring with parts that the fewest other literals share. This avoids common words."""
    cuts = [literal[at : at + _CUT_BYTES] for at in range(max(1, len(literal) - _CUT_BYTES + 1))]
    return min(cuts, key=lambda cut: sum(counts[part] for part in _parts(cut)))


def begin_of_line(window: bytes, place: int) -> int:
    """Start of the line that contains `place`: the offset after the last newline or carriage return."""
    first = max(0, place - LINE_BYTES)
    return max(window.rfind(b"\n", first, place), window.rfind(b"\r", first, place), first - 1) + 1


def end_of_line(window: bytes, place: int) -> int:
    """End of the line that contains `place`: the offset of the next newline or carriage return."""
    last = min(len(window), place + LINE_BYTES)
    newline = window.find(b"\n", place, last)
    last = newline if newline >= 0 else last
    carriage = window.find(b"\r", place, last)
    return carriage if 0 <= carriage < last - 1 else last
