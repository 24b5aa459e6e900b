"""Numbers, lists and sentences of a finding.

listed([1, 2, 3])            # "1, 2, 3"; "1, 2 and 9 more" if there are too many
ranks_text((3, 5))           # "ranks 3 and 5"
processes_text((4001, 4005)) # "processes 4001 and 4005"; "2 processes" if their ids are not known
counted(2, "rank")           # "2 ranks"; nothing for none
group_text("pp:1-7/2")       # "pp:1,3,5,7"
number(3.14159), percent(0.314)      # "3.14", "31 %"; "?" for a value that was not measured
sentence("forward is slow")  # "Forward is slow."
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = [
    "MAX_RANKS",
    "batches_text",
    "counted",
    "counted_ranks",
    "end_text",
    "group_text",
    "is_number",
    "listed",
    "loss_text",
    "natural",
    "number",
    "number_ranges",
    "of_world_size",
    "percent",
    "processes_text",
    "ranks_before",
    "ranks_text",
    "recorded_ranks",
    "rise_text",
    "sentence",
    "signed",
    "size_text",
    "spans_of",
]

MAX_RANKS = 8
MIN_RANGE = 4
_EVERY_NTH = re.compile(r"\b(\d{1,9})-(\d{1,9})/(\d{1,9})\b")
"""Ranks in the name of a process group: first rank, last rank, and the distance between neighbours."""
MAX_PLAIN = 1e6
"""From here on a loss or a ratio is written as a power of ten."""
_ENDS = {
    "fenced": "replaced by a later launch",
    "given_up": "stopped by the guard",
    "launcher_lost": "launcher killed or crashed",
    "left_out": "node excluded",
}
"""Texts for reasons of `run_ended` that are no words."""
_ORDINALS = {1: "st", 2: "nd", 3: "rd"}


def listed(values: Sequence[Any], most: int = 12) -> str:
    shown = ", ".join(str(value) for value in values[:most])
    return shown if len(values) <= most else f"{shown} and {len(values) - most} more"


def counted(number: Any, noun: str) -> str:
    """`2 ranks`, `1 line`, `12,345 lines`, `12345 steps`: steps as their numbers are written. Empty for none."""
    if not isinstance(number, int) or not number:
        return ""
    plural = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number if noun == 'step' else f'{number:,}'} {noun}{plural * (number != 1)}"


def ranks_before(facts: Mapping[str, Any]) -> str:
    """Number of ranks of an elastic job's earlier attempts, if different: `3` or `2 to 4`."""
    before = facts.get("num_ranks_before")
    if not isinstance(before, Sequence) or not before:
        return ""
    return str(before[0]) if len(before) == 1 else f"{min(before)} to {max(before)}"


def of_world_size(facts: Mapping[str, Any]) -> str:
    """` of 4` if ranks of the run have no records, otherwise empty."""
    recorded, world_size = facts.get("num_ranks"), facts.get("world_size")
    is_part = isinstance(recorded, int) and isinstance(world_size, int) and recorded < world_size
    return f" of {world_size:,}" if is_part else ""


def recorded_ranks(facts: Mapping[str, Any]) -> str:
    """`4 ranks`, or `3 of 4 ranks` if one has no records."""
    of_all = of_world_size(facts)
    return f"{facts['num_ranks']:,}{of_all} ranks" if of_all else counted(facts.get("num_ranks"), "rank")


def counted_ranks(facts: Mapping[str, Any]) -> str:
    """`2 ranks (3 before)`: the number of ranks of a run with records, and of its earlier attempts."""
    ranks, before = recorded_ranks(facts), ranks_before(facts)
    return f"{ranks} ({before} before)" if ranks and before else ranks


def end_text(facts: Mapping[str, Any]) -> str:
    """How a run ended: `finished`, `stopped by the guard`."""
    ended = str(facts.get("ended") or "no end recorded")
    return _ENDS.get(ended, ended)


