"""Numbers and lists as people read them.

listed([1, 2, 3])        # "1, 2, 3", and how many where they are too many to show
counted(2, "rank")         # "2 ranks"; nothing for none
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["counted", "is_number", "listed"]


def listed(values: Sequence[Any]) -> str:
    shown = ", ".join(str(value) for value in values[:12])
    return shown if len(values) <= 12 else f"{shown}, ... ({len(values)} in all)"


def counted(number: Any, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}" if isinstance(number, int) and number else ""


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
