"""Lines of a log that hold any of many literals, found in one pass over the bytes.

    wanted = LineFilter(literals)
    for begin, end in wanted.lines(window, end): ...

A window is searched for all literals at once (RE2's automaton, as pyarrow has it). Searching it for each of some five
hundred literals in turn takes fifteen times as long.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

__all__ = ["LineFilter"]

_NEWLINE = 10


class LineFilter:
    """Finds lines with a literal; `drop` takes a literal out that need not be looked for any more."""

    def __init__(self, literals: Collection[bytes]) -> None:
        self._literals = set(literals)
        self._pattern = _pattern(self._literals)

    def drop(self, literal: bytes) -> None:
        """Stop looking for a literal."""
        self._literals.discard(literal)
        self._pattern = _pattern(self._literals)

    def lines(self, window: bytes, end: int) -> Iterator[tuple[int, int]]:
        """(begin, end) of each line, of those that begin before `end`, that holds a literal."""
        if not self._literals:
            return
        import pyarrow as pa
        import pyarrow.compute as pc

        newlines = np.flatnonzero(np.frombuffer(window, dtype=np.uint8, count=end) == _NEWLINE)
        offsets = np.concatenate([[0], newlines + 1, [end]]).astype(np.int32)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(window)]
        lines = pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)
        found = pc.match_substring_regex(lines, pattern=self._pattern)
        for place in np.flatnonzero(found.to_numpy(zero_copy_only=False)):
            yield int(offsets[place]), int(offsets[place + 1])


def _pattern(literals: Collection[bytes]) -> str:
    """The literals as one regular expression; every byte but letters and digits is written as its number."""
    return "|".join(
        "".join(chr(byte) if chr(byte).isascii() and chr(byte).isalnum() else f"\\x{byte:02x}" for byte in literal)
        for literal in sorted(literals)
    )
