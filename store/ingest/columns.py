"""Convert records and events to columns for DuckDB: NULL for what was not recorded, text for names.

    records = SegmentRecords(rank=3, attempt=0, anchor_ns=..., names=book, records=...)
    batch = tape_batch(TABLES["spans"], [records], dictionary)
    insert(connection, batch, "spans_done")

In a large batch, names stay numeric codes until the database joins them with their texts, which is twice as fast as
building and scanning a string column of numpy objects. In a small batch, planning the joins would cost more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from probes.tape.format.schema import UNSET, UNSET_F64_BITS, Column, Table
from store.ddl import SEGMENT, SQL_TYPES, quoted, store_columns

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from store.ingest.name_codes import Dictionary, NameBook

__all__ = ["Batch", "Event", "SegmentRecords", "clean_json", "event_batch", "insert", "tape_batch"]

FEW_ROWS = 10_000
_I64_MAX = 2**63
_MAX_RECORDED = 2**61
"""Largest value on a tape (73 years in nanoseconds); larger values are treated as not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRecords:
    """Records of one segment, with the rank, attempt, clock anchor and names needed to convert them."""

    rank: int
    attempt: int
    anchor_ns: int
    names: NameBook
    records: npt.NDArray[Any]
    segment: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Columns of equal length; `codes` are columns that hold codes of `texts` (0: NULL).

    `nans` marks NaN values of float columns, because DuckDB reads a numpy NaN as NULL.
    """

    columns: Mapping[str, npt.NDArray[Any]]
    types: Mapping[str, str]
    num_rows: int
    codes: frozenset[str] = frozenset()
    texts: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    nans: Mapping[str, npt.NDArray[np.bool_]] = field(default_factory=dict)


def tape_batch(
    table: Table, parts: Sequence[SegmentRecords], dictionary: Dictionary, *, with_segment: bool = False
) -> Batch:
    """Convert the records of several segments to columns of `table`."""
    lengths = [len(part.records) for part in parts]
    columns: dict[str, npt.NDArray[Any]] = {
        "attempt": np.repeat(np.array([part.attempt for part in parts], dtype=np.int32), lengths),
        "rank": np.repeat(np.array([part.rank for part in parts], dtype=np.int32), lengths),
    }
    types = {column.name: SQL_TYPES[column.type] for column in store_columns(table)}
    for column in table.columns:
        columns[column.name] = _joined([_values(part, column) for part in parts])
    codes = frozenset(column.name for column in table.columns if column.type == "name")
    texts = {}
    if sum(lengths) < FEW_ROWS:
        for name in codes:
            columns[name] = dictionary.decoded(columns[name])
        codes = frozenset()
    elif codes:
        texts = dictionary.texts_of([columns[name] for name in codes])
    if with_segment:
        columns[SEGMENT] = np.repeat(np.array([part.segment for part in parts], dtype=object), lengths)
        types[SEGMENT] = "VARCHAR"
    return Batch(columns=columns, types=types, num_rows=sum(lengths), codes=codes, texts=texts, nans=_nans(columns))


def _joined(values: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    data = np.concatenate([np.asarray(part) for part in values])
    if not any(isinstance(part, np.ma.MaskedArray) for part in values):
        return data
    return np.ma.MaskedArray(data, mask=np.concatenate([np.ma.getmaskarray(part) for part in values]))


def _values(part: SegmentRecords, column: Column) -> npt.NDArray[Any]:
    """One column of one part: a plain array, or a masked one if values are missing."""
    fields = part.records.dtype.names or ()
    if column.name not in fields:  # the tape has an older schema
        if column.type == "name":
            return np.zeros(len(part.records), dtype=np.int64)
        empty = np.zeros(len(part.records), dtype=_NUMPY[column.type])
        return np.ma.MaskedArray(empty, mask=np.ones(len(empty), dtype=bool))
    raw = np.ascontiguousarray(part.records[column.name])
    if column.type == "name":
        return part.names.codes(raw)
    if column.type == "f64":
        unset = raw.view(np.uint64) == UNSET_F64_BITS  # compare bits, so that a loss that is NaN stays NaN
    else:
        unset = raw == UNSET[column.type]
        # A value that no clock or counter can reach counts as not recorded, because sums would overflow. Only columns
        # with a unit are checked: checksums have none and may use all 64 bits.
        if column.type == "i64" and column.unit:
            unset |= (raw > _MAX_RECORDED) | (raw < -_MAX_RECORDED)
    values = raw
    if column.type == "bool":
        values = raw != 0
    elif column.is_time:
        values = raw + part.anchor_ns
    return np.ma.MaskedArray(values, mask=unset) if unset.any() else values


def _nans(columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.bool_]]:
    found = {}
    for name, values in columns.items():
        if values.dtype.kind == "f":
            nan = np.isnan(np.asarray(values)) & ~np.ma.getmaskarray(values)
            if nan.any():
                found[f"{name} is nan"] = nan
    return found


_NUMPY: dict[str, type[np.generic]] = {"i64": np.int64, "i32": np.int32, "bool": np.bool_, "f64": np.float64}


def insert(connection: DuckDBPyConnection, batch: Batch, target: str) -> None:
    """Append a batch to a table."""
    if not batch.num_rows:
        return
    names = list(batch.columns)
    select, joins = [], []
    for i, name in enumerate(names):
        if name in batch.codes:
            select.append(f"n{i}.text")
            joins.append(f"LEFT JOIN batch_names n{i} ON n{i}.code = b.{quoted(name)}")
        elif f"{name} is nan" in batch.nans:
            flag = quoted(f"{name} is nan")
            select.append(f"CASE WHEN b.{flag} THEN CAST('nan' AS DOUBLE) ELSE b.{quoted(name)} END")
        else:
            select.append(f"CAST(b.{quoted(name)} AS {batch.types[name]})")
    connection.register("batch_rows", {**batch.columns, **batch.nans})
    try:
        if joins:
            connection.register("batch_names", dict(batch.texts))
        connection.execute(
            f"INSERT INTO {target} ({', '.join(map(quoted, names))}) SELECT {', '.join(select)} "
            f"FROM batch_rows b {' '.join(joins)}"
        )
    finally:
        connection.unregister("batch_rows")
        if joins:
            connection.unregister("batch_names")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event. `attempt` and `rank` come from its file and are used if the event states none."""

    content: Mapping[str, Any]
    attempt: int
    rank: int


