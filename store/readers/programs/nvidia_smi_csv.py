"""Read `nvidia-smi --query-gpu=... --format=csv [-l 1]`: readings of GPUs; unreadable GPUs are reported as lost."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from store.readers.logs.file_names import host_of_log
from store.readers.programs.gpu_readings import LOST, SECOND_NS, THROTTLE_BITS, UNNAMED_HOST, number, reading, sample_ns
from store.readers.programs.rows import MAX_ROWS, ProgramRows
from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import SERIES_BYTES

NAME = "nvidia-smi as CSV"
_COLUMNS = {
    "temperature.gpu": "temperature_celsius", "utilization.gpu": "gpu_utilization_ratio",
    "utilization.memory": "memory_bandwidth_ratio", "power.draw": "power_watts", "power.draw.instant": "power_watts",
    "clocks.sm": "sm_clock_hertz", "clocks.current.sm": "sm_clock_hertz",
    "clocks_throttle_reasons.active": "throttle_reasons", "clocks_event_reasons.active": "throttle_reasons",
    "ecc.errors.corrected.volatile.total": "ecc_corrected_total",
    "ecc.errors.uncorrected.volatile.total": "ecc_uncorrected_total", "remapped_rows.pending": "remap_pending",
    "remapped_rows.failure": "remap_failed",
}  # fmt: skip
_REASON = re.compile(r"^clocks_(?:throttle|event)_reasons\.(\w+)$")
_PROPERTY = re.compile(
    r"^(?:pci|memory|fan|power|clocks|pcie|pcie\.link|utilization|temperature|ecc|ecc\.errors|mig|driver_model|"
    r"remapped_rows|retired_pages|encoder\.stats|enforced)\.[a-z_]+(?:\.[a-z_]+)*$"
)
"""Other properties. A table of these has no readings, but still shows a lost GPU."""


def recognise(first: bytes) -> bool:
    """Return True for a header of nvidia-smi's property names."""
    header = first.split(b"\n", 1)[0].decode("utf-8", "replace")
    names = [_without_unit(name) for name in header.split(",")]
    are_known = (name in _COLUMNS or _REASON.match(name) or _PROPERTY.match(name) for name in names)
    return len(names) > 1 and any(are_known)


def _without_unit(name: str) -> str:
    """Return `power.draw` for `power.draw [W]`. A regular expression would take minutes for a file of brackets."""
    name = name.strip()
    return name[: name.rindex("[")].rstrip() if name.endswith("]") and "[" in name else name


def read(path: Path) -> ProgramRows:
    """Read all rows; a row without a time is assumed to be one second after the previous one of its GPU."""
    lines = read_text(path, SERIES_BYTES).splitlines()
    rows = csv.reader(lines, skipinitialspace=True)
    names = [_without_unit(name) for name in next(rows)]
    found, counts, lost = ProgramRows(), dict[str, int](), set[str]()
    for values in rows:
        row = dict(zip(names, values, strict=False))
        device = row.get("uuid") or row.get("gpu_uuid") or row.get("pci.bus_id") or f"GPU {row.get('index', '0')}"
        if len(values) != len(names) or len(found.health) >= MAX_ROWS:
            continue
        counts[device] = counts.get(device, 0) + 1
        when_ns = sample_ns(row.get("timestamp", ""))
        if any(LOST.search(value) for value in values) and device not in lost:
            lost.add(device)
            fields = {"bus": row.get("pci.bus_id", ""), "text": "nvidia-smi cannot reach it"}
            event = {"kind": "gpu_lost", "line": rows.line_num, "wall_ns": when_ns, "message": ", ".join(values)[:400]}
            found.log_events.append({**event, "host": host_of_log(path), "fields": fields})
        known = reading({_COLUMNS[name]: text for name, text in row.items() if name in _COLUMNS})
        bits = [THROTTLE_BITS.get(match[1], 0) for name, text in row.items()
                if (match := _REASON.match(name)) and text.strip() == "Active"]  # fmt: skip
        # The file has no bit mask of the reasons, but at least one column that gives a reason's state in words.
        if "throttle_reasons" not in known and any(_REASON.match(name) and number(row[name]) is None for name in names):
            known["throttle_reasons"] = sum(set(bits))
        if known:
            place = {"rank": -1, "node": host_of_log(path) or UNNAMED_HOST, "device": device}
            found.health.append(place | {"sample_ns": when_ns or counts[device] * SECOND_NS} | known)
    return found
