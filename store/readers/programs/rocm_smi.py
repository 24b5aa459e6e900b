"""Read what `rocm-smi` prints, also with `--json`: the temperature, power, clock and load of AMD GPUs, and their RAS
error counts.

`--showrasinfo` counts errors by block. Some versions swap the headings of its last two columns, but not the values: the
last number is always the count of uncorrectable errors.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from store.readers.logs.file_names import host_of_log
from store.readers.programs.gpu_readings import SECOND_NS, UNNAMED_HOST, reading, unhealthy
from store.readers.programs.rows import MAX_ROWS, ProgramRows
from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import SERIES_BYTES, SourceError

NAME = "rocm-smi"
MAX_OTHERS = 3
"""Maximum lines around the output, such as shell prompts."""
_TITLE = re.compile(rb"=\s*ROCm System Management Interface\s*=")
_PARTS = re.compile(rb"=+|GPU\[|GPU\b|Device\b|\d+\s|[A-Z]+:|\[?\(|\s*[A-Z_0-9]+\s+(?:EN|DIS)ABLED\b|\s|_+|-+")
_VALUE = re.compile(r"^GPU\[(\d{1,3})\]\s*: +(.{1,80}?): +(\S.*)$")
_GPU = re.compile(r"^GPU\[(\d{1,3})\]\s*:")
_RAS = re.compile(r"^\s*([A-Z][A-Z0-9_]{1,15})\s+(?:EN|DIS)ABLED\s+(\d{1,12})\s+(\d{1,12})\s*$")
_COLUMNS = (
    ("Temp", "temperature_celsius"), ("AvgPwr", "power_watts"), ("Power", "power_watts"), ("SCLK", "sm_clock_hertz"),
    ("GPU%", "gpu_utilization_ratio"),
)  # fmt: skip
_NAMES = (
    (re.compile(r"Temperature \(Sensor (?:junction|edge)\) \(C\)"), "temperature_celsius"),
    (re.compile(r"(?:Average|Current Socket) Graphics Package Power \(W\)"), "power_watts"),
    (re.compile(r"GPU use \(%\)"), "gpu_utilization_ratio"),
    (re.compile(r"sclk clock speed:?"), "sm_clock_hertz"),
)
_CARD = re.compile(r"card:?(\d{1,3})")
ERRORS_ADVICE = (
    "Read `dmesg` of that host for amdgpu's lines on the block, and do not use the GPU until it is reset or replaced."
)


def recognise(first: bytes) -> bool:
    """Return True for the title and little else (a job's log may begin with the output), or for readings by card."""
    if first.lstrip()[:1] == b"{":
        return re.search(rb'"card:?\d{1,3}"\s*:', first[:400]) is not None and any(
            name in first for name in (b"(Sensor ", b"GPU use (%)", b"Graphics Package Power")
        )
    if not _TITLE.search(first[:2000]):
        return False
    return sum(not _PARTS.match(line) for line in first.splitlines() if line.strip()) <= MAX_OTHERS


def read(path: Path) -> ProgramRows:
    """Read every output in the file (`watch`); without times they are taken to be 1 s apart."""
    found, host = ProgramRows(), host_of_log(path)
    rows: dict[tuple[int, str], dict[str, str]] = {}
    errors_of: dict[tuple[str, str], tuple[int, int]] = {}
    names: list[str] = []
    num_outputs, gpu = 0, ""
    text = read_text(path, SERIES_BYTES)
    if text.lstrip()[:1] == "{":
        rows |= _of_json(text)
        text = ""
    for number, line in enumerate(text.splitlines(), 1):
        num_outputs += _TITLE.search(line.encode()) is not None
        words = re.split(r"\s{2,}", line.strip())
        if words[0] in ("GPU", "Device"):
            names = words
        elif names and words[0].isdecimal() and len(words) == len(names):
            row = rows.setdefault((num_outputs, words[0]), {})
            for name, word in zip(names, words, strict=True):
                row |= {column: word for start, column in _COLUMNS if name.startswith(start)}
        if match := _GPU.match(line):
            gpu = match[1]
        if value := _VALUE.match(line):
            row = rows.setdefault((num_outputs, gpu), {})
            row |= {column: value[3] for pattern, column in _NAMES if pattern.fullmatch(value[2])}
        if gpu and (errors := _RAS.match(line)):
            if errors[1] == "UMC":  # the memory's controller
                rows.setdefault((num_outputs, gpu), {}).update(
                    ecc_corrected_total=errors[2], ecc_uncorrected_total=errors[3]
                )
            elif int(errors[3]):
                errors_of.setdefault((gpu, errors[1]), (number, int(errors[3])))
    for (output, device), texts in list(rows.items())[:MAX_ROWS]:
        if row := reading(texts):
            place = {"rank": -1, "node": host or UNNAMED_HOST, "device": f"GPU {device}"}
            found.health.append(place | {"sample_ns": output * SECOND_NS} | row)
    for (device, block), (number, count) in errors_of.items():
        times = f"{count:,} uncorrectable error{'s' * (count != 1)}"
        what = f"rocm-smi counts {times} in block {block} of GPU {device}{{of}}"
        found.log_events.append(unhealthy(device, what, ERRORS_ADVICE, number, host))
    return found


def _of_json(text: str) -> dict[tuple[int, str], dict[str, str]]:
    """Texts of readings by card, from one JSON object per output. Raises SourceError if none is complete."""
    rows: dict[tuple[int, str], dict[str, str]] = {}
    decoder, at, output = json.JSONDecoder(), text.find("{"), 0
    try:
        while at >= 0:
            whole, end = decoder.raw_decode(text, at)
            output += 1
            for card, readings in whole.items() if isinstance(whole, dict) else ():
                if (name := _CARD.fullmatch(card)) and isinstance(readings, dict):
                    rows[output, name[1]] = _readings(readings)
            at = text.find("{", end)
    except (ValueError, RecursionError) as error:
        if not output:
            raise SourceError("is cut off or not JSON") from error
    return rows


def _readings(readings: dict[str, Any]) -> dict[str, str]:
    texts = {name: value[0] if isinstance(value, list) and value else value for name, value in readings.items()}
    return {
        column: str(value).strip("()")
        for name, value in texts.items()
        for pattern, column in _NAMES
        if pattern.fullmatch(name)
    }
