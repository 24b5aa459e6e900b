"""Check rows returned by a reader plug-in: known columns, values of the right types, ranks and steps in range.

for table, row in checked_rows(module.read(path)):
    ...                             # ("steps", {...}), finally ("refused", "2 rows of steps: step is missing")
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from itertools import islice
from typing import Any

from probes.tape.format.schema import TABLES
from store.ddl import store_columns
from store.readers.logs.blocks.exceptions import read_last_line
from store.readers.logs.prefix import Prefix
from store.readers.logs.rules import field_value, load_rules
from store.readers.untrusted.external_files import MAX_RANK, MAX_ROWS

__all__ = ["MAX_REASONS", "READ_TABLES", "Rows", "checked_row", "checked_rows"]

READ_TABLES = ("log_events", "steps", "collectives", "events")
MAX_TEXT_CHARS = 100_000
MAX_REASONS = 5
_NEEDED = {"log_events": ("kind",), "steps": ("rank", "step"), "collectives": ("rank", "step"), "events": ("kind",)}
_COLUMNS = {table: {column.name: column.type for column in store_columns(TABLES[table])} for table in READ_TABLES}
_WHOLE = {"i64": 1 << 63, "i32": 1 << 31}
Rows = list[dict[str, Any]]


def checked_rows(found: Any) -> Iterator[tuple[str, Any]]:
    """Yield (table, row), then ("refused", reason) for the most frequent reasons. Raises TypeError or ValueError if
    `found` is not a mapping of known tables."""
    if not isinstance(found, Mapping):
        raise TypeError(f"read returned a {type(found).__name__} instead of rows by table")
    if unknown := sorted(str(table) for table in found if table not in READ_TABLES):
        raise ValueError(f"unknown tables {', '.join(unknown)}: the tables are {', '.join(READ_TABLES)}")
    reasons: Counter[tuple[str, str]] = Counter()
    for table, rows in found.items():
        for number, row in enumerate(islice(rows, MAX_ROWS + 1)):
            if number == MAX_ROWS:
                reasons[table, f"only the first {MAX_ROWS:,} are read"] += 1
                break
            try:
                yield table, checked_row(row, table)
            except (TypeError, ValueError) as error:
                reasons[table, str(error)[:200]] += 1
    for (table, reason), count in reasons.most_common(MAX_REASONS):
        yield "refused", f"{count:,} row{'s' * (count != 1)} of {table}: {reason}"


def checked_row(row: Any, table: str) -> dict[str, Any]:
    """Convert a row to plain Python values. Raises TypeError or ValueError with a one-line message."""
    if not isinstance(row, Mapping):
        raise TypeError(f"a row is a {type(row).__name__} instead of a mapping")
    columns = _COLUMNS[table]
    for name in _NEEDED[table]:
        if row.get(name) is None:
            raise ValueError(f"{name} is missing")
    kept: dict[str, Any] = {"attempt": 0}
    for name, value in row.items():
        if name not in columns:
            raise ValueError(f"there is no column {str(name)[:60]}")
        if value is not None:
            kept[name] = _value(value, str(name), columns[name])
    if table == "log_events":
        _check_kind(str(kept["kind"]))
        if not isinstance(kept.get("fields", {}), dict):
            raise ValueError(f"fields is a {type(kept['fields']).__name__} instead of a mapping")
        kept.setdefault("line", 0)
        kept.setdefault("fields", _fields(str(kept["kind"]), str(kept.get("message", ""))))
    if not -1 <= kept.get("rank", 0) < MAX_RANK or kept.get("step", 0) < 0:
        raise ValueError("rank or step is out of range")
    return kept


def _check_kind(kind: str) -> None:
    """Raise ValueError if a kind has no rule, because only rules define what a log line means."""
    if kind in (known := _log_kinds()):
        return
    near = get_close_matches(kind, known, n=3, cutoff=0.4)
    hint = f" (similar: {', '.join(near)})" if near else ""
    raise ValueError(f"no rule has kind {kind[:60]!r}{hint}")


def _fields(kind: str, message: str) -> dict[str, Any]:
    """Fields that the rules of this kind extract from the message, as in a text log."""
    if kind == "exception":
        return read_last_line(message, (), Prefix()) or {"message": message}
    for rule in load_rules():
        if rule.kind == kind and rule.pattern is not None and (match := rule.pattern.search(message)):
            return {name: field_value(value) for name, value in match.groupdict().items() if value}
    return {}


@cache
def _log_kinds() -> tuple[str, ...]:
    return tuple(sorted({rule.kind for rule in load_rules()}))


def _value(value: Any, name: str, kind: str) -> Any:
    if hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0:  # a numpy scalar
        value = value.item()
    if kind in _WHOLE:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        is_valid = isinstance(value, int) and not isinstance(value, bool) and -_WHOLE[kind] <= value < _WHOLE[kind]
    elif kind == "f64":
        is_valid = isinstance(value, (int, float)) and not isinstance(value, bool)
    elif kind == "bool":
        is_valid = isinstance(value, bool)
    elif kind == "json":
        is_valid = isinstance(value, (dict, list, str, int, float, bool))
    else:
        is_valid = isinstance(value, str) and len(value) <= MAX_TEXT_CHARS
    if not is_valid:
        raise ValueError(f"{name} is a {type(value).__name__} that does not fit a column of type {kind}")
    return value
