"""Convert a systemd journal (`journalctl -o json`, `json-pretty` or `export`) to syslog lines, for the rules of text
logs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from store.readers.programs.json_lines import objects
from store.readers.programs.text import read_chunks, read_text
from store.readers.untrusted.external_files import SERIES_BYTES

NAME = "journal of systemd as JSON or for export"
_TIME = "__REALTIME_TIMESTAMP"
_PRETTY = re.compile(rb'\{\s*\n\s*"')


def recognise(first: bytes) -> bool:
    """Return True for an entry with the journal's time field."""
    text = first.lstrip()
    line = text.split(b"\n", 1)[0]
    if line.startswith(b"__CURSOR="):
        return f"\n{_TIME}=".encode() in text[:2000]
    time_key = f'"{_TIME}"'.encode()
    return (line.startswith(b"{") and time_key in line) or (
        _PRETTY.match(text) is not None and time_key in text.split(b"\n}", 1)[0]
    )


def lines(path: Path) -> Iterator[str]:
    """Yield one line per entry: time, host, program, process, message."""
    for entry in _entries(path):
        host, program = _text(entry.get("_HOSTNAME")), _text(entry.get("SYSLOG_IDENTIFIER") or entry.get("_COMM"))
        pid = _text(entry.get("_PID") or entry.get("SYSLOG_PID"))
        who = f"{program or 'unknown'}[{pid}]" if pid else program or "unknown"
        message = _text(entry.get("MESSAGE")).replace("\n", " ")
        yield f"{_time(entry.get(_TIME))} {host or 'localhost'} {who}: {message}".strip()


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    first = next(read_chunks(path), b"").lstrip()
    if first.startswith(b"__CURSOR="):
        for block in read_text(path, SERIES_BYTES).split("\n\n"):
            yield dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
    elif _PRETTY.match(first):
        yield from _pretty(read_text(path, SERIES_BYTES))
    else:
        for _, entry in objects(read_chunks(path)):
            yield entry


def _pretty(text: str) -> Iterator[dict[str, Any]]:
    """Objects one after the other, up to where the text is damaged."""
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        try:
            entry, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return
        if isinstance(entry, dict):
            yield entry
        at = text.find("{", end)


def _time(value: Any) -> str:
    try:
        return datetime.fromtimestamp(int(value) / 1e6, UTC).isoformat(timespec="microseconds")
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def _text(value: Any) -> str:
    if isinstance(value, list):  # journald writes a message that is not text as a list of bytes
        return bytes(byte for byte in value if isinstance(byte, int) and 0 <= byte < 256).decode("utf-8", "replace")
    return value if isinstance(value, str) else "" if value is None else str(value)[:1000]
