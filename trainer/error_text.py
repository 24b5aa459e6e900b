"""First line of an error of another library, for a message of one line.

first_line(RuntimeError("no such column\\n  at ..."))     # "no such column"
"""

from __future__ import annotations

__all__ = ["first_line"]

MAX_CHARS = 200


def first_line(error: Exception) -> str:
    """The first line, cut where it is long; the type of an error that has no text."""
    return (str(error).splitlines() or [type(error).__name__])[0][:MAX_CHARS]
