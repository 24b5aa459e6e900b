"""Numbers, lists and sentences of a finding.

listed([1, 2, 3])            # "1, 2, 3"; "1, 2 and 9 more" where they are too many
ranks_text((3, 5))           # "ranks 3 and 5"
counted(2, "rank")           # "2 ranks"; nothing for none
number(3.14159), percent(0.314)      # "3.14", "31 %"; "?" for a value that was not measured
sentence("forward is slow")  # "Forward is slow."
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["counted", "is_number", "listed", "number", "percent", "ranks_text", "sentence", "size_text"]

MAX_RANKS = 8


def listed(values: Sequence[Any], most: int = 12) -> str:
    shown = ", ".join(str(value) for value in values[:most])
    return shown if len(values) <= most else f"{shown} and {len(values) - most} more"


def counted(number: Any, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}" if isinstance(number, int) and number else ""


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def number(value: Any, digits: int = 3) -> str:
    """A number in so many significant digits; "?" for anything else."""
    return f"{value:.{digits}g}" if is_number(value) else "?"


def percent(ratio: Any) -> str:
    """A ratio in percent; "?" for anything else."""
    return f"{100 * ratio:.0f} %" if is_number(ratio) else "?"


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 3 and 5`, `ranks 3, 4, 5 and 9 more`; `the ranks` for none."""
    shown = [str(rank) for rank in ranks[:MAX_RANKS]]
    if not shown:
        return "the ranks"
    if len(ranks) > MAX_RANKS:
        return f"ranks {', '.join(shown)} and {len(ranks) - MAX_RANKS} more"
    return f"rank {shown[0]}" if len(shown) == 1 else f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def sentence(text: str) -> str:
    """A clause as a sentence: capital letter, full stop."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '?', '!')) else '.'}"


def size_text(num_bytes: Any) -> str:
    """Bytes in the largest unit that fits; "?" for anything else."""
    if not is_number(num_bytes):
        return "?"
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} B"
