"""Explanation of a loss spike for the terminal: summary, data ranks, samples with their text, layers, unknowns.

    render(explain(store, step=45), console)

The HTML report shows the same tables. Text of the run is escaped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from analyzers.numerics.loss.why_spike import WhySpike
from analyzers.report.terminal.replay_text import MAX_TEXT
from probes.tape.redaction.printable import visible

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["render", "tables"]

MAX_ROWS = 8


def tables(spike: WhySpike) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Return (title, column names, rows), without those for which nothing is known."""
    ranks: list[tuple[str, ...]] = [
        (str(r.rank), f"{r.loss:.3f}", f"{r.loss_before:.3f}", f"{100 * r.jump_ratio:.0f} %")
        for r in spike.ranks[:MAX_ROWS]
    ]
    samples: list[tuple[str, ...]] = [
        (
            str(s.number),
            str(s.data_rank),
            "not finite" if s.loss is None else f"{s.loss:.3f}",
            "" if s.share_ratio is None else f"{100 * s.share_ratio:.1f} %",
            s.place,
            visible(s.text)[:MAX_TEXT],
        )
        for s in spike.samples[:MAX_ROWS]
    ]
    layers: list[tuple[str, ...]] = [
        (
            layer.name,
            f"{100 * layer.share_ratio:.1f} %",
            f"{100 * layer.share_before_ratio:.1f} %",
            f"{layer.factor:.2f}x",
        )
        for layer in spike.layers[:MAX_ROWS]
    ]
    found = [
        ("Data ranks", ("rank", "loss", "before", "share of the jump"), ranks),
        ("Samples", ("sample", "data rank", "loss", "share of the loss", "file:byte", "text"), samples),
        ("Layers", ("block", "share of the squared gradient", "before", "factor"), layers),
    ]
    return [table for table in found if table[2]]


def render(spike: WhySpike, console: Console) -> None:
    """Print it."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(visible(f"Why       {spike.summary}"), style="bold"))
    for title, columns, rows in tables(spike):
        console.print()
        console.print(Text(title, style="bold"))
        table = Table.grid(padding=(0, 2))
        for name in columns:
            table.add_column(overflow="fold", no_wrap=name not in ("text", "file:byte"))
        table.add_row(*(Text(name, style="dim") for name in columns))
        for row in rows:
            table.add_row(*(Text(visible(cell)) for cell in row))
        console.print(table)
    if spike.unknown:
        console.print()
        for line in spike.unknown:
            console.print(Text(visible(f"Not known  {line}"), style="dim"))
    console.print()
