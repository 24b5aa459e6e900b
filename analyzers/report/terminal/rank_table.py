"""Table of ranks for a terminal, as `rankscope top` shows it: a row a rank, healthy ranks folded where they don't fit.

console.print(rank_table(rows, title="runs/latest", state=state, now_ns=now_ns, max_rows=40))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from analyzers.kinds import KINDS
from analyzers.printable import visible
from analyzers.report.rank_rows import RankRow, RankRows
from analyzers.wording import size_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

__all__ = ["Heading", "rank_table"]

_COLOURS = {"critical": "bold red", "warning": "yellow", "info": "cyan"}
_STATES = {"dead": "bold red", "stopped": "bold red", "ended": "dim"}
MAX_RANGES = 6
_OPEN_S = 1.0
"""Shorter than this, an activity is shown without its duration: it changes many times a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """The lines above the table."""

    run: str
    state: str
    reason: str = ""
    planned_steps: int | None = None
    findings: Sequence[tuple[str, str]] = ()
    """(severity, sentence), the worst first."""


def rank_table(found: RankRows, heading: Heading, *, max_rows: int) -> RenderableType:
    """Draw the heading and at most `max_rows` rows; the rest are folded into one, with their range of values."""
    from rich import box
    from rich.console import Group
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    for name, justify in (
        ("rank", "right"), ("state", "left"), ("step", "right"), ("own work", "right"), ("waiting", "right"),
        ("memory", "right"), ("GPU", "right"), ("for", "right"), ("doing", "left"), ("finding", "left"),
    ):  # fmt: skip
        if name != "GPU" or any(row.load_ratio is not None for row in found.rows):
            table.add_column(name, justify=justify, no_wrap=name != "doing", overflow="ellipsis")  # type: ignore[arg-type]
    has_gpu = len(table.columns) == 10
    fits = len(found.rows) <= max_rows
    shown = found.rows if fits else found.rows[: max(1, max_rows - 1)]
    for row in shown:
        table.add_row(*_cells(row, has_gpu=has_gpu))
    if not fits:
        table.add_row(*_folded(found.rows[len(shown) :], has_gpu=has_gpu), style="dim")
    lines: list[RenderableType] = [_head(found, heading)]
    lines += [_text(visible(sentence), _COLOURS.get(severity, "")) for severity, sentence in heading.findings]
    return Group(*lines, table) if found.rows else Group(*lines, _text("No rank has written a record yet.", "dim"))


def _head(found: RankRows, heading: Heading) -> Text:
    ranks = f"{len(found.rows)} rank{'s' * (len(found.rows) != 1)}"
    head = _text(visible(heading.run), "bold")
    head.append(f"  {heading.state}", style="red" if heading.state in ("stalled", "failed", "died") else "green")
    planned = f" of {heading.planned_steps:,}" if heading.planned_steps else ""
    step = "" if found.step is None else f"  step {found.step:,}{planned}"
    speed = "" if found.step_ms is None else f"  {found.step_ms:,.0f} ms a step"
    attempt = f"  attempt {found.attempt}" if found.attempt else ""
    head.append(f"{step}{speed}  {ranks}{attempt}")
    if heading.reason:
        head.append(f"\n{visible(heading.reason)}", style="dim")
    return head


def _cells(row: RankRow, *, has_gpu: bool) -> list[Text | str]:
    from rich.text import Text

    doing_s = "" if row.doing_s is None or row.doing_s < _OPEN_S else _seconds(row.doing_s)
    kind = KINDS.get(row.finding)
    finding = (kind.title if kind is not None else row.finding) if row.finding else ""
    return [
        str(row.rank),
        Text(row.state, style=_STATES.get(row.state, "")),
        "" if row.step is None else f"{row.step:,}",
        _ms(row.own_ms),
        _ms(row.waiting_ms),
        "" if row.memory_bytes is None else size_text(row.memory_bytes),
        *([_percent(row.load_ratio)] if has_gpu else []),
        doing_s,
        visible(row.doing),
        Text(finding.lower(), style=_COLOURS.get(row.severity, "")),
    ]


def _folded(rows: Sequence[RankRow], *, has_gpu: bool) -> list[Text | str]:
    """One row for many ranks: their numbers, the range of their steps and the medians of their times."""
    steps = [row.step for row in rows if row.step is not None]
    span = "" if not steps else f"{min(steps):,}" if min(steps) == max(steps) else f"{min(steps):,}-{max(steps):,}"
    states = {row.state for row in rows}
    memory = [row.memory_bytes for row in rows if row.memory_bytes is not None]
    loads = [row.load_ratio for row in rows if row.load_ratio is not None]
    named = sum(bool(row.finding) for row in rows)
    return [
        f"{len(rows)} more",
        states.pop() if len(states) == 1 else "mixed",
        span,
        _ms(_median([row.own_ms for row in rows])),
        _ms(_median([row.waiting_ms for row in rows])),
        size_text(median(memory)) if memory else "",
        *([_percent(median(loads)) if loads else ""] if has_gpu else []),
        "",
        _ranges(sorted(row.rank for row in rows)),
        f"{named} with a finding" if named else "",
    ]


def _ranges(ranks: Sequence[int]) -> str:
    """`ranks 0-2, 4-511`; ellipsis after a few pieces."""
    pieces: list[list[int]] = []
    for rank in ranks:
        if pieces and pieces[-1][1] == rank - 1:
            pieces[-1][1] = rank
        else:
            pieces.append([rank, rank])
    shown = [f"{first}-{last}" if first < last else str(first) for first, last in pieces[:MAX_RANGES]]
    return f"ranks {', '.join(shown)}{', ...' if len(pieces) > MAX_RANGES else ''}"


def _median(values: Sequence[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return median(measured) if measured else None


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f} ms" if value < 1000 else f"{value / 1e3:,.2f} s"


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * ratio:.0f} %"


def _seconds(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h"


def _text(words: str, style: str) -> Text:
    from rich.text import Text

    return Text(words, style=style)
