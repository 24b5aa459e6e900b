"""Convert GPU values as nvidia-smi and dcgmi print them to columns of `health`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

__all__ = [
    "LOST",
    "SECOND_NS",
    "THROTTLE_BITS",
    "UNNAMED_HOST",
    "last_xid",
    "number",
    "reading",
    "sample_ns",
    "unhealthy",
]

UNNAMED_HOST = "an unnamed host"
"""Host name if neither the file nor its name states one."""
LOST = re.compile(r"GPU is lost|\[?Unknown Error\]?|\bERR!|GPU requires reset", re.IGNORECASE)
THROTTLE_BITS = {"hw_slowdown": 0x08, "sw_thermal_slowdown": 0x20, "hw_thermal_slowdown": 0x40,
                 "hw_power_brake_slowdown": 0x80}  # fmt: skip
"""Bits of NVML's clocks event reasons."""
_SCALES = {
    "gpu_utilization_ratio": 0.01, "memory_bandwidth_ratio": 0.01, "temperature_celsius": 1.0, "power_watts": 1.0,
    "sm_clock_hertz": 1e6,
}  # fmt: skip
_COUNTERS = ("ecc_corrected_total", "ecc_uncorrected_total", "remapped_rows_total", "pcie_replay_total",
             "throttle_reasons")  # fmt: skip
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")

SECOND_NS = 10**9


def number(text: str) -> float | None:
    """The number at the start of "45 C", "0x40" or "98 %"; None for N/A."""
    plain = text.strip()
    if plain.lower().startswith("0x"):
        try:
            return float(int(plain.split()[0], 16))
        except ValueError:
            return None
    match = _NUMBER.match(plain)
    return float(match[0]) if match else None


def reading(values: Mapping[str, str]) -> dict[str, Any]:
    """Convert {column: text} to values of table `health`. Texts without a number are left out."""
    row: dict[str, Any] = {}
    for name, text in values.items():
        found = number(text)
        if name in ("remap_pending", "remap_failed"):
            if text.strip().lower() in ("yes", "no", "0", "1"):
                row[name] = text.strip().lower() in ("yes", "1")
        elif found is None:
            continue
        elif name in _SCALES:
            row[name] = found * _SCALES[name]
        elif name in _COUNTERS and 0 <= found < 1e18:
            row[name] = int(found)
    return row


def sample_ns(text: str) -> int | None:
    """Parse the time of a reading (ns) as nvidia-smi prints it: 2026/11/26 10:00:00.123, or Thu Nov 26 10:00:00
    2026.
    """
    for form in ("%Y/%m/%d %H:%M:%S.%f", "%Y/%m/%d %H:%M:%S", "%a %b %d %H:%M:%S %Y"):
        try:
            return int(datetime.strptime(text.strip(), form).replace(tzinfo=UTC).timestamp() * 1e9)
        except ValueError:
            continue
    return None


def last_xid(
    code: int, device: str, line: int, host: str | None, text: str, known: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Log event for the last XID that DCGM reports for a device; empty if `known` has it. The gauge repeats the XID in
    every reading and does not tell when the error occurred.
    """
    fields = {"xid": code, "bus": device, "gauge": "DCGM"}
    if not code or any(one["fields"] == fields and one["host"] == host for one in known):
        return []
    return [{"kind": "xid", "line": line, "wall_ns": None, "host": host, "message": text[:400], "fields": fields}]


def unhealthy(device: str, what: str, do: str, line: int, host: str | None) -> dict[str, Any]:
    """Log event for a device that a tool reports as not healthy. `what` contains `{of}` where the host's name is
    inserted.
    """
    fields = {"devices": device, "what": what, "do": do}
    message = what.format(of="")
    return {
        "kind": "device_check_failed",
        "line": line,
        "wall_ns": None,
        "host": host,
        "message": message,
        "fields": fields,
    }
