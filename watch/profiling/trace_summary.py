"""Summary of one profiler trace of a run: the parts of a step, and the operators by self time.

summary = summarise(Path("runs/latest/traces/attempt-0/rank-00003-steps-40-44-requested.pt.trace.json.gz"))
summary["parts_ms"]["step"], summary["operators"][0]["name"]
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from analyzers.stragglers.traces import breakdown
from store.readers.external_files import SourceError
from store.readers.kineto import read_trace
from store.readers.trace_operators import OperatorTimes

__all__ = ["MAX_BYTES", "summarise"]

MAX_BYTES = 48 << 20
"""Maximum size of a compressed trace: a larger one takes minutes, and is left to `rankscope analyze`."""
NUM_OPERATORS = 60


def summarise(path: Path) -> dict[str, Any]:
    """Fields of a `profile_summary` event; `problem` where the trace was not read, or not wholly."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_BYTES:
            return {"problem": f"has {num_bytes / 1e6:.0f} MB: read it with rankscope analyze"}
        operators = OperatorTimes()
        trace = read_trace(path, each=operators.take)
    except FileNotFoundError:
        return {"problem": "was removed before it was read"}
    except (OSError, SourceError) as error:
        return {"problem": str(error)[:300]}
    parts = {part: round(float(np.mean(values)), 4) for part, values in breakdown(trace).items()}
    rows = [asdict(row) for row in operators.rows(num_steps=len(trace.steps))[:NUM_OPERATORS]]
    for row in rows:
        row["self_ms"], row["calls"] = round(row["self_ms"], 4), round(row["calls"], 2)
    return {"parts_ms": parts, "operators": rows, "problem": trace.problem or None}
