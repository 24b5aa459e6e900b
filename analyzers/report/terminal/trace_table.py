"""The table of a profiled run for the terminal: one line per rank, milliseconds per step.

render_ranks(diagnosis.run["trace"]["ranks"], console)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["render_ranks"]

_COLUMNS = {
    "step_ms": "step",
    "compute_ms": "compute",
    "communication_ms": "communication",
    "exposed_ms": "exposed",
    "copies_ms": "copies",
    "idle_ms": "idle",
    "data_ms": "data",
}
MAX_ROWS = 64


def render_ranks(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the slowest ranks' rows in the order of ranks; ms per step, and the hidden share of communication."""
    from rich.table import Table

    shown = sorted(sorted(rows, key=lambda row: -row["step_ms"])[:MAX_ROWS], key=lambda row: row["rank"])
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for title in ("rank", "steps", *_COLUMNS.values(), "overlapped"):
        table.add_column(title, justify="right")
    for row in shown:
        hidden = row.get("overlap_ratio")
        values = [f"{row[name]:.4g}" for name in _COLUMNS]
        table.add_row(str(row["rank"]), str(row["steps"]), *values, "" if hidden is None else f"{100 * hidden:.0f} %")
    console.print("\nMilliseconds a step", style="dim")
    console.print(table)
    if len(rows) > len(shown):
        console.print(f"... and {len(rows) - len(shown)} more ranks (--format json has all)", style="dim")
