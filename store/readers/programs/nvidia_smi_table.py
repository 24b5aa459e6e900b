"""Read the table of `nvidia-smi` without options: readings of each GPU; unreadable GPUs are reported as lost."""

from __future__ import annotations

import re
from pathlib import Path

from store.readers.logs.file_names import host_of_log
from store.readers.programs.gpu_readings import LOST, SECOND_NS, UNNAMED_HOST, reading, sample_ns
from store.readers.programs.rows import MAX_ROWS, ProgramRows
from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import SERIES_BYTES

NAME = "table of nvidia-smi"
MAX_OTHERS = 2
"""Maximum extra lines around a table, such as shell prompts; the time line is not counted."""
_GPU = re.compile(
    r"^\|\s+(\d{1,3})\s+\S.*?\|\s*([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\b[^|]*\|\s*(\S+)\s*\|"
)
_STATE = re.compile(r"^\|\s*(?:\d+\s*%|N/A)?\s+(\d+)C\s+\S+\s+(\S+)\s*/[^|]*\|[^|]*\|\s*(\d+)\s*%")
_TIME = re.compile(r"^[A-Z][a-z]{2} [A-Z][a-z]{2} +\d+ [\d:]{8} \d{4}\s*$")


def recognise(first: bytes) -> bool:
    """Return True if nearly all lines belong to the table: a job's log that begins with one is a log."""
    if b"| NVIDIA-SMI " not in first[:2000] or b"Bus-Id" not in first:
        return False
    others = [line for line in first.splitlines() if line.strip() and line.lstrip()[:1] not in (b"|", b"+")]
    return len(others) <= MAX_OTHERS + first.count(b"| NVIDIA-SMI ")


def read(path: Path) -> ProgramRows:
    """Read every table in the file (`watch`, `-l`)."""
    found, host = ProgramRows(), host_of_log(path)
    index, bus, ecc, num_tables = "", "", "", 0
    when_ns: int | None = None
    lost: set[str] = set()
    for number, line in enumerate(read_text(path, SERIES_BYTES).splitlines(), 1):
        if _TIME.match(line):
            when_ns = sample_ns(line)
        num_tables += "| NVIDIA-SMI " in line
        if gpu := _GPU.match(line):
            index, bus, ecc = gpu.groups()
        elif index and (state := _STATE.match(line)) and len(found.health) < MAX_ROWS:
            known = {"temperature_celsius": state[1], "power_watts": state[2], "gpu_utilization_ratio": state[3]}
            row = reading(known | {"ecc_uncorrected_total": ecc})
            place = {"rank": -1, "node": host or UNNAMED_HOST, "device": f"GPU {index}"}
            found.health.append(place | {"sample_ns": when_ns or num_tables * SECOND_NS} | row)
        if index and LOST.search(line) and bus not in lost:
            lost.add(bus)
            fields = {"bus": bus, "text": "nvidia-smi cannot reach it"}
            event = {
                "kind": "gpu_lost",
                "line": number,
                "wall_ns": when_ns,
                "message": f"GPU {index} {bus}: {line.strip()}",
            }
            found.log_events.append({**event, "host": host, "fields": fields})
        index = "" if line.startswith("| Processes") else index
    return found
