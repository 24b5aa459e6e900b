"""Reads the team's own step files: a line `#team-steps 1`, then one line `rank,step,seconds,loss` per step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

__all__ = ["read", "recognise"]

MARK = b"#team-steps 1\n"


def recognise(first: bytes) -> bool:
    """True if these are the first bytes of such a file."""
    return first.startswith(MARK)


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Steps with their duration and loss; a non-finite loss is also an event, like a matching line of a log."""
    steps, events = [], []
    for number, line in enumerate(path.read_text().splitlines()[1:], start=2):
        rank, step, seconds, loss = line.split(",")
        key = {"rank": int(rank), "step": int(step)}
        steps.append({**key, "duration_ns": round(float(seconds) * 1e9), "loss": float(loss)})
        if not math.isfinite(float(loss)):
            events.append({**key, "kind": "nonfinite", "line": number, "message": f"loss is {loss} at step {step}"})
    return {"steps": steps, "log_events": events}
