"""Table of ranks for a terminal, as in `rankscope top`: one row per rank. If they do not fit, healthy ranks are folded.

    console.print(rank_table(rank_rows(store, findings, now_ns=now_ns), heading, max_rows=40))

Ranks in trouble keep their rows. The others are folded by what they are doing, or by host if all of them do the same;
with one group left, as many of its ranks as fit are shown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from textwrap import wrap
from typing import TYPE_CHECKING

from analyzers.kinds import KINDS
from analyzers.report.rank_rows import RankRow, RankRows
from analyzers.report.terminal.fitted_table import FittedTable
from analyzers.report.terminal.safe_console import with_bound_units
from analyzers.wording import recorded_ranks, size_text, spans_of
from probes.tape.redaction.printable import visible

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

__all__ = ["SEVERITY_STYLES", "Heading", "fold", "heading_height", "rank_table"]

COLUMNS = ("rank", "state", "step", "own work", "waiting", "memory", "GPU", "for", "doing", "finding")
SEVERITY_STYLES = {"critical": "bold red", "warning": "yellow", "info": "cyan"}
_STATES = {"dead": "bold red", "stopped": "bold red", "stalled": "red", "ended": "dim"}
_RUN_STATES = {
    "training": "green", "finished": "green", "recovering": "yellow", "stalled": "red", "died": "red", "failed": "red",
    "given up": "red",
}  # fmt: skip
MAX_NAMED = 8
"""Maximum number of ranks with the same finding that keep separate rows: a whole slow stage is folded into one row."""
_TROUBLED = ("dead", "stopped")
_NUMBERS = re.compile(r"#?\d[\d/,.:-]*")
"""Matches sequence numbers and ranks: they differ even between ranks that do the same."""
MAX_RANGES = 6
_OPEN_S = 1.0
"""Minimum duration (s) of an activity that is shown, because shorter ones change many times a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """Content of the lines above the table."""

    run: str
    state: str
    reason: str = ""
    planned_steps: int | None = None
    world_size: int | None = None
    findings: Sequence[tuple[str, str]] = ()
    """(severity, sentence), the worst first."""


def rank_table(found: RankRows, heading: Heading, *, max_rows: int) -> RenderableType:
    """Draw the heading and at most `max_rows` rows; ranks without a row are folded into one row per group."""
    from rich.console import Group

    shown, groups = fold(found, max_rows)
    rows: list[tuple[str, list[Text | str]]] = [("", _cells(row)) for row in shown]
    rows += [("dim", _folded(group, is_rest=len(groups) == 1)) for group in groups]
    table = FittedTable(names=COLUMNS, rows=rows)
    lines: list[RenderableType] = [_head(found, heading)]
    lines += [_text(visible(sentence), SEVERITY_STYLES.get(severity, "")) for severity, sentence in heading.findings]
    return Group(*lines, table) if found.rows else Group(*lines)


def heading_height(found: RankRows, heading: Heading, width: int) -> int:
    """Number of lines that the heading takes on a terminal of `width` columns, in which long sentences wrap."""
    texts = [*_head(found, heading).plain.splitlines(), *(visible(sentence) for _, sentence in heading.findings)]
    return sum(max(1, len(wrap(with_bound_units(text), width))) for text in texts)


def fold(found: RankRows, max_rows: int) -> tuple[Sequence[RankRow], list[list[RankRow]]]:
    """Ranks that keep their rows, and groups of the others; at most `max_rows` rows in total."""
    rows = found.rows
    if len(rows) <= max_rows:
        return rows, []
    newest = found.step or 0
    shared = Counter(row.finding for row in rows)
    trouble = [
        row
        for row in rows
        if (row.finding and shared[row.finding] <= MAX_NAMED)
        or row.state in _TROUBLED
        or newest - (row.step or 0) > 1  # more than one step behind, which healthy ranks are not
    ]
    room = max(2, max_rows - len(trouble))
    named = {row.rank for row in trouble}
    groups = _groups([row for row in rows if row.rank not in named], room)
    if len(groups) < 2:
        few = rows[: max(1, max_rows - 1)]
        return few, [list(rows[len(few) :])]
    kept = trouble[: max(1, max_rows - len(groups))]
    if left := trouble[len(kept) :]:
        kept, left = kept[:-1], [kept[-1], *left]
        groups.insert(0, left)
    return kept, groups


