"""Read scrapes of GPU exporters in Prometheus' text format (dcgm-exporter, nvidia_gpu_exporter), and Prometheus'
answers to queries for these metrics (`promtool query`, JSON of its HTTP API): readings of each GPU and its last XID.

If a metric appears again for the same GPU, the next scrape begins. An answer lists all values of one metric before the
next metric, so its samples are sorted by time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from store.readers.logs.file_names import host_of_log
from store.readers.programs.gpu_readings import SECOND_NS, UNNAMED_HOST, last_xid
from store.readers.programs.rows import MAX_ROWS, ProgramRows
from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import DOCUMENT_BYTES, SERIES_BYTES, SourceError

NAME = "scrape of a GPU exporter (Prometheus)"
_XID = "DCGM_FI_DEV_XID_ERRORS"
_COLUMNS: dict[str, tuple[str, float]] = {
    "DCGM_FI_DEV_GPU_TEMP": ("temperature_celsius", 1.0), "DCGM_FI_DEV_POWER_USAGE": ("power_watts", 1.0),
    "DCGM_FI_DEV_GPU_UTIL": ("gpu_utilization_ratio", 0.01), "DCGM_FI_DEV_SM_CLOCK": ("sm_clock_hertz", 1e6),
    "DCGM_FI_DEV_MEM_COPY_UTIL": ("memory_bandwidth_ratio", 0.01),
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": ("ecc_corrected_total", 1.0),
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": ("ecc_uncorrected_total", 1.0),
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": ("pcie_replay_total", 1.0),
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": ("remapped_rows_total", 1.0),
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": ("remap_failed", 1.0), "DCGM_FI_DEV_ROW_REMAP_PENDING": ("remap_pending", 1.0),
    "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": ("throttle_reasons", 1.0),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": ("throttle_reasons", 1.0),
    "nvidia_smi_temperature_gpu": ("temperature_celsius", 1.0), "nvidia_smi_power_draw_watts": ("power_watts", 1.0),
    "nvidia_smi_utilization_gpu_ratio": ("gpu_utilization_ratio", 1.0),
    "nvidia_smi_utilization_memory_ratio": ("memory_bandwidth_ratio", 1.0),
    "nvidia_smi_clocks_current_sm_clock_hz": ("sm_clock_hertz", 1.0),
    "nvidia_smi_clocks_sm_clock_hz": ("sm_clock_hertz", 1.0),
    "nvidia_smi_ecc_errors_corrected_volatile_total": ("ecc_corrected_total", 1.0),
    "nvidia_smi_ecc_errors_uncorrected_volatile_total": ("ecc_uncorrected_total", 1.0),
    "nvidia_smi_clocks_event_reasons_active": ("throttle_reasons", 1.0),
    "nvidia_smi_clocks_throttle_reasons_active": ("throttle_reasons", 1.0),
    "nvidia_smi_remapped_rows_failure": ("remap_failed", 1.0),
    "nvidia_smi_remapped_rows_pending": ("remap_pending", 1.0),
}  # fmt: skip
_FLAGS = ("remap_failed", "remap_pending")
_SAMPLE = re.compile(r"(\w+)\{(.*)\}\s+(\S+)(?:\s+(\d{13}))?\s*$")
_ANSWER = re.compile(r"(\w+)\{(.*)\} =>(?: (\S+ @\[.*))?$")
_VALUE = re.compile(r"(\S+) @\[(\d{1,12}(?:\.\d{1,9})?)\]\s*$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_OF_GPU = re.compile(rb"(?m)^(?:DCGM_FI_DEV_|nvidia_smi_)\w+\{")
_IN_JSON = re.compile(rb'"__name__"\s*:\s*"(?:DCGM_FI_DEV_|nvidia_smi_)')
_NOT_SUPPORTED = 0x7FFFFFF0
"""First of DCGM's 32-bit blank values ("not supported" etc.); its 64-bit ones are too large for any reading."""


@dataclass(frozen=True, slots=True)
class _Sample:
    line: int
    name: str
    labels: dict[str, str]
    value: str
    wall_ns: int | None
    text: str


