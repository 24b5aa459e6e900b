"""A comparison of two runs for the terminal.

render(comparison, rich.console.Console())
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from analyzers.account.goodput import CATEGORIES, UNSPLIT
from analyzers.compare.conditions import Difference
from analyzers.compare.two_runs import Comparison
from analyzers.report.terminal.diagnosis_text import title
from probes.tape.redaction.printable import visible

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["manifest_tables", "render", "tables"]

MAX_ROWS = 40
MAX_UNSHARED = 3
"""Maximum number of settings missing in some runs that get a row each (a script has no trainer settings). If there are
more, they share one row."""
_LEAST_SHARE = 0.005
_VERSIONS = ("schema_version",)


def render(comparison: Comparison, console: Console) -> None:
    """Print the comparison: two sentences, then each difference with both values."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(visible(comparison.sentence), style="bold yellow" if comparison.findings else "bold"))
    for heading, rows in tables(comparison):
        if not rows:
            continue
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        # rich would cut the other columns off where this one keeps its width on a narrow terminal
        table.add_column(heading, min_width=min(18, console.width // 4), overflow="fold")
        for name in (comparison.run_a, comparison.run_b):
            table.add_column(Text(visible(name)), overflow="fold")
        for row in rows[:MAX_ROWS]:
            table.add_row(*(Text(visible(cell)) for cell in row))
        if len(rows) > MAX_ROWS:
            table.add_row(f"... and {len(rows) - MAX_ROWS} more", "", "")
        console.print()
        console.print(table)


def tables(comparison: Comparison) -> Iterator[tuple[str, Sequence[tuple[str, ...]]]]:
    """Yield (heading, rows of name and both values) for everything that differs."""
    setting, *facts = manifest_tables([comparison])
    yield setting
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
    names = _category_names(comparison)
    yield (
        "Goodput",
        [
            (names[name], _percent(a), _percent(b))
            for name, (a, b) in comparison.goodput.items()
            if max(a or 0, b or 0) >= _LEAST_SHARE
        ],
    )
    rows = [(title(finding), finding.summary, "-") for finding in comparison.only_a]
    rows += [(title(finding), "-", finding.summary) for finding in comparison.only_b]
    rows += [(title(finding), "found here too", finding.summary) for finding in comparison.both]
    yield "Finding", rows
    yield "Advice", [(name.replace("_", " "), a or "-", b or "-") for name, a, b in comparison.advice]
    yield from facts


def manifest_tables(comparisons: Sequence[Comparison]) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Return (heading, rows) for the settings and facts in which runs differ from one baseline. A row has the name, the
    baseline's value and each run's value. Settings that some runs lack share one row if there are many.
    """
    settings = [comparison.settings for comparison in comparisons]
    found = [("Setting", _side_by_side(settings))]
    for heading, is_version in (("Version", True), ("Launch", False)):
        facts = [
            [
                (name.removeprefix("versions."), a, b)
                for name, a, b in comparison.versions
                if (name.startswith("versions.") or name in _VERSIONS) is is_version
            ]
            for comparison in comparisons
        ]
        found.append((heading, _side_by_side(facts)))
    return found


def _side_by_side(parts: Sequence[Sequence[Difference]]) -> list[tuple[str, ...]]:
    base_values = {name: a for part in parts for name, a, _ in part}
    run_values = [{name: b for name, _, b in part} for part in parts]
    values = {name: (a, *(run.get(name, a) for run in run_values)) for name, a in base_values.items()}
    unshared = [name for name, row in values.items() if None in row]
    if len(unshared) <= MAX_UNSHARED:
        unshared = []
    rows = [(name, *(value or "-" for value in row)) for name, row in values.items() if name not in unshared]
    if unshared:
        heading = "only in this run" if len(parts) == 1 else "not in all runs"
        places = range(len(parts) + 1)
        rows.append((heading, *(_few([name for name in unshared if values[name][one] is not None]) for one in places)))
    return rows


def _few(names: Sequence[str]) -> str:
    more = len(names) - MAX_UNSHARED
    return ", ".join(names[:MAX_UNSHARED]) + (f" and {more} more" if more > 0 else "") or "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _category_names(comparison: Comparison) -> Mapping[str, str]:
    """Names of the goodput's categories that hold for both runs: a run may not have split its waits."""
    shares = comparison.goodput
    has_waits = zip(shares["communication"], shares["straggler"], shares["bubble"], strict=True)
    is_unsplit = any(waits is not None and None in split for waits, *split in has_waits)
    return CATEGORIES | UNSPLIT if is_unsplit else CATEGORIES


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
