"""Read `kubectl describe pod` as log lines; a line that reports a container's end gets the pod's name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import REPORT_BYTES

NAME = "kubectl describe pod"
_FIELD = re.compile(r"^(\s*)([A-Z][\w ]*):\s*(.*)$")


def recognise(first: bytes) -> bool:
    """Return True for a pod's name, namespace and containers. A status and reason suffice for an evicted pod, which is
    often quoted without its containers.
    """
    is_pod = b"\nContainers:" in first or (b"\nStatus:" in first and b"\nReason:" in first)
    return first.startswith(b"Name:") and b"\nNamespace:" in first and is_pod


def lines(path: Path) -> Iterator[str]:
    """Yield one log line for each line of the file."""
    pod, node, container, state, reason = "", "", "", "", ""
    for line in read_text(path, REPORT_BYTES).splitlines():
        field = _FIELD.match(line)
        if field is None and re.match(r"^  [\w.-]+:\s*$", line):
            container = line.strip().rstrip(":")
        if field and field[2] == "Name" and not field[1]:
            pod = field[3]
        elif field and field[2] == "Node" and not field[1]:
            node = field[3].split("/")[0].strip("<>")
        elif field and field[2] in ("State", "Last State"):
            state = field[3]
        if field and field[2] == "Status" and not field[1] and field[3] == "Succeeded":
            yield f"pod/{pod}: phase Succeeded"
        elif field and field[2] == "Reason" and state == "Terminated":
            reason = field[3]
            yield line
        elif field and field[2] == "Exit Code" and state == "Terminated" and field[3] != "0":
            yield f"pod/{pod} container {container} terminated: {reason}, exit code {field[3]}"
        elif node and ((field and field[3] == "NodeLost") or "Node is not ready" in line):
            yield f"node {node} {line.strip()}"
        elif field and field[2] == "Message" and not field[1]:
            yield f"pod/{pod} {line}"
        else:
            yield line
