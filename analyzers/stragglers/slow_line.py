"""The line of code in which a slow rank stands most often, as `watch` sampled it while the straggler was open.

evidence |= slow_line(log, attempt=0, rank=1)      # {"line": "train.py:57 step", "line_share_ratio": 0.85, ...}
"""

from __future__ import annotations

from typing import Any

from analyzers.run.event_log import EventLog
from probes.tape import event_kinds

__all__ = ["slow_line"]


def slow_line(log: EventLog, attempt: int, rank: int) -> dict[str, Any]:
    """Evidence from the newest `slow_line` event of a rank; empty where it was not sampled."""
    found = [one for one in log.of(event_kinds.SLOW_LINE, attempt=attempt) if one.integer("slow_rank") == rank]
    if not found or not found[-1].text("line"):
        return {}
    newest = found[-1]
    return {
        "line": newest.text("line")[:300],
        "line_share_ratio": newest.detail.get("share_ratio"),
        "line_share_of_peer_ratio": newest.detail.get("peer_share_ratio"),
        "num_stack_samples": newest.integer("num_samples"),
    }
