"""Read Slurm's `scontrol show node`: nodes that are down, not responding or drained, and the reason."""

from __future__ import annotations

import re
from pathlib import Path

from store.readers.programs.rows import ProgramRows
from store.readers.programs.sacct import wall_ns_of
from store.readers.programs.scontrol import blocks, is_listing
from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import DOCUMENT_BYTES

NAME = "scontrol show node"
MAX_NODES = 64
"""Maximum nodes of a job. A longer listing describes the whole cluster, so the job's nodes are unknown."""
_FAILED = ("DOWN", "FAIL", "FAILING", "ERROR", "NOT_RESPONDING")
_DRAINED = ("DRAIN", "DRAINED", "DRAINING")
PLANNED = re.compile(r"mainten|upgrad|\breboot|reserv|update|install|patch|\btest", re.IGNORECASE)
"""Reasons for which administrators drain a healthy node."""
_SINCE = re.compile(r"\[\S+@([\dT:-]+)\]")


def recognise(first: bytes) -> bool:
    """Return True for a listing of nodes."""
    return is_listing(first, "NodeName", "State")


def read(path: Path) -> ProgramRows:
    """Read the nodes of a job; none if the listing describes the whole cluster. Raises SourceError."""
    nodes = blocks(read_text(path, DOCUMENT_BYTES), "NodeName")
    if len(nodes) > MAX_NODES:
        reason = f"lists {len(nodes)} nodes: give those of the job (scontrol show node $SLURM_JOB_NODELIST)"
        return ProgramRows(problem=reason)
    found = ProgramRows()
    for number, node in nodes:
        state, reason = node.get("State", ""), node.get("Reason", "")
        flags = set(re.split(r"[+*]", state.rstrip("~#!%$@^-")))
        if state.rstrip("~#!%$@^-").endswith("*") or flags & {*_FAILED}:
            kind = "node_failed"
        elif flags & {*_DRAINED} and not PLANNED.search(reason):
            kind = "node_drained"
        else:
            continue
        since = _SINCE.search(reason)
        found.log_events.append(
            {
                "kind": kind, "line": number, "wall_ns": wall_ns_of(since[1]) if since else None,
                "message": f"NodeName={node['NodeName']} State={state}" + (f" Reason={reason}" if reason else ""),
                "host": node["NodeName"], "fields": {"host": node["NodeName"], "reason": reason[:200]},
            }
        )  # fmt: skip
    return found
