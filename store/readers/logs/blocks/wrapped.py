"""Join the lines of a log that a terminal wrapped at its width, as it was copied from the screen.

    unwrapped(b"... subsequent GPU oper\\nations might ...\\n")     # b"... subsequent GPU operations might ...\\n\\n"

A program may print lines of equal length, so lines are joined only if a text that a rule searches for is split between
two of them. The line ends are moved behind the joined line, which keeps the numbers of all later lines.
"""

from __future__ import annotations

from itertools import pairwise

from store.readers.logs.rules import rules_by_literal

__all__ = ["unwrapped"]

MAX_BYTES = 256 << 10
"""Longer texts are not copied from a screen."""
WIDTHS = range(40, 301)
SEAM = 100
"""Characters on both sides of a line end that may hold a rule's text."""
MIN_CHARACTERS = 4
"""A line of fewer different characters is a ruler."""


def unwrapped(text: bytes) -> bytes:
    """The text with wrapped lines joined; the text itself if none are."""
    if len(text) > MAX_BYTES or b"\r" in text or max(map(len, text[:4096].split(b"\n"))) > 4 * WIDTHS.stop:
        return text
    lines = text.decode("utf-8", "replace").split("\n")
    width = max(map(len, lines))
    if width not in WIDTHS:
        return text
    is_full = [_is_full(line, width) for line in lines]
    if not any(full and _is_split(line, after) for full, (line, after) in zip(is_full, pairwise(lines), strict=False)):
        return text
    joined: list[str] = []
    ends = 0
    for line, full in zip(lines, is_full, strict=True):
        joined.append(line)
        ends += 1
        if not full:
            joined.append("\n" * ends)
            ends = 0
    return "".join(joined).removesuffix("\n").encode()


def _is_full(line: str, width: int) -> bool:
    """Return True if a line may go on in the next one. A screen that pads its lines ends the others with spaces."""
    return len(line) == width and not line.endswith("  ") and len(set(line)) >= MIN_CHARACTERS


def _is_split(line: str, after: str) -> bool:
    """Return True if a rule's text is in the two lines together, but in neither of them."""
    index = rules_by_literal()[2]
    apart = {*index.literals_in(line[-SEAM:].encode()), *index.literals_in(after[:SEAM].encode())}
    return not apart.issuperset(index.literals_in((line[-SEAM:] + after[:SEAM]).encode()))
