"""Convert a systemd journal in JSON (`journalctl -o json`) to syslog lines, for the rules of text logs."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from store.readers.programs.json_lines import objects
from store.readers.programs.text import read_chunks

NAME = "journal of systemd as JSON"


def recognise(first: bytes) -> bool:
    """Return True for an entry with the journal's time field."""
    line = first.split(b"\n", 1)[0]
    return line.startswith(b"{") and b'"__REALTIME_TIMESTAMP"' in line


def lines(path: Path) -> Iterator[str]:
    """Yield one line per entry: time, host, program, process, message."""
    for _, entry in objects(read_chunks(path)):
        host, program = _text(entry.get("_HOSTNAME")), _text(entry.get("SYSLOG_IDENTIFIER") or entry.get("_COMM"))
        pid = _text(entry.get("_PID") or entry.get("SYSLOG_PID"))
        who = f"{program or 'unknown'}[{pid}]" if pid else program or "unknown"
        message = _text(entry.get("MESSAGE")).replace("\n", " ")
        yield f"{_time(entry.get('__REALTIME_TIMESTAMP'))} {host or 'localhost'} {who}: {message}".strip()


def _time(value: Any) -> str:
    try:
        return datetime.fromtimestamp(int(value) / 1e6, UTC).isoformat(timespec="microseconds")
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def _text(value: Any) -> str:
    if isinstance(value, list):  # bytes, if the message is not text
        return bytes(byte for byte in value if isinstance(byte, int) and 0 <= byte < 256).decode("utf-8", "replace")
    return value if isinstance(value, str) else "" if value is None else str(value)[:1000]
