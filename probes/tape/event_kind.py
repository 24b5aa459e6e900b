"""Definition of one kind of event, with a column for each field of its detail.

rollback = EventKind(
    name="rollback", written_by="rank 0", meaning="The run went back.", fields=(int_field("from_step"),)
)
"""

from __future__ import annotations

from dataclasses import dataclass

from .format.schema import Column

__all__ = [
    "EventKind",
    "bool_field",
    "float_field",
    "int_field",
    "json_field",
    "ranks_field",
    "text_field",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventKind:
    """One kind of event. With `table`, its first fields are the columns of that table of the store."""

    name: str
    written_by: str
    meaning: str
    fields: tuple[Column, ...]
    table: str = ""
    is_open: bool = False
    """True if the writer may add its own fields."""


def text_field(name: str, help: str = "") -> Column:
    """A text."""
    return Column(name, "text", "", help)


def int_field(name: str, help: str = "", unit: str = "1") -> Column:
    """An integer."""
    return Column(name, "i64", unit, help)


def float_field(name: str, help: str = "", unit: str = "1") -> Column:
    """A float."""
    return Column(name, "f64", unit, help)


def bool_field(name: str, help: str = "") -> Column:
    """A truth value."""
    return Column(name, "bool", "", help)


def ranks_field(name: str, help: str = "") -> Column:
    """A list of integers, such as ranks."""
    return Column(name, "list_i64", "1", help)


def json_field(name: str, help: str = "") -> Column:
    """Any JSON value."""
    return Column(name, "json", "", help)
