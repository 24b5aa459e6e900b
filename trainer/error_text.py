"""The first line of an error that another library raised, for one-line messages.

first_line(RuntimeError("no such column\\n  at ..."))     # "no such column"
"""

from __future__ import annotations

__all__ = ["first_line"]

MAX_CHARS = 200


def first_line(error: Exception) -> str:
    """Return the first line of the error's text, shortened if it is long. If the error has no text, return the name of
    its type."""
    return (str(error).splitlines() or [type(error).__name__])[0][:MAX_CHARS]
