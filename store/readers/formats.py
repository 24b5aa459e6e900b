"""Recognise a file's format by its content.

format_of(Path("nccl_trace_rank_3"))       # "flight_recorder"
format_of(Path("whatever"))                # None: no supported format
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from store.readers.dumps.debug_server import is_page
from store.readers.inspector import is_inspector, is_scrape
from store.readers.logs.plain_text import encoding_of, has_holes, num_holes, without_holes
from store.readers.memory_snapshot import is_memory_snapshot
from store.readers.operations import PARQUET
from store.readers.plugins.plugin_formats import HEAD_BYTES, reader_of
from store.readers.programs.registry import program_of
from store.readers.ras import is_ras
from store.readers.traces.ascend_steps import is_ascend_steps
from store.readers.traces.execution_trace import is_execution_trace
from store.readers.traces.nsys import SQLITE
from store.readers.untrusted.archives import is_archive
from store.readers.untrusted.external_files import head

__all__ = ["FORMATS", "Format", "format_of"]

Format = Literal[
    "log",
    "ras",
    "flight_recorder",
    "kineto",
    "operations",
    "inspector",
    "execution_trace",
    "memory_snapshot",
    "archive",
    "page",
    "plugin",
    "program",
]
FORMATS: dict[Format, str] = {
    "log": "text log", "ras": "answer of NCCL's RAS", "flight_recorder": "flight-recorder dump",
    "kineto": "profiler trace", "operations": "per-operation table", "archive": "archive",
    "inspector": "log of NCCL's inspector", "execution_trace": "execution trace",
    "memory_snapshot": "snapshot of CUDA memory",
    "page": "page of torch's debug server", "plugin": "file of a plug-in's format",
    "program": "file of a program around training",
}  # fmt: skip
METADATA_BYTES = 24 << 20
"""Bytes in which a trace's events are searched for, because metadata (host properties, stacks) may precede them."""
_TRACE_KEYS = (b'"traceEvents"', b'"deviceProperties"', b'"baseTimeNanoseconds"')
_EVENT = re.compile(rb'^\[\s*\{.{0,4096}?[{,]\s*"ph"\s*:\s*"[A-Za-z]"', re.DOTALL)
_DUMP_KEYS = (b"pg_config", b"comm_lib_version", b"nccl_version", b"entries", b"pg_status", b"record_id")
MIN_TEXT = 0.85
"""Minimum share of printable bytes in a text."""
MIN_LINES = 3
"""A file with runs of zero bytes counts as text only if its head has at least this many lines."""


def format_of(path: Path) -> Format | None:
    """Return the format of a file; None if it is not supported. Raises SourceError if the file cannot be opened."""
    first = head(path, HEAD_BYTES, is_after_zeros=True)
    found = _builtin_format(path, first)
    return "plugin" if found in (None, "log") and reader_of(first) is not None else found


def _builtin_format(path: Path, first: bytes) -> Format | None:
    if is_archive(first):
        return "archive"
    if first.startswith(PARQUET):
        return "operations"
    if program_of(first) is not None:
        return "program"
    if is_memory_snapshot(first):
        return "memory_snapshot"
    if first[:1] == b"\x80":
        return "flight_recorder" if any(key in first for key in _DUMP_KEYS) else None
    if first.startswith(SQLITE):
        return "kineto"  # an Nsight Systems export; the reader rejects other databases
    if is_page(first):
        return "page"
    start = first.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start[:1] == b"{":
        if is_ras(first):
            return "ras"
        if is_execution_trace(first):
            return "execution_trace"
        if is_inspector(first):
            return "inspector"
        if any(b'"' + key + b'"' in first for key in _DUMP_KEYS) and b'"traceEvents"' not in first:
            return "flight_recorder"
        if any(key in first for key in _TRACE_KEYS) or _has_late_events(path, start):
            return "kineto"
    if is_scrape(first):
        return "inspector"
    if is_ascend_steps(first):
        return "kineto"
    if _EVENT.match(start):
        return "kineto"
    return "log" if _is_text(first) else None


def _has_late_events(path: Path, start: bytes) -> bool:
    """Return True if a one-line JSON object has trace events beyond the file's head."""
    if b"}\n{" in start or not re.match(rb'\{\s*"', start):
        return False
    return b'"traceEvents"' in head(path, METADATA_BYTES) if len(start) >= HEAD_BYTES - 8 else False


def _is_text(first: bytes) -> bool:
    if encoding_of(first) is not None:
        return True
    # binary numbers contain many zero bytes
    if has_holes(first) and first.count(b"\n") >= max(MIN_LINES, 2 * num_holes(first)):
        first = without_holes(first)
    if not first or b"\x00\x00\x00\x00" in first[:512]:
        return False
    control = sum(first.count(bytes([byte])) for byte in (*range(9), *range(14, 27), *range(28, 32), 127))
    if control > len(first) * (1 - MIN_TEXT) / 2:
        return False
    try:
        first.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(first) - 4:  # ignore a character that is cut at the end
            return sum(byte < 128 for byte in first) >= MIN_TEXT * len(first)
    return True
