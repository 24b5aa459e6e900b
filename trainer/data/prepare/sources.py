"""Find the files to prepare: paths, folders, globs and fsspec URLs as a list of files in a fixed order.

    sources = find_sources(["web/*.jsonl.gz", "s3://bucket/books/", "notes.txt"])
    sources[0].kind, sources[0].compression       # "jsonl", "gzip"

Files are in the order of the arguments, and sorted within each argument, so the order does not depend on the machine.
If a folder contains JSONL or Parquet, only those files are used. Otherwise all its files are read as text. A `.json` is
read as JSONL if it is named, or if a folder contains nothing else. Hidden files are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Literal, cast

import fsspec
from fsspec.core import url_to_fs
from fsspec.utils import get_protocol

from trainer.data.token_folder import DataError
from trainer.error_text import first_line

__all__ = ["Source", "current_version", "find_sources", "open_source"]

Kind = Literal["text", "jsonl", "parquet"]
_KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
_VERSIONS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "modified", "created")
"""Fields of `fs.info` that change when a file changes, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file that documents are read from. `version` changes when the file does."""

    name: str
    kind: Kind
    compression: str | None
    size_bytes: int
    version: str


def find_sources(given: list[str]) -> list[Source]:
    """All files named by the arguments. Raises DataError for an argument without files, or a file named twice."""
    found: list[Source] = []
    named_by: dict[str, str] = {}
    for text in given:
        sources = list(_below(text))
        if not sources:
            raise DataError(f"{text}: names no file; check the path or the pattern")
        for source in sources:
            if source.name in named_by:
                raise DataError(
                    f"{source.name}: is named by {named_by[source.name]!r} and by {text!r}; its documents would be "
                    "there twice: name it once"
                )
            named_by[source.name] = text
        found += sources
    return found


def open_source(source: Source) -> BinaryIO:
    """Open for reading bytes, decompressed. Raises DataError."""
    try:
        return cast(BinaryIO, fsspec.open(source.name, "rb", compression=source.compression).open())
    except ValueError as error:
        if source.compression == "zstd":
            raise DataError(f"{source.name}: needs zstandard: pip install zstandard, or decompress it first") from None
        raise DataError(f"{source.name}: cannot be opened ({first_line(error)})") from None
    except (OSError, ImportError) as error:
        raise _unreadable(source.name, error) from None


def current_version(name: str) -> tuple[int, str]:
    """Current size and version of a file. Raises DataError."""
    fs, path = _filesystem(name)
    try:
        info = fs.info(path)
    except (OSError, ImportError) as error:
        raise _unreadable(name, error) from None
    return _size_and_version(info)


def _below(text: str) -> Iterator[Source]:
    fs, path = _filesystem(text)
    has_protocol = "://" in text or "::" in text
    is_text = False
    try:
        if has_protocol and "::" in text:  # zip://a.jsonl::s3://... is one file with this full address
            yield _source(text, fs.info(path))
            return
        if any(character in path for character in "*?["):
            infos = fs.glob(path, detail=True).values()
            chosen = [info["name"] for info in infos if info["type"] == "file" and not _is_hidden(info["name"])]
        elif fs.isdir(path):
            names = [name for name in fs.find(path) if not _is_hidden(name, below=path)]
            tables = [name for name in names if _kind(name)[0] != "text"]
            sure = [name for name in tables if not name.endswith(".json")]
            chosen = sure or names
            is_text = not sure and len(tables) < len(names)
        else:
            chosen = [fs.info(path)["name"]]
        # call `info` for each file, because listings have different fields in different file systems
        found = [(name, fs.info(name)) for name in sorted(chosen)]
    except FileNotFoundError:
        raise DataError(f"{text}: no such file or folder") from None
    except (OSError, ImportError) as error:
        raise _unreadable(text, error) from None
    except Exception as error:
        if not has_protocol:
            raise
        raise _unreadable(text, error) from None  # botocore's errors are neither OSError nor ValueError
    for name, info in found:
        source = _source(fs.unstrip_protocol(name) if has_protocol else name, info)
        yield replace(source, kind="text") if is_text else source


def _filesystem(text: str) -> tuple[Any, str]:
    try:
        fs, path = url_to_fs(text)
    except ImportError as error:
        raise DataError(f"{text}: {get_protocol(text)}:// needs another package ({first_line(error)})") from None
    except ValueError as error:
        raise DataError(f"{text}: is not an address that fsspec knows ({first_line(error)})") from None
    return fs, path


def _source(name: str, info: dict[str, Any]) -> Source:
    kind, compression = _kind(name.partition("::")[0])
    size, version = _size_and_version(info)
    return Source(name=name, kind=kind, compression=compression, size_bytes=size, version=version)


def _kind(name: str) -> tuple[Kind, str | None]:
    path = PurePosixPath(name)
    compression = _COMPRESSIONS.get(path.suffix)
    inner = path.with_suffix("") if compression else path
    return _KINDS.get(inner.suffix, "text"), compression


def _size_and_version(info: dict[str, Any]) -> tuple[int, str]:
    version = next((str(info[name]) for name in _VERSIONS if info.get(name) is not None), "")
    return int(info.get("size") or 0), version


def _is_hidden(name: str, below: str = "") -> bool:
    parts = PurePosixPath(name[len(below) :]).parts if below else (PurePosixPath(name).name,)
    return any(part.startswith(".") for part in parts)


def _unreadable(name: str, error: Exception) -> DataError:
    reason = getattr(error, "strerror", None) or first_line(error)
    return DataError(f"{name}: cannot be read ({reason})")
