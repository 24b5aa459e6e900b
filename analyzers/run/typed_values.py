"""Values of evidence and of rows with the types that a caller states, checked.

    for rank, ms in typed(run.sql("SELECT rank, median(duration_ns) / 1e6 FROM steps GROUP BY rank"), int, float): ...
    finding.value("excess_ms", float)

What SQL and JSON hold is known when it is read: a type checker sees `object`, and here the stated type.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import TypeVar, overload

__all__ = ["Plain", "typed", "typed_value"]

Plain = TypeVar("Plain", bool, float, int, str)
A = TypeVar("A", bool, float, int, str)
B = TypeVar("B", bool, float, int, str)
C = TypeVar("C", bool, float, int, str)
D = TypeVar("D", bool, float, int, str)
E = TypeVar("E", bool, float, int, str)
F = TypeVar("F", bool, float, int, str)


def typed_value(value: object, kind: type[Plain], name: str) -> Plain:
    """The value as a `kind`: whole numbers are floats, too. Raises ValueError for a value of another type, or none."""
    if kind is float and isinstance(value, (int, float, Decimal)) and not isinstance(value, bool):
        return kind(value)
    if isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
        return value
    what = "null" if value is None else f"of type {type(value).__name__}"
    raise ValueError(f"{name} is {what}, not {kind.__name__}")


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

    Raises ValueError where a value is of another type, or NULL: leave those rows out or use `coalesce`.
    """
    found = []
    for at, row in enumerate(rows, 1):
        if len(row) != len(kinds):
            raise ValueError(f"a row has {len(row)} columns, and types are stated for {len(kinds)}")
        pairs = zip(row, kinds, strict=True)
        found.append(tuple(_cell(value, kind, number, at) for number, (value, kind) in enumerate(pairs, 1)))
    return found


def _cell(value: object, kind: type, column: int, row: int) -> object:
    if value is None and kind is float:
        return math.nan
    return typed_value(value, kind, f"column {column} of row {row}")
