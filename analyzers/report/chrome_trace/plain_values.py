"""Values of a run as JSON of bounded size and without control characters."""

from __future__ import annotations

from typing import Any

from probes.tape.redaction.printable import visible

__all__ = ["plain", "text"]

MAX_TEXT = 200
MAX_ITEMS = 50
MAX_DEPTH = 4


def text(value: Any) -> str:
    """Printable text of at most `MAX_TEXT` characters."""
    return visible(str(value)[: 4 * MAX_TEXT])[:MAX_TEXT]


def plain(value: Any, depth: int = 0) -> Any:
    """The value as JSON of bounded size."""
    if isinstance(value, dict):
        if depth >= MAX_DEPTH:
            return "..."
        return {text(key): plain(item, depth + 1) for key, item in list(value.items())[:MAX_ITEMS]}
    if isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value[:MAX_ITEMS]] if depth < MAX_DEPTH else "..."
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    return value if value is None or isinstance(value, (bool, int)) else text(value)
