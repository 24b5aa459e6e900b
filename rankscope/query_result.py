"""Rows of a query, as arrays, Arrow, pandas or polars, and as a table in a notebook.

result = run.sql("SELECT rank, median(duration_ns) / 1e6 AS ms FROM steps GROUP BY rank")
result.to_pandas()
for rank, ms in result: ...
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["QueryResult"]

SHOWN_ROWS = 20


class QueryResult:
    """Columns of equal length, all in memory."""

    def __init__(self, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
        self.columns = tuple(columns)
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self.rows)

    def __getitem__(self, column: str) -> list[Any]:
        """The values of one column, None where NULL. Raises KeyError."""
        if column not in self.columns:
            raise KeyError(f"{column}: the columns are {', '.join(self.columns)}")
        place = self.columns.index(column)
        return [row[place] for row in self.rows]

    def to_dicts(self) -> list[dict[str, Any]]:
        """One dictionary a row."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def to_arrow(self) -> Any:
        """A `pyarrow.Table`. Raises ImportError without pyarrow."""
        import pyarrow as pa

        return pa.table({name: self[name] for name in self.columns})

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`. Raises ImportError without pandas."""
        import pandas as pd

        return pd.DataFrame(self.rows, columns=list(self.columns))

    def to_polars(self) -> Any:
        """A `polars.DataFrame`. Raises ImportError without polars."""
        import polars as pl  # type: ignore[import-not-found]

        return pl.DataFrame({name: self[name] for name in self.columns}, strict=False)

    def __repr__(self) -> str:
        head = ["  ".join(map(str, row)) for row in (self.columns, *self.rows[:SHOWN_ROWS])]
        return "\n".join([*head, *self._rest()])

    def _repr_html_(self) -> str:
        """The first rows for a notebook; text of the run is escaped."""
        cells = "".join(
            "<tr>" + "".join(f"<td>{html.escape('' if value is None else str(value))}</td>" for value in row) + "</tr>"
            for row in self.rows[:SHOWN_ROWS]
        )
        names = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        return f"<table><thead><tr>{names}</tr></thead><tbody>{cells}</tbody></table>{''.join(self._rest())}"

    def _rest(self) -> list[str]:
        more = len(self.rows) - SHOWN_ROWS
        return [f"{more} more rows"] if more > 0 else []
