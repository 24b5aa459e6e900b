"""Parse ranks and steps as typed into a filter.

numbers("3, 5-7")        # ((3, 3), (5, 7))
numbers("x")             # None: not a list of numbers
numbers("")              # (): everything
"""

from __future__ import annotations

import re

__all__ = ["Ranges", "contains", "numbers", "sql_of"]

Ranges = tuple[tuple[int, int], ...]
MAX_PARTS = 50
_PART = re.compile(r"(-?\d{1,12})(?:\s*(?:-|to|\.\.)\s*(\d{1,12}))?")


def numbers(text: str) -> Ranges | None:
    """Ranges with both ends included; empty for no filter, None for text that is not a list of numbers."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    found = [_PART.fullmatch(part) for part in parts[:MAX_PARTS]]
    if len(parts) > MAX_PARTS or None in found:
        return None
    return tuple((int(part[1]), int(part[2] or part[1])) for part in found if part is not None)


def contains(ranges: Ranges, value: int | None) -> bool:
    """Return True if the value passes the filter. An unknown value passes only an empty filter."""
    return not ranges or (value is not None and any(first <= value <= last for first, last in ranges))


def sql_of(column: str, ranges: Ranges) -> str:
    """The filter as an SQL condition."""
    return " OR ".join(f"{column} BETWEEN {first} AND {last}" for first, last in ranges) or "true"
