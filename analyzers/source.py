"""Queries of an analyzer to the store, answered as plain numpy columns.

    table = source.query("SELECT rank, loss FROM steps WHERE step = ?", [40])
    floats(table["loss"])        # float64, NaN where NULL

`store.Store` fits this protocol; so does any object with these three methods.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, overload, runtime_checkable

import numpy as np
import numpy.typing as npt

from store.arrays import Floats, Ints

# Relative: see analyzers/diagnose.py.
from .finding import typed_value
from .wording import counted

__all__ = [
    "READ_CALLS",
    "READ_ROWS",
    "READ_STEPS",
    "Floats",
    "Ints",
    "KnowsValues",
    "Source",
    "TypedSource",
    "every_kth",
    "every_kth_rank",
    "floats",
    "ints",
    "lacking",
    "missing_tables",
    "typed",
]

A = TypeVar("A", bool, float, int, str)
B = TypeVar("B", bool, float, int, str)
C = TypeVar("C", bool, float, int, str)
D = TypeVar("D", bool, float, int, str)
E = TypeVar("E", bool, float, int, str)
F = TypeVar("F", bool, float, int, str)
READ_STEPS = 2000
"""Number of evenly spaced steps that is enough for a median or a figure."""
READ_CALLS = 4_000_000
"""Maximum rows of a table of collectives or steps that is read in full; of larger ones, every k-th rank or step is."""
READ_ROWS = 20_000_000
"""Maximum number of rows of steps or spans for sums and medians over all of them; larger tables use every k-th step."""


_ANY_VALUE = "SELECT 1 FROM {table} WHERE {column} IS NOT NULL LIMIT 1"


class TypedSource(Protocol):
    """Read-only SQL over the tables of docs/schema.md, as a plug-in gets it: `rankscope.api.Source`.

    Cells have no static type; `typed`, `ints` and `floats` check and state it.
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


@runtime_checkable
class KnowsValues(Protocol):
    """A source that counts the values of a table once for all analyses (`CachedSource`)."""

    def has_values(self, table: str) -> Mapping[str, bool]:
        """{column: whether it has a value}; columns of a long table are left out if this is not known."""


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
    """Return the names in `tables` that are missing or empty: a lack of records is not health."""
    return [t for t in tables if not source.has(t) or not source.rows(f"SELECT 1 FROM {t} LIMIT 1")]


def lacking(source: TypedSource, **needed: Sequence[str]) -> list[str]:
    """Parts of `needed` (table: columns) that were not recorded: `steps`, or `steps.data_ns` for a column of NULLs."""
    absent: list[str] = []
    for table, columns in needed.items():
        if missing_tables(source, table):
            absent.append(table)
            continue
        known = source.has_values(table) if isinstance(source, KnowsValues) else {}
        absent += [
            f"{table}.{column}"
            for column in columns  # a column that is not in `known` takes a query, which ends at the first value found
            if not (known[column] if column in known else source.rows(_ANY_VALUE.format(table=table, column=column)))
        ]
    return absent


def every_kth(source: Source, table: str, max_rows: int, max_steps: int) -> int:
    """Return k such that every k-th step of a table is about `max_rows` rows and `max_steps` steps at most."""
    ((num_rows, first, last),) = source.rows(f"SELECT count(*), min(step), max(step) FROM {table}")
    num_steps = (last or 0) - (first or 0) + 1
    return int(max(1, -(-num_rows // max_rows), -(-num_steps // max_steps)))


def every_kth_rank(source: Source, table: str) -> int:
    """Return k such that every k-th rank is about `READ_CALLS` rows at most, for analyses that need all steps."""
    ((num_rows,),) = source.rows(f"SELECT count(*) FROM {table}")
    return max(1, -(-int(num_rows) // READ_CALLS))


@overload
def typed(rows: Iterable[Sequence[object]], a: type[A], /) -> list[tuple[A]]: ...
@overload
def typed(rows: Iterable[Sequence[object]], a: type[A], b: type[B], /) -> list[tuple[A, B]]: ...
@overload
def typed(rows: Iterable[Sequence[object]], a: type[A], b: type[B], c: type[C], /) -> list[tuple[A, B, C]]: ...
@overload
def typed(
    rows: Iterable[Sequence[object]], a: type[A], b: type[B], c: type[C], d: type[D], /
) -> list[tuple[A, B, C, D]]: ...
@overload
def typed(
    rows: Iterable[Sequence[object]], a: type[A], b: type[B], c: type[C], d: type[D], e: type[E], /
) -> list[tuple[A, B, C, D, E]]: ...
@overload
def typed(
    rows: Iterable[Sequence[object]], a: type[A], b: type[B], c: type[C], d: type[D], e: type[E], f: type[F], /
) -> list[tuple[A, B, C, D, E, F]]: ...
def typed(rows: Iterable[Sequence[object]], *kinds: type) -> list[tuple[object, ...]]:  # type: ignore[misc]
    """Rows of one to six columns as tuples of these types (bool, float, int, str). NULL is NaN in a column of floats.

    Raises ValueError if a value is of another type or NULL: leave such rows out, or use `coalesce`.
    """
    found = []
    for at, row in enumerate(rows, 1):
        if len(row) != len(kinds):
            given = counted(len(kinds), "type") or "no types"
            raise ValueError(f"typed() was given {given} for a row of {counted(len(row), 'column')}")
        pairs = zip(row, kinds, strict=True)
        found.append(tuple(_cell(value, kind, number, at) for number, (value, kind) in enumerate(pairs, 1)))
    return found


def _cell(value: object, kind: type, column: int, row: int) -> object:
    if value is None and kind is float:
        return math.nan
    return typed_value(value, kind, f"column {column} of row {row}")