def event_batch(table: Table, events: Sequence[Event]) -> Batch:
    """Convert events to columns of `table`. A value of the wrong type becomes NULL, because user code writes events,
    too.
    """
    columns: dict[str, npt.NDArray[Any]] = {}
    types = {}
    for column in store_columns(table):
        types[column.name] = SQL_TYPES[column.type]
        if table.name == "events" and column.name == "detail":
            values: list[Any] = [clean_json(event.content) for event in events]
        else:
            values = [_CONVERT[column.type](event.content.get(column.name)) for event in events]
        if column.name in ("attempt", "rank"):
            defaults = [event.attempt if column.name == "attempt" else event.rank for event in events]
            values = [default if value is None else value for value, default in zip(values, defaults, strict=True)]
        columns[column.name] = _array(values, column.type)
    return Batch(columns=columns, types=types, num_rows=len(events), nans=_nans(columns))


def _array(values: list[Any], kind: str) -> npt.NDArray[Any]:
    if kind in _NUMPY:
        mask = np.array([value is None for value in values], dtype=bool)
        filled = np.array([0 if value is None else value for value in values], dtype=_NUMPY[kind])
        return np.ma.MaskedArray(filled, mask=mask)
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _integer(value: Any, limit: int = _I64_MAX) -> int | None:
    """The value if it is a whole number below `limit`, otherwise None. NaN and Inf differ from their `value // 1`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1:
        return None
    return int(value) if -limit <= value < limit else None


def _float(value: Any) -> float | None:
    if isinstance(value, str) and value.lower() in ("nan", "inf", "-inf"):  # floats that JSON lacks
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _text(value: Any) -> str | None:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else None


def _integers(value: Any) -> str | None:
    """Format a list as text that the database casts to its list type."""
    if not isinstance(value, list):
        return None
    found = [number for number in map(_integer, value) if number is not None]
    return str(found) if len(found) == len(value) else None


_CONVERT: dict[str, Callable[[Any], Any]] = {
    "i64": _integer,
    "i32": lambda value: _integer(value, 2**31),
    "bool": lambda value: value if isinstance(value, bool) else None,
    "f64": _float,
    "text": _text,
    "json": lambda value: None if value is None else clean_json(value),
    "list_i64": _integers,
}


def clean_json(value: Any) -> str:
    """Serialise any JSON value as text that DuckDB accepts: without NaN, numbers beyond 64 bits and lone surrogates."""
    try:
        return json.dumps(_clean(value), separators=(",", ":"), ensure_ascii=False)
    except RecursionError:
        return '"(nested too deeply)"'


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool) and not -_I64_MAX <= value < 2 * _I64_MAX:
        return hex(value)
    if isinstance(value, dict):
        return {_text(str(key)): _clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return value