def natural(text: str) -> list[Any]:
    """Sort key by which `tp:8-15` stands before `tp:104-111`, and node-9 before node-10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d{1,18})", text)]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def number(value: Any, digits: int = 3) -> str:
    """A number with `digits` significant digits, large ones as whole numbers; "?" for anything else."""
    if not is_number(value):
        return "?"
    rounded = f"{value:.{digits}g}"
    return f"{value:,.0f}" if 10 ** min(digits, 3) <= abs(float(rounded)) < 1e9 else rounded


def signed(value: Any) -> str:
    """A number with its sign: `+5,550`, `-0.3`; "?" for anything else."""
    return f"{'+' * (is_number(value) and value >= 0)}{number(value)}"


def percent(ratio: Any) -> str:
    """A ratio in percent, "less than 0.1 %" for a tiny one; "?" for anything else."""
    if not is_number(ratio):
        return "?"
    if 0 < abs(ratio) < 0.001:
        return "less than 0.1 %"
    return f"{100 * ratio:.0f} %" if abs(ratio) >= 0.0995 else f"{100 * ratio:.2g} %"


def rise_text(ratio: float) -> str:
    """A rise over the earlier value as a percentage, "+52 %"; if it is eleven times the value or more, as a factor,
    "194x"."""
    if ratio >= MAX_PLAIN:
        return f"{ratio + 1:.2g}x"
    return f"+{100 * ratio:.0f} %" if ratio < 10 else f"{ratio + 1:,.0f}x"


def loss_text(loss: float, decimals: int = 3) -> str:
    """A loss with its decimals; if it is a million or more, as a power of ten, because a diverging loss may have
    hundreds of digits. A small loss has two significant digits instead.
    """
    if 0 < abs(loss) < 10 ** (1 - decimals):
        return f"{loss:.2g}"
    return f"{loss:.{decimals}f}" if abs(loss) < MAX_PLAIN else f"{loss:.{decimals}g}"


def group_text(name: str) -> str:
    """The name of a process group with its ranks spelled out: `pp:1-7/2` is "pp:1,3,5,7"."""
    return _EVERY_NTH.sub(_spelled_out, name)


def _spelled_out(found: re.Match[str]) -> str:
    first, last, every = (int(part) for part in found.groups())
    members = range(first, last + 1, max(1, every))
    if len(members) <= MAX_RANKS:
        return ",".join(map(str, members))
    suffix = "th" if every % 100 in (11, 12, 13) else _ORDINALS.get(every % 10, "th")
    return f"{first}-{last}, every {every}{suffix} rank"


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 3 and 5`, `ranks 0-6, 9 and 12`, `ranks 3, 5, 7 and 9 more`; `the ranks` for none."""
    if not ranks:
        return "the ranks"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {number_ranges(ranks)}"


def processes_text(pids: Sequence[int]) -> str:
    """`process 4001`, `processes 4001 and 4005`, `12 processes` if an id is unknown."""
    if not all(pids):
        return counted(len(pids), "process")
    return f"process{'es' * (len(pids) != 1)} {number_ranges(pids)}"


def spans_of(numbers: Iterable[int]) -> list[list[int]]:
    """[first, last] of each stretch of consecutive numbers."""
    spans: list[list[int]] = []
    for one in numbers:
        if spans and one == spans[-1][1] + 1:
            spans[-1][1] = one
        else:
            spans.append([one, one])
    return spans


def number_ranges(numbers: Sequence[int]) -> str:
    """`3`, `3 and 5`, `0-6, 9 and 12`, `3, 5, 7 and 9 more`."""
    parts: dict[str, int] = {}
    for first, last in spans_of(numbers):
        size = last - first + 1
        is_range = size >= MIN_RANGE  # names of process groups are shortened in the same way
        parts |= {f"{first}-{last}": size} if is_range else dict.fromkeys(map(str, range(first, last + 1)), 1)
    shown = list(parts)[:MAX_RANKS]
    if len(parts) > MAX_RANKS:
        return f"{', '.join(shown)} and {sum(list(parts.values())[MAX_RANKS:])} more"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def batches_text(skipped: Sequence[Any], replayed: Sequence[Any]) -> str:
    """Clause on the batches of a rollback: `skipped batches 3, 4`, `kept batch 3`; empty for none."""
    batches = skipped or replayed
    if not batches:
        return ""
    which = f"batch{'es' if len(batches) > 1 else ''} {listed(batches, 8)}"
    return f"{'skipped' if skipped else 'kept'} {which}"


def sentence(text: str) -> str:
    """A clause as a sentence: capital letter, full stop."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '?', '!')) else '.'}"


def cut(text: str, most: int) -> str:
    """The start of a text, with an ellipsis if it was cut."""
    return text.rstrip(".;, ") if len(text) <= most else text[: most - 1].rstrip(".;,: ") + "…"


def size_text(num_bytes: Any) -> str:
    """Bytes in the largest unit that fits; "?" for anything else."""
    if not is_number(num_bytes):
        return "?"
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(num_bytes) >= scale:
            return f"{number(num_bytes / scale)} {unit}"
    return f"{num_bytes:.0f} B"


def rate_text(gb_per_s: Any) -> str:
    """A bandwidth in the largest decimal unit that fits; "?" for anything but a number."""
    if not is_number(gb_per_s):
        return "?"
    unit, scale = rate_unit(gb_per_s)
    return f"{number(gb_per_s * scale)} {unit}"


def rate_unit(gb_per_s: float) -> tuple[str, float]:
    """Return (unit, factor from GB/s) in which a bandwidth, or the largest value of a column, is at least one."""
    size = abs(gb_per_s)
    return ("GB/s", 1.0) if size >= 1 else ("MB/s", 1e3) if size >= 1e-3 else ("kB/s", 1e6)
