"""Read `nvidia-smi -q`, as text or XML (`-x`): each GPU's memory state, temperature and clock throttle reasons."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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
_ECC = ("Volatile", "Aggregate", "Single Bit", "Double Bit")
"""Sections of ECC errors. Each is named with the name of the enclosing section in front."""
_REASONS = ("Clocks Event Reasons", "Clocks Throttle Reasons", "HW Slowdown")
_ERRORS = re.compile(r"uncorrectable|correctable|single bit|double bit", re.IGNORECASE)
_XML_GPU = re.compile(r'<gpu id="([^"]+)">')
_XML_OPEN = re.compile(r"<(\w+)[^<>/?]*>$")
_XML_LEAF = re.compile(r"<(\w+)>([^<]*)</\1>$")
_XML_SECTIONS = {
    "temperature": "Temperature", "utilization": "Utilization", "remapped_rows": "Remapped Rows", "clocks": "Clocks",
    "clocks_event_reasons": "Clocks Event Reasons", "clocks_throttle_reasons": "Clocks Throttle Reasons",
    "volatile": "Volatile", "volatile single_bit": "Volatile Single Bit", "volatile double_bit": "Volatile Double Bit",
}  # fmt: skip
_XML_NAMES = {
    ("nvidia_smi_log", "timestamp"): "Timestamp", ("gpu", "uuid"): "GPU UUID",
    ("temperature", "gpu_temp"): "GPU Current Temp", ("utilization", "gpu_util"): "GPU",
    ("remapped_rows", "remapped_row_pending"): "Pending", ("clocks", "sm_clock"): "SM",
    ("remapped_rows", "remapped_row_failure"): "Remapping Failure Occurred",
}  # fmt: skip
_XML_REASON = re.compile(r"^clocks_(?:event|throttle)_reason_")


def recognise(first: bytes) -> bool:
    """Return True for the start of the report, or for its only line if a GPU is lost."""
    is_report = b"NVSMI LOG" in first[:400] or b"<nvidia_smi_log>" in first[:400]
    return is_report or first.lstrip().startswith(b"Unable to determine the device handle for GPU")


def read(path: Path) -> ProgramRows:
    """Read every GPU of every report in the file."""
    found, host = ProgramRows(), host_of_log(path)
    device, values, ecc = "", dict[str, str](), dict[tuple[str, str], str]()
    bits: int | None = None
    when_ns: int | None = None

    def close() -> None:
        row = reading(values) | _ecc_errors(ecc)
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
    for number, section, name, value, line in (_xml_pairs if "<nvidia_smi_log>" in text[:400] else _pairs)(text):
        if LOST.search(line):
            bus = _LOST_AT.search(line)
            fields = {"bus": bus[1] if bus else device, "text": "nvidia-smi cannot reach it"}
            event = {"kind": "gpu_lost", "line": number, "message": line.strip()[:400], "host": host, "fields": fields}
            found.log_events.append(event)
        if gpu := _GPU.match(line):
            close()
            device, values, ecc, bits = gpu[1], {}, {}, None
        elif name == "Timestamp" and not section:
            close()
            device, when_ns = "", sample_ns(value)
        elif name == "GPU UUID":
            values["uuid"] = value
        elif (section, name) in _PLACES:
            values[_PLACES[section, name]] = value
        elif section.startswith("Volatile"):
            ecc[section, name] = value
        elif section in _REASONS and value in ("Active", "Not Active"):
            bit = THROTTLE_BITS.get(name.lower().replace(" ", "_"), 0)
            bits = (bits or 0) | (bit if value == "Active" else 0)
    close()
    return found


def _ecc_errors(ecc: Mapping[tuple[str, str], str]) -> dict[str, int]:
    """Sum the errors since the driver was loaded, over the memories of a GPU."""
    sums: dict[str, int] = {}
    for (section, name), value in ecc.items():
        word = section.removeprefix("Volatile").strip() or name
        is_sum = section == "Volatile" or name.lower() == "total"
        column = {"correctable": "ecc_corrected_total", "single bit": "ecc_corrected_total",
                  "uncorrectable": "ecc_uncorrected_total", "double bit": "ecc_uncorrected_total"}.get(
            (_ERRORS.search(word) or [""])[0].lower()
        )  # fmt: skip
        if column and is_sum and value.isdecimal() and len(value) < 18:
            sums[column] = sums.get(column, 0) + int(value)
    return sums


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
            section = " ".join(name for _, name in sections[-2:] if name in _ECC) if sections else ""
            if any(name == "MIG Devices" for _, name in sections):
                section = "MIG Devices"
            section = section or (sections[-1][1] if sections else "")
            yield number, "" if _GPU.match(section) else section, pair[2], pair[3], line


def _xml_pairs(text: str) -> Iterator[tuple[int, str, str, str, str]]:
    """Yield the same for the XML form, with the names of the text form. nvidia-smi writes one element per line, so no
    XML parser is needed, which would have to be guarded against entities.
    """
    elements: list[str] = []
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if gpu := _XML_GPU.match(line):
            elements = ["gpu"]
            yield number, "", "", "", f"GPU {gpu[1]}"
        elif leaf := _XML_LEAF.match(line):
            inside = elements[-1] if elements else ""
            section = _XML_SECTIONS.get(" ".join(elements[-2:])) or _XML_SECTIONS.get(inside, "")
            name = _XML_NAMES.get((inside, leaf[1])) or _XML_REASON.sub("", leaf[1])
            yield number, section, name, leaf[2].strip(), line
        elif line.startswith("</"):
            elements = elements[:-1]
        elif opened := _XML_OPEN.match(line):
            elements.append(opened[1])
