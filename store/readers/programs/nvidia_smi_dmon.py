"""Read `nvidia-smi dmon` tables, also as CSV and with `-o DT`. Without times, readings are taken to be 1 s apart."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

from store.readers.logs.file_names import host_of_log
from store.readers.programs.gpu_readings import SECOND_NS, UNNAMED_HOST, reading
from store.readers.programs.rows import MAX_ROWS, ProgramRows
from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import SERIES_BYTES

NAME = "nvidia-smi dmon"
_HEADER = re.compile(rb"(?m)^#[ ]?(?:Date,?\s+Time,?\s+)?gpu,?\s+(?:pwr|sm|pclk|mclk|fb|pviol|sbecc|rxpci)\b")
_BREAK = re.compile(r"[,\s]+")
_COLUMNS = {
    "pwr": "power_watts", "gtemp": "temperature_celsius", "sm": "gpu_utilization_ratio",
    "mem": "memory_bandwidth_ratio", "pclk": "sm_clock_hertz", "sbecc": "ecc_corrected_total",
    "dbecc": "ecc_uncorrected_total", "pci": "pcie_replay_total",
}  # fmt: skip


def recognise(first: bytes) -> bool:
    """Return True if one of the first three lines is the table's header."""
    match = _HEADER.search(first)
    return match is not None and first.count(b"\n", 0, match.start()) < 3


def read(path: Path) -> ProgramRows:
    """Read all rows; the header may be repeated between them."""
    found, host = ProgramRows(), host_of_log(path)
    names: list[str] = []
    counts: dict[str, int] = {}
    for line in read_text(path, SERIES_BYTES).splitlines():
        words = [word for word in _BREAK.split(line.strip().removeprefix("#").strip()) if word]
        if line.lstrip().startswith("#"):
            names = words if "gpu" in words else names  # the line below has the units
        elif names and len(words) == len(names) and len(found.health) < MAX_ROWS:
            values = dict(zip(names, words, strict=True))
            device = f"GPU {values['gpu']}"
            counts[device] = counts.get(device, 0) + 1
            row = reading({_COLUMNS[name]: text for name, text in values.items() if name in _COLUMNS})
            if row:
                when_ns = _time_ns(values) or counts[device] * SECOND_NS
                place = {"rank": -1, "node": host or UNNAMED_HOST, "device": device, "sample_ns": when_ns}
                found.health.append(place | row)
    return found


def _time_ns(values: dict[str, str]) -> int | None:
    try:
        when = datetime.strptime(f"{values['Date']} {values['Time'].partition('.')[0]}", "%Y%m%d %H:%M:%S")
    except (KeyError, ValueError):
        return None
    return int(when.replace(tzinfo=UTC).timestamp() * 1e9)
