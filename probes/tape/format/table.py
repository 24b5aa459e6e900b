"""Types of the tape format: tables, columns and unset values; `probes.tape.format.schema` lists the tables."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "UNSET",
    "UNSET_F64_BITS",
    "Column",
    "ColumnType",
    "Source",
    "Table",
    "bool_column",
    "f64",
    "i32",
    "i64",
    "name",
    "text",
    "time",
]

ColumnType = Literal["i64", "i32", "bool", "f64", "name", "text", "json", "list_i64"]
Source = Literal["tape", "event", "watch", "reader", "derived"]


def _unset_f64() -> float:
    """A quiet NaN with a reserved payload, so that a loss that is NaN is not read as 'not recorded'."""
    return float(struct.unpack("<d", struct.pack("<Q", UNSET_F64_BITS))[0])


UNSET_F64_BITS = 0x7FF8_0000_5EED_0001
UNSET: dict[str, int | float] = {
    "i64": -(2**63),
    "i32": -(2**31),
    "bool": -1,
    "f64": _unset_f64(),
    "name": 0,
}
"""Value on a tape for "not recorded", by column type."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: `unit` is UCUM-like ("ns", "By", "1", "" for names and identifiers)."""

    name: str
    type: ColumnType
    unit: str
    help: str
    is_time: bool = False  # a point in time: monotonic on the tape, epoch in the store


@dataclass(frozen=True, slots=True)
class Table:
    """One table.

    `source` says where its rows come from: ranks through a tape, any process through an event of kind `event_kind`,
    `watch` itself, readers of other programs' files, or other tables at ingestion. In a table with `can_be_open` a
    record is written when an activity begins and completed in place when it ends; the store shows open and complete
    records in one view. `names_file` holds the texts of its columns of type `name`.
    """

    name: str
    help: str
    source: Source
    columns: tuple[Column, ...]
    can_be_open: bool = False
    segment_bytes: int = 1 << 20
    event_kind: str = ""
    names_file: str = "names.jsonl"

    def column(self, name: str) -> Column:
        """The column called `name`; KeyError if there is none."""
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)


def i64(name: str, unit: str, help: str) -> Column:
    return Column(name, "i64", unit, help)


def time(name: str, help: str) -> Column:
    return Column(name, "i64", "ns", help, is_time=True)


def i32(name: str, unit: str, help: str) -> Column:
    return Column(name, "i32", unit, help)


def f64(name: str, unit: str, help: str) -> Column:
    return Column(name, "f64", unit, help)


def name(name: str, help: str) -> Column:
    return Column(name, "name", "", help)


def text(name: str, help: str) -> Column:
    return Column(name, "text", "", help)


def bool_column(name: str, help: str) -> Column:
    return Column(name, "bool", "", help)
