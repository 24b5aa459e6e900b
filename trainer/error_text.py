"""First line of another library's error, for one-line messages.

first_line(RuntimeError("no such column\\n  at ..."))     # "no such column"
"""

from __future__ import annotations

__all__ = ["first_line"]

MAX_CHARS = 200


def first_line(error: Exception) -> str:
    """Return the first line, shortened if it is long; the type of an error without text."""
    return (str(error).splitlines() or [type(error).__name__])[0][:MAX_CHARS]
