"""Queries of an analyzer to the store, answered as plain numpy columns.

    table = source.query("SELECT rank, loss FROM steps WHERE step = ?", [40])
    floats(table["loss"])        # float64, NaN where NULL

`store.Store` fits this protocol; so does any fake with three methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from store.arrays import Floats, Ints

__all__ = [
    "READ_CALLS",
    "READ_ROWS",
    "READ_STEPS",
    "Floats",
    "Ints",
    "Source",
    "TypedSource",
    "every_kth",
    "every_kth_rank",
    "floats",
    "ints",
    "lacking",
    "missing_tables",
]

READ_STEPS = 2000
"""Steps that are enough for a median, and for a drawing: at even distances."""
READ_CALLS = 4_000_000
"""Rows of collectives or steps that are read in detail; of more, every k-th rank or step."""
READ_ROWS = 20_000_000
"""Rows of steps or spans that a sum or median is taken of; of more, those of every k-th step."""


class TypedSource(Protocol):
    """Read-only SQL over the tables of docs/schema.md, as a plug-in gets it: `rankscope.api.Source`.

    What a cell holds is known when it is read: `typed` (analyzers/run/typed_values.py), `ints` and `floats` state its type.
    """

    def query(self, sql: str, params: Sequence[object] = ()) -> dict[str, npt.NDArray[np.generic]]:
        """The answer as one array a column (masked where NULL)."""

    def rows(self, sql: str, params: Sequence[object] = ()) -> list[tuple[object, ...]]:
        """The answer as tuples (None where NULL)."""

    def has(self, table: str) -> bool:
        """Return True if the table exists and can be read."""


class Source(Protocol):
    """A `TypedSource` for the analyses of this package, which know the types of the tables' columns."""

    def query(self, sql: str, params: Sequence[Any] = ()) -> dict[str, npt.NDArray[Any]]:
        """The answer as one array a column (masked where NULL)."""

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The answer as tuples (None where NULL)."""

    def has(self, table: str) -> bool:
        """Return True if the table exists and can be read."""


def floats(column: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """A column as float64; NULL becomes NaN."""
    masked: Any = np.ma.asarray(column)
    values: Floats = masked.astype(np.float64).filled(np.nan)
    return values


def ints(column: npt.NDArray[Any], missing: int = -1) -> npt.NDArray[np.int64]:
    """A column as int64; NULL becomes `missing`."""
    masked: Any = np.ma.asarray(column)
    if masked.dtype.kind == "f":  # some readers give nullable integers as floats
        masked = np.ma.masked_invalid(masked)
    values: Ints = masked.filled(missing).astype(np.int64)
    return values


def missing_tables(source: TypedSource, *tables: str) -> list[str]:
    """Tables of `tables` that are missing or empty: no records do not mean healthy."""
    return [t for t in tables if not source.has(t) or not source.rows(f"SELECT 1 FROM {t} LIMIT 1")]


def lacking(source: TypedSource, **needed: Sequence[str]) -> list[str]:
    """Parts of `needed` (table: columns) that were not recorded: `steps`, or `steps.data_ns` for a column of NULLs."""
    absent: list[str] = []
    for table, columns in needed.items():
        if missing_tables(source, table):
            absent.append(table)
        else:  # one by one: where there are values, the first few rows show it
            absent += [
                f"{table}.{column}"
                for column in columns
                if not source.rows(f"SELECT 1 FROM {table} WHERE {column} IS NOT NULL LIMIT 1")
            ]
    return absent


def every_kth(source: Source, table: str, max_rows: int, max_steps: int) -> int:
    """Return k such that every k-th step of a table is few enough rows to read."""
    ((num_rows, first, last),) = source.rows(f"SELECT count(*), min(step), max(step) FROM {table}")
    num_steps = (last or 0) - (first or 0) + 1
    return int(max(1, -(-num_rows // max_rows), -(-num_steps // max_steps)))


def every_kth_rank(source: Source, table: str, max_rows: int = 4_000_000) -> int:
    """Return k such that every k-th rank's rows are few enough, for analyses that need all steps."""
    ((num_rows,),) = source.rows(f"SELECT count(*) FROM {table}")
    return max(1, -(-int(num_rows) // max_rows))
