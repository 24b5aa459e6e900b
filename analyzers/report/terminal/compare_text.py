"""A comparison of two runs for the terminal.

render(comparison, rich.console.Console())
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from analyzers.account.goodput import CATEGORIES
from analyzers.compare.conditions import Difference
from analyzers.compare.two_runs import Comparison
from analyzers.report.terminal.diagnosis_text import title
from probes.tape.redaction.printable import visible

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["render", "tables"]

MAX_ROWS = 40
MAX_UNSHARED = 3
"""Maximum number of settings that only one run has and that keep separate rows: a script has none of the trainer's."""
_LEAST_SHARE = 0.005
_VERSIONS = ("schema_version", "rankscope_version")


def render(comparison: Comparison, console: Console) -> None:
    """Print the comparison: two sentences, then each difference with both values."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(visible(comparison.sentence), style="bold yellow" if comparison.findings else "bold"))
    for heading, rows in tables(comparison, is_short=True):
        if not rows:
            continue
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        table.add_column(heading, min_width=18, overflow="fold")
        for name in (comparison.run_a, comparison.run_b):
            table.add_column(Text(visible(name)), overflow="fold")
        for row in rows[:MAX_ROWS]:
            table.add_row(*(Text(visible(cell)) for cell in row))
        if len(rows) > MAX_ROWS:
            table.add_row(f"... and {len(rows) - MAX_ROWS} more", "", "")
        console.print()
        console.print(table)


def tables(comparison: Comparison, *, is_short: bool = False) -> Iterator[tuple[str, Sequence[tuple[str, str, str]]]]:
    """(heading, rows of name and both values) of everything that differs. `is_short`: settings and facts that only one
    run has are one row of each table.
    """
    yield "Setting", _both_values(comparison.settings, is_short=is_short)
    yield "Condition", [(name, a or "-", b or "-") for name, a, b in comparison.conditions]
    yield (
        "Step, ms (mean over the ranks)",
        [
            (name, _number(a), _number(b))
            for name, (a, b) in comparison.phases.items()
            if a is not None or b is not None
        ],
    )
    yield "Validation loss", [(name, _number(a), _number(b)) for name, (a, b) in comparison.validation.items()]
    yield (
        "Goodput",
        [
            (CATEGORIES[name], _percent(a), _percent(b))
            for name, (a, b) in comparison.goodput.items()
            if max(a or 0, b or 0) >= _LEAST_SHARE
        ],
    )
    rows = [(title(finding), finding.summary, "-") for finding in comparison.only_a]
    rows += [(title(finding), "-", finding.summary) for finding in comparison.only_b]
    rows += [(title(finding), "found here too", finding.summary) for finding in comparison.both]
    yield "Finding", rows
    yield "Advice", [(name.replace("_", " "), a or "-", b or "-") for name, a, b in comparison.advice]
    facts = [(name.removeprefix("versions."), a, b) for name, a, b in comparison.versions]
    are_versions = [name.startswith("versions.") or name in _VERSIONS for name, _, _ in comparison.versions]
    for heading, wanted in (("Version", True), ("Launch", False)):
        kept = [fact for fact, is_version in zip(facts, are_versions, strict=True) if is_version is wanted]
        yield heading, _both_values(kept, is_short=is_short)


def _both_values(differences: Sequence[Difference], *, is_short: bool) -> list[tuple[str, str, str]]:
    unshared = [one for one in differences if one[1] is None or one[2] is None]
    if not is_short or len(unshared) <= MAX_UNSHARED:
        return [(name, a or "-", b or "-") for name, a, b in differences]
    only_a, only_b = ([one[0] for one in unshared if one[place] is not None] for place in (1, 2))
    rows = [(name, a or "-", b or "-") for name, a, b in differences if a is not None and b is not None]
    return [*rows, ("only in this run", _few(only_a), _few(only_b))]


def _few(names: Sequence[str]) -> str:
    more = len(names) - MAX_UNSHARED
    return ", ".join(names[:MAX_UNSHARED]) + (f" and {more} more" if more > 0 else "") or "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
