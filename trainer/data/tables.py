"""Read tokens from columns of tables: Parquet files, or a folder saved by Hugging Face `datasets`.

    tables = table_files(Path("fineweb/"))          # its Parquet or Arrow files, sorted; [] if there are none
    for file in tables:
        for block in token_blocks(file, column="", separator=0): ...     # integer arrays

A text column becomes bytes, and a column of integer lists is taken as tokens; the separator follows each row. Without a
name, the column is the first of `input_ids`, `tokens`, `text` and `content` that exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.load import ConfigError
from trainer.error_text import first_line

__all__ = ["is_table", "table_files", "token_blocks"]

_SUFFIXES = {".parquet", ".arrow"}
_COLUMNS = ("input_ids", "tokens", "text", "content")
_ROWS_AT_ONCE = 4096


def is_table(path: Path) -> bool:
    return path.suffix in _SUFFIXES


def table_files(path: Path) -> list[Path]:
    """All tables below a folder, or the file itself, in a machine-independent order."""
    if path.is_file():
        return [path] if is_table(path) else []
    found = (file for file in path.rglob("*") if is_table(file) and file.is_file() and not file.name.startswith("."))
    # `datasets` stores results of its transformations next to the data.
    return sorted((file for file in found if not file.name.startswith("cache-")), key=lambda f: f.as_posix())


def token_blocks(file: Path, *, column: str, separator: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield blocks of some thousand rows: text as uint8, other columns as integers. Raises ConfigError, one line."""
    try:
        import pyarrow as pa
    except ImportError:
        raise ConfigError(f"data.path: {file.name} needs pyarrow: pip install pyarrow") from None
    try:
        for batch in _batches(file):
            name = _column(batch.schema.names, column, file)
            values = batch.column(name)
            kind = values.type
            if pa.types.is_string(kind) or pa.types.is_large_string(kind):
                yield _text(values, separator)
            elif (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_integer(kind.value_type):
                yield _lists(values, separator, file)
            else:
                raise ConfigError(f"data.column = {name!r}: is {kind} in {file.name}; must be text or lists of tokens")
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"data.path: {str(file)!r} cannot be read ({first_line(error)})") from None


def _batches(file: Path) -> Iterator[Any]:
    import pyarrow as pa

    if file.suffix == ".parquet":
        import pyarrow.parquet as pq

        with pq.ParquetFile(file) as table:
            yield from table.iter_batches(batch_size=_ROWS_AT_ONCE)
        return
    with pa.memory_map(str(file)) as mapped:
        try:
            yield from pa.ipc.open_stream(mapped)  # what `datasets` writes
        except pa.ArrowInvalid:
            mapped.seek(0)
            reader = pa.ipc.open_file(mapped)
            yield from (reader.get_batch(number) for number in range(reader.num_record_batches))


def _column(names: list[str], wanted: str, file: Path) -> str:
    if wanted:
        if wanted not in names:
            raise ConfigError(f"data.column = {wanted!r}: {file.name} has {', '.join(names[:20])}")
        return wanted
    for name in _COLUMNS:
        if name in names:
            return name
    raise ConfigError(f"data.column: {file.name} has {', '.join(names[:20])}; name the one to train on")


def _text(values: Any, separator: int) -> np.ndarray[Any, Any]:
    end = bytes([separator]) if separator < 256 else b"\0"
    joined = b"".join(part for text in values.to_pylist() if text for part in (text.encode(), end))
    return np.frombuffer(joined, dtype=np.uint8)


def _lists(values: Any, separator: int, file: Path) -> np.ndarray[Any, Any]:
    values = values.drop_null()
    numbers = values.flatten()
    if numbers.null_count:
        raise ConfigError(f"data.column: a list of {file.name} lacks a token (null)")
    flat = numbers.to_numpy(zero_copy_only=False).astype(np.int64)  # the separator may not fit into a narrower type
    lengths = values.value_lengths().to_numpy(zero_copy_only=False)
    ends = np.cumsum(lengths)[lengths > 0]
    tokens = np.insert(flat, ends, separator)
    if tokens.size and (tokens.min() < 0 or tokens.max() >= 1 << 32):
        raise ConfigError(f"data.column: holds tokens from {tokens.min()} to {tokens.max()}; must be 0 to 2^32 - 1")
    return tokens.astype(np.uint32)
