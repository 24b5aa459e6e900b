"""Describe files that are neither text logs nor of a supported format: empty files, JSON, tables of values, packed
files.

unknown_document(Path("config.json"))       # "is a JSON document (model, optimizer, seed) of no supported format"
unknown_document(Path("job.log"))           # "": it may be a log
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

from store.readers.logs.scan import read_log
from store.readers.programs.text import is_number
from store.readers.untrusted.external_files import SourceError, head, read_whole

__all__ = ["EMPTY", "packed_with", "unknown_document"]

EMPTY = "is empty"
MAX_BYTES = 8 << 20
"""Maximum bytes of a JSON document that is parsed."""
HEAD_BYTES = 16 << 10
_JSON_BEGIN = re.compile(rb"\s*(?:\{\s*\"[^\"]+\"\s*:|\[\s*\{\s*\"[^\"]+\"\s*:)")
MAX_NAMES = 6
MIN_ROWS = 2
MAX_NAME_CHARS = 40
_NAME = re.compile(r"(?:[^{}'\"‘’“”=:]|:(?! ))+")
"""A column's name, as opposed to part of a dictionary that a trainer printed."""


_PACKED = {
    b"7z\xbc\xaf\x27\x1c": "7-Zip", b"Rar!": "RAR", b"\x04\x22\x4d\x18": "LZ4",
}  # fmt: skip


def packed_with(path: Path) -> str:
    """Program that packed a file in an unsupported archive format; "" for any other file."""
    first = head(path, HEAD_BYTES)
    return next((name for mark, name in _PACKED.items() if first.startswith(mark)), "")


def unknown_document(path: Path) -> str:
    """Describe a text file that is not a log; "" if it may be one."""
    first = head(path, HEAD_BYTES)
    if not first.strip():
        return EMPTY
    what = _json(path, first) or _table(first)
    if not what:
        return ""
    log = read_log(path)
    return "" if log.events or log.steps else f"{what} of no supported format"


def _json(path: Path, first: bytes) -> str:
    if first.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] not in (b"{", b"["):
        return ""
    document, kind = None, "is damaged or cut JSON"
    try:
        document = json.loads(read_whole(path, MAX_BYTES)[0].decode("utf-8-sig", "replace"))
    except SourceError:  # this class must come before its base class ValueError
        kind = f"is JSON of more than {MAX_BYTES >> 20} MiB"
    except (ValueError, RecursionError):
        pass
    if document is None:
        lines = [line for line in head(path, 1 << 20).splitlines()[:MIN_ROWS] if line.strip()]
        if len(lines) == MIN_ROWS and all(map(_is_object, lines)):
            return f"is JSON with one object per line{_named(list(json.loads(lines[0])))}"
        return kind if _JSON_BEGIN.match(first.removeprefix(b"\xef\xbb\xbf")) else ""
    names = list(document) if isinstance(document, dict) else []
    return f"is a JSON document{_named(names)}"


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _table(first: bytes) -> str:
    """Describe a table: a header of names, and rows with as many values; "" for other text."""
    lines = first.decode("utf-8-sig", "replace").splitlines()[:20]
    for separator, kind in ((",", "CSV"), (";", "CSV"), ("\t", "TSV")):
        try:
            rows = [row for row in csv.reader(lines[:-1] or lines, delimiter=separator) if row]
        except csv.Error:
            continue
        names = rows[0] if rows else []
        are_names = len(names) > 1 and all(_NAME.fullmatch(name) and name.strip() and not is_number(name)
                                           and len(name) <= MAX_NAME_CHARS for name in names)  # fmt: skip
        are_names = are_names and not any(
            _is_measured(*pair) for row in rows[1:] for pair in zip(names, row, strict=False)
        )
        if are_names and len(rows) >= MIN_ROWS and all(len(row) == len(names) for row in rows):
            return f"is a {kind} table{_named(names)}"
    return ""


def _is_measured(name: str, value: str) -> bool:
    """Return True if a cell repeats the header cell with other numbers (a time, for instance), as in a log with
    commas.
    """
    words = re.findall(r"[A-Za-z_]{2,}", name)
    is_like = words == re.findall(r"[A-Za-z_]{2,}", value) if words else _shape(name) == _shape(value)
    return bool(re.search(r"\d", name)) and is_like


def _shape(text: str) -> str:
    return re.sub(r"\d+", "0", text.strip())


def _named(names: list[str]) -> str:
    shown = ", ".join(str(name).strip()[:MAX_NAME_CHARS] for name in names[:MAX_NAMES])
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f" ({shown}{more})" if shown else ""
