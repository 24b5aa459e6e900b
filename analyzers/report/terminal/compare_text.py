"""A comparison of two runs for the terminal.

render(comparison, rich.console.Console())
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from analyzers.account.goodput import CATEGORIES
from analyzers.compare.two_runs import Comparison
from analyzers.printable import visible
from analyzers.report.terminal.diagnosis_text import title

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["render", "sentence", "tables"]

MAX_ROWS = 40
_LEAST_SHARE = 0.005


def render(comparison: Comparison, console: Console) -> None:
    """Print the comparison: two sentences, then each difference with both values."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(visible(sentence(comparison)), style="bold yellow" if comparison.findings else "bold"))
    for heading, rows in tables(comparison):
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


def sentence(comparison: Comparison) -> str:
    """Speed and loss of the second run against the first, two sentences."""
    speed, loss, a, b = comparison.speed, comparison.loss, comparison.run_a, comparison.run_b
    if speed is None:
        first = f"{b} and {a} have too few steps to compare their speed."
    else:
        per, interval = "token" if speed.per_token else "step", f"95 % interval {speed.low:.2f} to {speed.high:.2f}"
        first = f"{b} takes {speed.ratio:.2f}x as long per {per} as {a} ({interval})."
    if loss is None:
        return f"{first} Too few common steps to compare the loss."
    if loss.first_different_step is None:
        return f"{first} The loss is equal to the last bit in {loss.common_steps} steps."
    side, noise = "higher" if loss.difference > 0 else "lower", "beyond" if loss.is_real else "within"
    difference = f"{abs(loss.difference):.3g} {side} at the end, {noise} its noise of {loss.noise:.2g}"
    return f"{first} The loss is {difference}, and differs from step {loss.first_different_step} on."


def tables(comparison: Comparison) -> Iterator[tuple[str, Sequence[tuple[str, str, str]]]]:
    """(heading, rows of name and both values) of everything that differs."""
    yield "Setting", [(name, a or "-", b or "-") for name, a, b in comparison.settings]
    yield "Version", [(name, a or "-", b or "-") for name, a, b in comparison.versions]
    yield (
        "Step, median ms",
        [
            (name, _number(a), _number(b))
            for name, (a, b) in comparison.phases.items()
            if a is not None or b is not None
        ],
    )
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
    rows += [(title(finding), "also", finding.summary) for finding in comparison.both]
    yield "Finding", rows


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
