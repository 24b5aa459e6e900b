"""A table of ranks that fits the terminal: columns without room are omitted and named, values are never cut.

    FittedTable(names=COLUMNS, rows=rows)   # rows: ("dim" or "", one cell per column)

In a file or a pipe all columns are kept, and a long activity wraps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table
    from rich.text import Text

__all__ = ["FittedTable"]

LEFT_OUT_FIRST = ("memory", "GPU", "waiting")
"""Columns that are left out first, in this order, to give the stretched column its full width."""
LEFT_OUT_LAST = ("own work", "for", "step")
"""Columns that are left out only if the stretched one would have less than `MIN_STRETCHED` characters."""
STRETCHED = "doing"
"""Column that gets the remaining width; longer texts end with an ellipsis."""
MIN_STRETCHED, MAX_STRETCHED = 24, 38
GAP = 3
_RIGHT = ("rank", "step", "own work", "waiting", "memory", "GPU", "for")


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTable:
    """A table that renders itself in the available width."""

    names: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Text | str]]]
    """Style and cells of each row."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Rich's rendering protocol."""
        from rich.text import Text

        widths = [max(map(_width, (name, *cells))) for name, cells in zip(self.names, self._columns(), strict=True)]
        shown = [index for index, name in enumerate(self.names) if any(self._columns()[index]) or name == "rank"]
        if not console.is_terminal:
            yield self._table(shown, {})
            return
        width_of = dict(enumerate(widths))
        stretched = self._index(STRETCHED)
        left_out: list[str] = []
        for names, most in ((LEFT_OUT_FIRST, MAX_STRETCHED), (LEFT_OUT_LAST, MIN_STRETCHED)):
            if stretched in shown:
                width_of[stretched] = min(widths[stretched], most)
            for name in names:
                if self._total(shown, width_of) <= options.max_width:
                    break
                if (index := self._index(name)) in shown:
                    shown.remove(index)
                    left_out.append(name)
        if stretched in shown:
            room = options.max_width - self._total([index for index in shown if index != stretched], width_of) - GAP
            width_of[stretched] = max(8, min(widths[stretched], room))
        yield self._table(shown, width_of)
        if left_out:
            count = f"{len(left_out)} columns do" if len(left_out) > 1 else "1 column does"
            yield Text(f"{count} not fit: {', '.join(left_out)}.", style="dim")

    def _columns(self) -> list[list[Text | str]]:
        return [[cells[index] for _, cells in self.rows] for index in range(len(self.names))]

    def _index(self, name: str) -> int:
        return self.names.index(name) if name in self.names else -1

    def _total(self, shown: Sequence[int], width_of: dict[int, int]) -> int:
        return sum(width_of[index] + GAP for index in shown)

    def _table(self, shown: Sequence[int], widths: dict[int, int]) -> Table:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False, padding=(0, 1))
        for index in shown:
            name = self.names[index]
            table.add_column(
                name, justify="right" if name in _RIGHT else "left", width=widths.get(index),
                no_wrap=bool(widths) or name != STRETCHED, overflow="ellipsis",
            )  # fmt: skip
        for style, cells in self.rows:
            table.add_row(*(_cut(cells[index], widths.get(index)) for index in shown), style=style)
        return table


def _cut(cell: Text | str, width: int | None) -> Text | str:
    """As many whole words of the text as fit, then an ellipsis. A word is cut only if it is the first and too long."""
    if width is None or not isinstance(cell, str) or _width(cell) <= width:
        return cell
    words = cell.split(" ")
    fitting = (" ".join(words[:count]) for count in range(len(words) - 1, 0, -1))
    return next((f"{text} …" for text in fitting if _width(text) <= width - 2), cell)


def _width(cell: Text | str) -> int:
    from rich.cells import cell_len

    return cell_len(cell if isinstance(cell, str) else cell.plain)