def _groups(rows: Sequence[RankRow], room: int) -> list[list[RankRow]]:
    """Group the ranks by finding, state and activity, or by host if all do the same. If there are more than `room`
    groups, the smallest ones become one group."""
    groups: dict[tuple[str, ...], list[RankRow]] = {}
    for row in rows:
        groups.setdefault((row.finding, row.state, _NUMBERS.sub("…", row.doing)), []).append(row)
    if len(groups) == 1:
        hosts: dict[tuple[str, ...], list[RankRow]] = {}
        for row in rows:
            hosts.setdefault((row.host,), []).append(row)
        groups = hosts if 1 < len(hosts) <= room else groups
    found = sorted(groups.values(), key=len, reverse=True)
    few, rest = found[: max(1, room - 1)], found[max(1, room - 1) :]
    return few + ([[row for group in rest for row in group]] if rest else [])


def _head(found: RankRows, heading: Heading) -> Text:
    ranks = recorded_ranks({"num_ranks": len(found.rows), "world_size": heading.world_size}) or "0 ranks"
    head = _text(visible(heading.run), "bold")
    head.append(f"  {heading.state}", style=_RUN_STATES.get(heading.state, ""))
    is_within = bool(heading.planned_steps) and (found.step or 0) <= (heading.planned_steps or 0)
    planned = f" of {heading.planned_steps}" if is_within else ""
    step = "" if found.step is None else f"  step {found.step}{planned}"
    speed = "" if found.step_ms is None else f"  median step {found.step_ms:,.1f} ms"
    attempt = f"  attempt {found.attempt}" if found.attempt else ""
    head.append(f"{step}{speed}  {ranks}{attempt}")
    if heading.reason:
        head.append(f"\n{visible(heading.reason)}", style="red" if heading.state == "stalled" else "dim")
    return head


def _cells(row: RankRow) -> list[Text | str]:
    from rich.text import Text

    doing_s = "" if row.doing_s is None or row.doing_s < _OPEN_S else _seconds(row.doing_s)
    return [
        str(row.rank),
        Text(row.state, style=_STATES.get(row.state, "")),
        "" if row.step is None else str(row.step),
        _ms(row.own_ms),
        _ms(row.waiting_ms),
        "" if row.memory_bytes is None else size_text(row.memory_bytes),
        _percent(row.load_ratio),
        doing_s,
        visible(row.doing).replace("(group ", "("),
        _finding(row),
    ]


def _finding(row: RankRow) -> Text:
    known = KINDS.get(row.finding)
    name = (known.title if known is not None else row.finding).lower()
    return _text(f"{name}, over", "dim") if row.is_over else _text(name, SEVERITY_STYLES.get(row.severity, ""))


def _folded(rows: Sequence[RankRow], *, is_rest: bool) -> list[Text | str]:
    """One row for many ranks: their numbers, the range of their steps and the medians of their times."""
    steps = [row.step for row in rows if row.step is not None]
    span = "" if not steps else str(min(steps)) if min(steps) == max(steps) else f"{min(steps)}-{max(steps)}"
    states = {row.state for row in rows}
    memory = [row.memory_bytes for row in rows if row.memory_bytes is not None]
    loads = [row.load_ratio for row in rows if row.load_ratio is not None]
    silent = [row.doing_s for row in rows if row.doing_s is not None and row.doing_s >= _OPEN_S]
    findings = {(row.finding, row.is_over): row for row in rows}
    named = sum(bool(row.finding) for row in rows)
    finding: Text | str = f"{named} with a finding" if named else ""
    if named and len(findings) == 1:
        finding = _finding(findings.popitem()[1])
    return [
        f"{len(rows)} more" if is_rest else f"{len(rows)} rank{'s' * (len(rows) > 1)}",
        states.pop() if len(states) == 1 else "mixed",
        span,
        _ms(_median([row.own_ms for row in rows])),
        _ms(_median([row.waiting_ms for row in rows])),
        size_text(median(memory)) if memory else "",
        _percent(median(loads)) if loads else "",
        _seconds(median(silent)) if silent else "",
        "  ".join(part for part in (_ranges(sorted(row.rank for row in rows)), _common_activity(rows)) if part),
        finding,
    ]


def _common_activity(rows: Sequence[RankRow]) -> str:
    """The activity that all of these ranks share, without the numbers that differ between them. If they do nothing,
    their host."""
    doing = {row.doing for row in rows}
    doing = doing if len(doing) == 1 else {_NUMBERS.sub("…", text) for text in doing}
    if len(doing) > 1:
        return ""
    activity = doing.pop()
    hosts = {row.host for row in rows}
    return visible(activity).replace("(group ", "(") if activity else visible(hosts.pop()) if len(hosts) == 1 else ""


def _ranges(ranks: Sequence[int]) -> str:
    """`ranks 0-2, 4-511`; ellipsis after a few pieces."""
    pieces = spans_of(ranks)
    shown = [f"{first}-{last}" if first < last else str(first) for first, last in pieces[:MAX_RANGES]]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(shown)}{', ...' if len(pieces) > MAX_RANGES else ''}"


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
