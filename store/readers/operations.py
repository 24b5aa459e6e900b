"""Read the operations of a pipeline-parallel job from Parquet, one row each, as in published straggler traces.

    jobs = read_operations(path)
    jobs.optype[jobs.kind[0]], jobs.dp_rank[0], jobs.stage[0], jobs.duration_ms[0]

Columns: dp_rank, stage, step, optype, start (or start_ts), duration. Optional columns: rank, microbatch (or mb_id), mc
(chunk of the stage), gmc (chunk of the model). Floating-point times are seconds, integers are nanoseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from store.arrays import Floats, Ints
from store.database import connect_for_file
from store.ddl import quoted
from store.readers.untrusted.external_files import SourceError

__all__ = ["PARQUET", "Operations", "read_operations"]

PARQUET = b"PAR1"
MAX_ROWS = 5_000_000
MAX_FILE_BYTES = 4 << 30
MAX_NUMBER = 1_000_000
"""Exclusive upper limit of `dp_rank` and `stage`."""
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "dp_rank": ("dp_rank", "dp"), "stage": ("stage", "pp_rank"), "step": ("step",), "optype": ("optype", "op_type"),
    "start": ("start", "start_ts"), "duration": ("duration", "dur"), "rank": ("rank",),
    "microbatch": ("microbatch", "mb_id", "microbatch_id"), "mc": ("mc",), "gmc": ("gmc",),
}  # fmt: skip
_NEEDED = ("dp_rank", "stage", "step", "optype", "start", "duration")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Operations in order of time. `microbatch` is -1 if it is not stated. A missing `rank` or `chunk` (of the model)
    is derived from the other columns.
    """

    path: Path
    optype: tuple[str, ...]
    kind: Ints
    """Index into `optype` for each row."""
    dp_rank: Ints
    stage: Ints
    rank: Ints
    step: Ints
    start_ms: Floats
    duration_ms: Floats
    microbatch: Ints
    chunk: Ints
    left_out: int
    """Number of rows with a missing or invalid value in a required column."""


def read_operations(path: Path) -> Operations:
    """Read a file. Raises SourceError with one line if it has no such operations."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise SourceError(f"has more than {MAX_FILE_BYTES:,} bytes")
    if any(mark in str(path) for mark in "*?[{"):
        raise SourceError("has a name with *, ?, [ or {: rename it")
    connection = connect_for_file(path)
    try:
        names = {
            row[0].lower(): row[0]
            for row in connection.execute("DESCRIBE FROM read_parquet(?)", [str(path)]).fetchall()
        }
        columns = {
            key: next((names[name] for name in aliases if name in names), None) for key, aliases in _ALIASES.items()
        }
        missing = [key for key in _NEEDED if columns[key] is None]
        if missing:
            raise SourceError(f"is a Parquet file without the column{'s' * (len(missing) > 1)} {', '.join(missing)}")
        picked = ", ".join(_picked(key, name) for key, name in columns.items())
        sql = f"SELECT {picked} FROM read_parquet(?) ORDER BY start, duration LIMIT {MAX_ROWS + 1}"
        found = connection.execute(sql, [str(path)]).fetchnumpy()
    except SourceError:
        raise
    except Exception as error:  # DuckDB reports damaged files with various types of errors
        raise SourceError(f"cannot be read as Parquet: {str(error).splitlines()[0][:200]}") from None
    finally:
        connection.close()
    return _operations(path, found)


def _picked(key: str, name: str | None) -> str:
    if name is None:
        return f"NULL::DOUBLE AS {key}"
    column = quoted(name)
    if key == "optype":
        return f"left(lower(CAST({column} AS VARCHAR)), 80) AS optype"
    if key in ("start", "duration"):  # seconds or nanoseconds, by the column's type
        return (
            f"CASE WHEN typeof({column}) IN ('DOUBLE', 'FLOAT') OR typeof({column}) LIKE 'DECIMAL%' "
            f"THEN try_cast({column} AS DOUBLE) * 1e3 ELSE try_cast({column} AS DOUBLE) / 1e6 END AS {key}"
        )
    return f"try_cast({column} AS DOUBLE) AS {key}"


def _operations(path: Path, found: dict[str, Any]) -> Operations:
    plain = {key: _filled(values) for key, values in found.items() if key != "optype"}
    named = np.array([str(name or "").replace("_", "-") for name in np.ma.getdata(found["optype"])], dtype=object)
    num_rows = len(named)
    if num_rows > MAX_ROWS:
        raise SourceError(f"holds more than {MAX_ROWS:,} operations")
    good = (plain["duration"] >= 0) & np.isfinite(plain["start"]) & (named != "")
    for key in ("dp_rank", "stage"):
        good &= (plain[key] >= 0) & (plain[key] < MAX_NUMBER)
    good &= np.abs(plain["step"]) < 2**53
    if not good.any():
        raise SourceError("holds no operation with all required numbers")
    optypes, kind = np.unique(named[good].astype(str), return_inverse=True)
    stage, dp_rank = _whole(plain["stage"][good]), _whole(plain["dp_rank"][good])
    num_stages = int(stage.max()) + 1
    chunk = _whole(plain["gmc"][good])
    chunk = np.where(chunk >= 0, chunk, stage + num_stages * np.maximum(_whole(plain["mc"][good]), 0))
    rank = _whole(plain["rank"][good])
    return Operations(
        path=path,
        optype=tuple(str(name) for name in optypes),
        kind=kind.astype(np.int64).ravel(),
        dp_rank=dp_rank,
        stage=stage,
        rank=np.where(rank >= 0, rank, dp_rank * num_stages + stage),
        step=_whole(plain["step"][good]),
        start_ms=plain["start"][good],
        duration_ms=plain["duration"][good],
        microbatch=_whole(plain["microbatch"][good]),
        chunk=chunk,
        left_out=int(num_rows - good.sum()),
    )


def _filled(values: Any) -> Floats:
    return np.ma.filled(np.ma.asarray(values, dtype=np.float64), np.nan)


def _whole(values: Floats) -> Ints:
    return np.where(np.isfinite(values) & (np.abs(values) < 2**53), values, -1).astype(np.int64)
