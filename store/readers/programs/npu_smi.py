"""Read the table of `npu-smi info`: Ascend NPUs that are not healthy (OK)."""

from __future__ import annotations

import re
from pathlib import Path

from store.readers.logs.file_names import host_of_log
from store.readers.programs.gpu_readings import unhealthy
from store.readers.programs.rows import ProgramRows
from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import DOCUMENT_BYTES

NAME = "npu-smi info"
_NPU = re.compile(r"^\|\s*(\d{1,3})\s+([\w-]+)\s*\|\s*(Warning|Alarm|Critical|UNKNOWN)\s*\|", re.IGNORECASE)
_ADVICE = "Query the fault's code there (`npu-smi info -t health -i ID`), and exclude the node."


def recognise(first: bytes) -> bool:
    """Return True for the table's title and header; a job's log may begin with the table."""
    if b"| npu-smi " not in first[:2000] or b"| Health " not in first[:4000]:
        return False
    others = [line for line in first.splitlines() if line.strip() and line.lstrip()[:1] not in (b"|", b"+")]
    return len(others) <= 3


def read(path: Path) -> ProgramRows:
    """Read every table in the file (`watch`)."""
    found, host = ProgramRows(), host_of_log(path)
    seen: set[tuple[str, str]] = set()
    for number, line in enumerate(read_text(path, DOCUMENT_BYTES).splitlines(), 1):
        if (npu := _NPU.match(line)) and (npu[1], npu[3]) not in seen:
            seen.add((npu[1], npu[3]))
            what = f"npu-smi reports the health of NPU {npu[1]}{{of}} ({npu[2]}) as {npu[3]}"
            found.log_events.append(unhealthy(npu[1], what, _ADVICE, number, host))
    return found
