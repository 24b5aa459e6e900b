"""Reads the team's own step files: `#team-steps 1`, then a line `rank,step,seconds,loss` each."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

__all__ = ["read", "recognise"]

MARK = b"#team-steps 1\n"


def recognise(first: bytes) -> bool:
    """True for the first bytes of a file of the team's."""
    return first.startswith(MARK)


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Steps with their duration and loss; a loss that is not finite is an event, as a line of a log would be."""
    steps, events = [], []
    for number, line in enumerate(path.read_text().splitlines()[1:], start=2):
        rank, step, seconds, loss = line.split(",")
        own = {"rank": int(rank), "step": int(step)}
        steps.append({**own, "duration_ns": round(float(seconds) * 1e9), "loss": float(loss)})
        if not math.isfinite(float(loss)):
            events.append({**own, "kind": "nonfinite", "line": number, "message": f"loss is {loss} at step {step}"})
    return {"steps": steps, "log_events": events}
