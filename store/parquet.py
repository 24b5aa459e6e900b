"""A run's tables as Parquet files in hive partitions, for ClickHouse, Spark, Trino, DuckDB or a data lake.

    write_tables(store, "s3://lake/rankscope", run_id="demo", created_ns=manifest["created_wall_ns"])

    lake/rankscope/table=steps/run=demo/date=2026-11-21/attempt=0/part-0.parquet

Each `table=...` is a data set with one schema for many runs; exporting a run again replaces its files. `date` is the
day (UTC) on which the run was created. The target is a folder or any URL of fsspec. Columns, units and NULLs are as in
docs/schema.md, except that partition columns are not in the files.
"""

from __future__ import annotations

import datetime
import json
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

from probes.tape.format.schema import TABLES, Table

__all__ = ["ParquetError", "ParquetFile", "write_tables"]

BATCH_ROWS = 100_000
ROW_GROUP_ROWS = 1_000_000
_PART = "part-0.parquet"


class ParquetError(Exception):
    """Files cannot be written; the message is one line."""


class Batches(Protocol):
    """The methods of a store that this module calls."""

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]: ...

    def batches(self, sql: str, params: Sequence[Any] = (), *, batch_rows: int = BATCH_ROWS) -> Any: ...


@dataclass(frozen=True, slots=True)
class ParquetFile:
    """One written file."""

    path: str
    num_rows: int
    num_bytes: int


def write_tables(
    source: Batches, place: str, *, run_id: str, created_ns: int, manifest: Mapping[str, Any] | None = None
) -> list[ParquetFile]:
    """Write every table that has rows, and the manifest as table `runs`. Raises ParquetError, or ImportError if
    pyarrow, fsspec or the package that fsspec needs for this URL is not installed.
    """
    from fsspec.core import url_to_fs

    day = datetime.datetime.fromtimestamp(created_ns / 1e9, datetime.UTC).date().isoformat()
    try:
        files, root = url_to_fs(place)
        written = []
        if manifest:
            path = posixpath.join(root, "table=runs", f"run={quote(run_id, safe='')}", f"date={day}", _PART)
            written.append(_write(files, path, _manifest(manifest, created_ns)))
        for table in TABLES.values():
            for (attempt,) in source.rows(f"SELECT DISTINCT attempt FROM {table.name} ORDER BY 1"):
                keys = {"table": table.name, "run": run_id, "date": day, "attempt": attempt}
                folders = (f"{key}={quote(_value(value), safe='')}" for key, value in keys.items())
                path = posixpath.join(root, *folders, _PART)
                batches = source.batches(_select(table), [attempt], batch_rows=BATCH_ROWS)
                written.append(_write(files, path, batches))
    except OSError as error:
        raise ParquetError(f"{place}: cannot be written ({error.strerror or error}): choose another --out") from error
    except ValueError as error:  # a URL with an unknown scheme
        raise ParquetError(f"{place}: {error}") from error
    return written


def _select(table: Table) -> str:
    names = [(column.name, column.type) for column in table.columns]
    names = [("rank", "i32"), *(pair for pair in names if pair[0] not in ("rank", "attempt"))]
    if table.source not in ("tape", "derived"):
        names += [(name, "i64") for name in ("wall_ns", "step") if name not in dict(names)]
    picked = ", ".join(f'CAST("{name}" AS VARCHAR) AS "{name}"' if kind == "json" else f'"{name}"'
                       for name, kind in names)  # fmt: skip
    order = next((column.name for column in table.columns if column.is_time), "wall_ns")
    order = order if order in dict(names) else "step"  # a derived table may have no time column
    return f'SELECT {picked} FROM {table.name} WHERE attempt IS NOT DISTINCT FROM ? ORDER BY rank, "{order}"'


def _value(value: object) -> str:
    return "__HIVE_DEFAULT_PARTITION__" if value is None else str(value)


def _manifest(manifest: Mapping[str, Any], created_ns: int) -> Iterator[Any]:
    import pyarrow as pa

    texts = {key: json.dumps(manifest.get(key), default=str) for key in ("config", "mesh", "versions", "command")}
    numbers = {key: _integer(manifest.get(key)) for key in ("world_size", "num_parameters", "schema_version")}
    columns = {"created_ns": pa.array([created_ns], pa.int64())}
    columns |= {key: pa.array([value], pa.int64()) for key, value in numbers.items()}
    columns["rankscope_version"] = pa.array([str(manifest.get("rankscope_version") or "")], pa.string())
    columns |= {key: pa.array([text], pa.string()) for key, text in texts.items()}
    yield pa.record_batch(columns)


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _write(files: Any, path: str, batches: Any) -> ParquetFile:
    """Write to a temporary name first where possible, so that no reader sees half a file."""
    import pyarrow.parquet as pq

    is_local = "file" in files.protocol
    fresh = posixpath.join(posixpath.dirname(path), f".{_PART}") if is_local else path
    files.makedirs(posixpath.dirname(path), exist_ok=True)
    num_rows = 0
    with files.open(fresh, "wb") as sink:
        writer = None
        try:
            for batch in batches:
                writer = writer or pq.ParquetWriter(sink, batch.schema, compression="zstd")
                writer.write_batch(batch, row_group_size=ROW_GROUP_ROWS)
                num_rows += batch.num_rows
        finally:
            if writer is not None:
                writer.close()
    if is_local:
        files.mv(fresh, path)
    return ParquetFile(path, num_rows, int(files.size(path)))