def recognise(first: bytes) -> bool:
    """Return True for a scrape or an answer with a GPU's metric."""
    if first.lstrip()[:1] == b"{":
        return b'"resultType"' in first[:2000] and _IN_JSON.search(first) is not None
    return first.lstrip()[:1] in (b"#", b"D", b"n") and _OF_GPU.search(first) is not None


def read(path: Path) -> ProgramRows:
    """Read all samples that belong to whole GPUs. Samples of MIG instances are left out. Raises SourceError if an
    answer is cut off."""
    found, host_of_file = ProgramRows(), host_of_log(path)
    open_rows: dict[tuple[str, str], dict[str, Any]] = {}
    counts: dict[tuple[str, str], int] = {}
    for sample in _samples(path):
        labels, value = sample.labels, _value(sample.value)
        if value is None or labels.get("GPU_I_ID"):
            continue
        named = labels.get("Hostname", "")
        # In Kubernetes, the label may name the exporter's pod and not the host.
        host = host_of_file if not named or "dcgm-exporter" in named else named
        device = labels.get("UUID") or labels.get("uuid") or f"GPU {labels.get('gpu', '0')}"
        if sample.name == _XID:
            where = labels.get("pci_bus_id") or labels.get("gpu") or device
            found.log_events += last_xid(int(value), where, sample.line, host, sample.text, found.log_events)
            continue
        column, factor = _COLUMNS[sample.name]
        place = (host or UNNAMED_HOST, device)
        row = open_rows.get(place)
        if row is None or column in row:
            if len(found.health) >= MAX_ROWS:
                break
            counts[place] = counts.get(place, 0) + 1
            when_ns = sample.wall_ns or counts[place] * SECOND_NS
            row = {"rank": -1, "node": place[0], "device": device, "sample_ns": when_ns}
            open_rows[place] = row
            found.health.append(row)
        is_whole = column.endswith("_total") or column == "throttle_reasons"
        row[column] = bool(value) if column in _FLAGS else int(value) if is_whole else value * factor
    return found


def _samples(path: Path) -> Iterator[_Sample]:
    """Yield the samples of known metrics. Samples of an answer are sorted by time."""
    text = read_text(path, SERIES_BYTES)
    if text.lstrip()[:1] == "{":
        yield from sorted(_of_json(text), key=lambda sample: sample.wall_ns or 0)
        return
    answers: list[_Sample] = []
    series = None
    for number, line in enumerate(text.splitlines(), 1):
        if answer := _ANSWER.match(line):
            series = (answer[1], dict(_LABEL.findall(answer[2])))
        value = _VALUE.match(answer[3] or "" if answer else line)
        if series and value:
            if _is_known(series[0]):
                answers.append(_Sample(number, *series, value[1], int(float(value[2]) * 1e9), line))
        elif (sample := _SAMPLE.match(line)) and _is_known(sample[1]):
            when_ns = int(sample[4]) * 1_000_000 if sample[4] else None
            yield _Sample(number, sample[1], dict(_LABEL.findall(sample[2])), sample[3], when_ns, line)
    yield from sorted(answers, key=lambda sample: sample.wall_ns or 0)


def _of_json(text: str) -> Iterator[_Sample]:
    if len(text) > DOCUMENT_BYTES:
        raise SourceError(f"holds more than {DOCUMENT_BYTES:,} bytes: query fewer metrics or a shorter time")
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError("is cut off or not JSON") from error
    data = whole.get("data", whole) if isinstance(whole, dict) else {}
    for series in data.get("result", ()) if isinstance(data, dict) and isinstance(data.get("result"), list) else ():
        metric = series.get("metric") if isinstance(series, dict) else None
        name = str(metric.get("__name__")) if isinstance(metric, dict) else ""
        if not isinstance(metric, dict) or not _is_known(name):
            continue
        labels = {str(key): str(value) for key, value in metric.items()}
        values = series.get("values")
        for pair in values if isinstance(values, list) else [series.get("value")]:
            if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int | float) and 0 < pair[0] < 1e11:
                shown = f"{name} of GPU {labels.get('gpu', '?')}: {pair[1]}"
                yield _Sample(1, name, labels, str(pair[1]), int(pair[0] * 1e9), shown)


def _is_known(name: str) -> bool:
    return name == _XID or name in _COLUMNS


def _value(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < 1e15 and not _NOT_SUPPORTED <= value <= _NOT_SUPPORTED + 15 else None
