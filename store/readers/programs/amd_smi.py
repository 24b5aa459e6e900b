"""Read `amd-smi metric`, as text or `--json`: each GPU's temperature, power, clock, load and error counts.

The JSON is a list of GPUs, since ROCm 6.4 under `gpu_data`. A reading is a number with a unit, in an object or text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from store.readers.logs.file_names import host_of_log
from store.readers.programs.gpu_readings import SECOND_NS, UNNAMED_HOST, reading, unhealthy
from store.readers.programs.rocm_smi import ERRORS_ADVICE
from store.readers.programs.rows import MAX_ROWS, ProgramRows
from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import DOCUMENT_BYTES, SourceError

NAME = "amd-smi metric"
_GPU = re.compile(r"^GPU: (\d{1,4})\s*$")
_PAIR = re.compile(r"^( +)([A-Z][A-Z0-9_ ]{0,40}):(?: (\S.*))?$")
_READINGS = (
    ("temperature", "hotspot", "temperature_celsius"), ("temperature", "edge", "temperature_celsius"),
    ("power", "socket_power", "power_watts"), ("power", "current_socket_power", "power_watts"),
    ("power", "average_socket_power", "power_watts"), ("usage", "gfx_activity", "gpu_utilization_ratio"),
    ("usage", "umc_activity", "memory_bandwidth_ratio"), ("pcie", "replay_count", "pcie_replay_total"),
)  # fmt: skip


def recognise(first: bytes) -> bool:
    """Return True for the metrics of a GPU: other commands of the program print other sections."""
    text = first.lstrip()
    if text[:1] in (b"{", b"["):
        return b'"gpu"' in text[:2000] and (b'"gfx_activity"' in first or b'"total_uncorrectable_count"' in first)
    is_first = _GPU.match(text.split(b"\n", 1)[0].decode("utf-8", "replace")) is not None
    return is_first and (b"GFX_ACTIVITY:" in first or b"TOTAL_UNCORRECTABLE_COUNT:" in first)


def read(path: Path) -> ProgramRows:
    """Read every GPU; outputs in one file (`--watch`) are taken to be 1 s apart. Raises SourceError."""
    text = read_text(path, DOCUMENT_BYTES)
    found, host = ProgramRows(), host_of_log(path)
    times: dict[str, int] = {}
    reported: set[tuple[str, str]] = set()
    gpus = _of_json(text) if text.lstrip()[:1] in ("{", "[") else _of_text(text)
    for line, device, metrics in gpus:
        if len(found.health) >= MAX_ROWS:
            break
        times[device] = times.get(device, 0) + 1
        if row := reading(_texts(metrics)):
            place = {"rank": -1, "node": host or UNNAMED_HOST, "device": f"GPU {device}"}
            found.health.append(place | {"sample_ns": times[device] * SECOND_NS} | row)
        for block, counts in _objects(metrics.get("ecc_blocks")).items():
            count = _count(counts, "uncorrectable_count")
            if block != "umc" and count and (device, block) not in reported:
                reported.add((device, block))
                errors = f"{count:,} uncorrectable error{'s' * (count != 1)}"
                what = f"amd-smi counts {errors} in block {block.upper()} of GPU {device}{{of}}"
                found.log_events.append(unhealthy(device, what, ERRORS_ADVICE, line, host))
    return found


def _texts(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Readings by column of `health`. Memory errors are the errors of the memory controller (UMC). If it lists none,
    the errors of the whole GPU are taken."""
    texts: dict[str, str] = {}
    for section, name, column in _READINGS:
        text = _text(_objects(metrics.get(section)).get(name))
        if text not in ("", "N/A"):
            texts.setdefault(column, text)
    clocks = _objects(metrics.get("clock"))
    texts["sm_clock_hertz"] = _text(_objects(clocks.get("gfx_0") or clocks.get("gfx")).get("clk"))
    memory = _objects(metrics.get("ecc_blocks")).get("umc")
    for column, name in (
        ("ecc_corrected_total", "correctable_count"),
        ("ecc_uncorrected_total", "uncorrectable_count"),
    ):
        total = _objects(metrics.get("ecc")).get(f"total_{name}")
        texts[column] = _text(_objects(memory).get(name) if memory else total)
    return texts


def _of_json(text: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError("is cut off or not JSON") from error
    listed = whole.get("gpu_data") if isinstance(whole, dict) else whole
    places = [match.start() for match in re.finditer(r'"gpu"\s*:', text)]
    for place, metrics in enumerate(listed if isinstance(listed, list) else ()):
        if isinstance(metrics, dict) and isinstance(metrics.get("gpu"), int):
            line = text.count("\n", 0, places[place]) + 1 if place < len(places) else 1
            yield line, str(metrics["gpu"]), _lower_names(metrics)


def _of_text(text: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    line, device, metrics = 0, "", dict[str, Any]()
    inside: list[tuple[int, dict[str, Any]]] = []
    for number, row in enumerate(text.splitlines(), 1):
        if gpu := _GPU.match(row):
            if device:
                yield line, device, metrics
            line, device, metrics = number, gpu[1], {}
            inside = [(0, metrics)]
        elif inside and (pair := _PAIR.match(row)):
            depth, name = len(pair[1]), pair[2].lower()
            while len(inside) > 1 and inside[-1][0] >= depth:
                inside.pop()
            if pair[3]:
                inside[-1][1][name] = pair[3].strip()
            else:
                inside[-1][1][name] = section = dict[str, Any]()
                inside.append((depth, section))
    if device:
        yield line, device, metrics


def _lower_names(value: Any) -> Any:
    return (
        {str(name).lower(): _lower_names(inner) for name, inner in value.items()} if isinstance(value, dict) else value
    )


def _text(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("value")
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def _count(metrics: Any, name: str) -> int:
    text = _text(_objects(metrics).get(name))
    return int(text) if text.isdecimal() and len(text) < 18 else 0


def _objects(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
