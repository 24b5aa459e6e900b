"""Read `nvidia-smi -q`: each GPU's memory state, its temperature and what slows its clocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from store.readers.logs.file_names import host_of_log
from store.readers.programs.gpu_readings import LOST, THROTTLE_BITS, UNNAMED_HOST, reading, sample_ns
from store.readers.programs.rows import ProgramRows
from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import DOCUMENT_BYTES

NAME = "nvidia-smi -q"
_GPU = re.compile(r"^GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f:.]+)\s*$")
_PAIR = re.compile(r"^(\s*)([^:]+?)\s*:\s*(.*?)\s*$")
_LOST_AT = re.compile(r"GPU ?([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)")
_PLACES = {
    ("Temperature", "GPU Current Temp"): "temperature_celsius", ("Utilization", "Gpu"): "gpu_utilization_ratio",
    ("Utilization", "GPU"): "gpu_utilization_ratio", ("Remapped Rows", "Pending"): "remap_pending",
    ("Remapped Rows", "Remapping Failure Occurred"): "remap_failed", ("Clocks", "SM"): "sm_clock_hertz",
}  # fmt: skip
_REASONS = ("Clocks Event Reasons", "Clocks Throttle Reasons", "HW Slowdown")


def recognise(first: bytes) -> bool:
    """Return True for the start of the report, or for its only line if a GPU is lost."""
    return b"NVSMI LOG" in first[:400] or first.lstrip().startswith(b"Unable to determine the device handle for GPU")


def read(path: Path) -> ProgramRows:
    """Read every GPU of every report in the file."""
    found, host = ProgramRows(), host_of_log(path)
    device, values = "", dict[str, str]()
    bits: int | None = None
    when_ns: int | None = None

    def close() -> None:
        row = reading(values)
        if device and (row or bits is not None):
            row["throttle_reasons"] = bits
            found.health.append(
                {
                    "rank": -1,
                    "node": host or UNNAMED_HOST,
                    "device": values.get("uuid") or device,
                    "sample_ns": when_ns or 0,
                    **row,
                }
            )

    text = read_text(path, DOCUMENT_BYTES)
    for number, section, name, value, line in _pairs(text):
        if LOST.search(line):
            bus = _LOST_AT.search(line)
            fields = {"bus": bus[1] if bus else device, "text": "nvidia-smi cannot reach it"}
            event = {"kind": "gpu_lost", "line": number, "message": line.strip()[:400], "host": host, "fields": fields}
            found.log_events.append(event)
        if gpu := _GPU.match(line):
            close()
            device, values, bits = gpu[1], {}, None
        elif name == "Timestamp" and not section:
            close()
            device, when_ns = "", sample_ns(value)
        elif name == "GPU UUID":
            values["uuid"] = value
        elif (section, name) in _PLACES:
            values[_PLACES[section, name]] = value
        elif section in _REASONS and value in ("Active", "Not Active"):
            bit = THROTTLE_BITS.get(name.lower().replace(" ", "_"), 0)
            bits = (bits or 0) | (bit if value == "Active" else 0)
    close()
    return found


def _pairs(text: str) -> Iterator[tuple[int, str, str, str, str]]:
    """Yield (line number, section, name, value, line). A section is a name without a value above more deeply indented
    lines.
    """
    sections: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        pair = _PAIR.match(line)
        depth = len(line) - len(line.lstrip())
        while sections and sections[-1][0] >= depth:
            sections.pop()
        if pair is None:
            if line.strip():
                sections.append((depth, line.strip()))
            yield number, "", "", "", line
        else:
            section = sections[-1][1] if sections else ""
            yield number, "" if _GPU.match(section) else section, pair[2], pair[3], line
