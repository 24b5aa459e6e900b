"""Read tables of `dcgmi dmon`: one reading of a GPU per row, taken to be 1 s apart (the default of `-d`)."""

from __future__ import annotations

from pathlib import Path

from store.readers.logs.file_names import host_of_log
from store.readers.programs.gpu_readings import SECOND_NS, UNNAMED_HOST, last_xid, number, reading
from store.readers.programs.rows import MAX_ROWS, ProgramRows
from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import SERIES_BYTES

NAME = "dcgmi dmon"
_COLUMNS = {
    "TMPTR": "temperature_celsius", "POWER": "power_watts", "GPUTL": "gpu_utilization_ratio", "SMCLK": "sm_clock_hertz",
    "DVCCTR": "throttle_reasons", "PCIRC": "pcie_replay_total", "REPLY": "pcie_replay_total",
    "ESVTL": "ecc_corrected_total", "EDVTL": "ecc_uncorrected_total", "RRURM": "remapped_rows_total",
    "RRF": "remap_failed", "RRP": "remap_pending",
}  # fmt: skip


def recognise(first: bytes) -> bool:
    """Return True if the table's header is found."""
    return first.lstrip().startswith((b"#Entity", b"# Entity"))


def read(path: Path) -> ProgramRows:
    """Read all rows; the header is repeated between them."""
    found, host = ProgramRows(), host_of_log(path)
    names: list[str] = []
    counts: dict[str, int] = {}
    for place, line in enumerate(read_text(path, SERIES_BYTES).splitlines(), 1):
        words = line.split()
        if line.lstrip().startswith("#"):
            names = [word for word in words if word not in ("#", "#Entity", "Entity")]
        elif len(words) == len(names) + 2 and words[0] == "GPU" and len(found.health) < MAX_ROWS:
            device = f"GPU {words[1]}"
            counts[device] = counts.get(device, 0) + 1
            values = dict(zip(names, words[2:], strict=True))
            code = int(number(values.get("XIDER", "")) or 0)
            found.log_events += last_xid(code, words[1], place, host, line.strip(), found.log_events)
            row = reading({_COLUMNS[name]: text for name, text in values.items() if name in _COLUMNS})
            if row:
                when_ns = counts[device] * SECOND_NS
                found.health.append(
                    {"rank": -1, "node": host or UNNAMED_HOST, "device": device, "sample_ns": when_ns, **row}
                )
    return found
