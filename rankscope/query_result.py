"""Rows of a query, as arrays, Arrow, pandas or polars, and as a table in a notebook.

result = run.sql("SELECT rank, median(duration_ns) / 1e6 AS ms FROM steps GROUP BY rank")
result.to_pandas()
for rank, ms in rankscope.api.typed(result, int, float): ...
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl  # type: ignore[import-not-found]
    import pyarrow as pa
else:  # stand-ins, so that `get_type_hints` works even if the packages are not installed
    pa = pd = pl = SimpleNamespace(DataFrame=object, Table=object)

__all__ = ["QueryResult", "distinct_names"]

SHOWN_ROWS = 20
_TYPES = {
    "BOOLEAN": ("bool_", "bool", "Boolean"), "TINYINT": ("int8", "int8", "Int8"),
    "SMALLINT": ("int16", "int16", "Int16"), "INTEGER": ("int32", "int32", "Int32"),
    "BIGINT": ("int64", "int64", "Int64"), "FLOAT": ("float32", "float32", "Float32"),
    "DOUBLE": ("float64", "float64", "Float64"), "VARCHAR": ("string", "object", "String"),
}  # fmt: skip
"""DuckDB type -> types of pyarrow, pandas and polars."""


class QueryResult:
    """Columns of equal length, all in memory."""

    def __init__(self, columns: Sequence[str], rows: Sequence[tuple[object, ...]], types: Sequence[str] = ()) -> None:
        self.columns: tuple[str, ...] = distinct_names(columns)
        self.rows: list[tuple[object, ...]] = list(rows)
        self.types: tuple[str, ...] = tuple(types)
        """DuckDB's type of each column, known even if the result has no rows; empty if unknown."""

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[tuple[object, ...]]:
        return iter(self.rows)

    def __getitem__(self, column: str) -> list[object]:
        """Values of one column, with None for NULL. Raises ValueError for an unknown column."""
        if column not in self.columns:
            raise ValueError(f"{column}: the columns are {', '.join(self.columns)}")
        index = self.columns.index(column)
        return [row[index] for row in self.rows]

    def to_dicts(self) -> list[dict[str, object]]:
        """Return one dictionary per row."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def to_arrow(self) -> pa.Table:
        """A `pyarrow.Table`. Raises ImportError without pyarrow."""
        import pyarrow as pa

        types = {name: getattr(pa, known[0])() for name, known in self._known_types()}
        arrays = {name: pa.array(self[name], type=types.get(name)) for name in self.columns}
        return pa.table(arrays)

    def to_pandas(self) -> pd.DataFrame:
        """A `pandas.DataFrame`. Raises ImportError without pandas."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("to_pandas needs pandas: pip install pandas") from error

        frame = pd.DataFrame(self.rows, columns=list(self.columns))
        return frame if self.rows else frame.astype({name: known[1] for name, known in self._known_types()})

    def to_polars(self) -> pl.DataFrame:
        """A `polars.DataFrame`. Raises ImportError without polars."""
        try:
            import polars as pl
        except ImportError as error:
            raise ImportError("to_polars needs polars: pip install polars") from error

        types = {name: getattr(pl, known[2]) for name, known in self._known_types()}
        return pl.DataFrame([pl.Series(name, self[name], dtype=types.get(name), strict=False) for name in self.columns])

    def _known_types(self) -> Iterator[tuple[str, tuple[str, str, str]]]:
        """Yield (column, type) for columns of basic types; other types are inferred from the values."""
        for name, kind in zip(self.columns, self.types, strict=False):
            if (known := _TYPES.get(kind)) is not None:
                yield name, known

    def __repr__(self) -> str:
        head = ["  ".join(map(str, row)) for row in (self.columns, *self.rows[:SHOWN_ROWS])]
        return "\n".join([*head, *self._rest()])

    def _repr_html_(self) -> str:
        """The first rows as HTML for a notebook, with text of the run escaped."""
        cells = "".join(
            "<tr>" + "".join(f"<td>{html.escape('' if value is None else str(value))}</td>" for value in row) + "</tr>"
            for row in self.rows[:SHOWN_ROWS]
        )
        names = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        return f"<table><thead><tr>{names}</tr></thead><tbody>{cells}</tbody></table>{''.join(self._rest())}"

    def _rest(self) -> list[str]:
        more = len(self.rows) - SHOWN_ROWS
        return [f"{more} more rows"] if more > 0 else []


def distinct_names(names: Sequence[str]) -> tuple[str, ...]:
    """Make names unique: the second `x` becomes `x_2`."""
    found: list[str] = []
    for name in names:
        number, unique = 2, name
        while unique in found:
            number, unique = number + 1, f"{name}_{number}"
        found.append(unique)
    return tuple(found)
