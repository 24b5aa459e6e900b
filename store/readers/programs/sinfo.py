"""Read Slurm's `sinfo -R`: why a node is down or drained."""

from __future__ import annotations

import re
from pathlib import Path

from store.readers.programs.rows import ProgramRows
from store.readers.programs.sacct import wall_ns_of
from store.readers.programs.scontrol_node import PLANNED
from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import DOCUMENT_BYTES

NAME = "sinfo -R of Slurm"
_HEAD = re.compile(rb"\s*REASON\s+USER\s+TIMESTAMP\s+(?:STATE\s+)?NODELIST\s*$")
_ROW = re.compile(
    r"\s*(?P<reason>\S.*?)\s+\S+\s+(?P<time>\d{4}-\d\d-\d\dT[\d:]{8}|Unknown)\s+(?:[a-z]\S*\s+)?(?P<nodes>[\w.,\[\]-]+)\s*$"
)


def recognise(first: bytes) -> bool:
    """Return True for the header, in the first line or below a shell prompt."""
    return any(_HEAD.match(line) for line in first.splitlines()[:2])


def read(path: Path) -> ProgramRows:
    """Read a single reason. Several reasons describe the whole cluster: the job's nodes are then unknown."""
    lines = read_text(path, DOCUMENT_BYTES).splitlines()
    rows = [(number, row) for number, line in enumerate(lines, 1) if (row := _ROW.match(line))]
    if len(rows) > 1:
        return ProgramRows(problem=f"lists {len(rows)} reasons: give those of the job's nodes (sinfo -R -n NODELIST)")
    found = ProgramRows()
    for number, row in rows:
        if PLANNED.search(row["reason"]):
            continue
        found.log_events.append(
            {
                "kind": "node_drained", "line": number, "message": " ".join(row[0].split()), "host": row["nodes"],
                "wall_ns": wall_ns_of(row["time"]) if row["time"] != "Unknown" else None,
                "fields": {"host": row["nodes"], "reason": row["reason"][:200]},
            }
        )  # fmt: skip
    return found
