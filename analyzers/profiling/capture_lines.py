"""One line of a report for each capture of torch's profiler.

capture_line(diagnosis.run["captures"][0])       # "rank 3, steps 40 to 44: step 81 ms, compute 60 ms; traces/..."
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analyzers.wording import is_number

__all__ = ["capture_line"]

_PARTS = {"step": "step", "compute": "compute", "exposed": "exposed communication", "idle": "idle"}


def capture_line(capture: Mapping[str, Any]) -> str:
    """Rank, steps, parts of a step or why they are not known, and the trace."""
    steps = f"rank {capture.get('rank')}, steps {capture.get('first_step')} to {capture.get('last_step')}"
    given: Any = capture.get("parts_ms")
    parts: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    known = [f"{text} {parts[key]:.3g} ms" for key, text in _PARTS.items() if is_number(parts.get(key))]
    problem = capture.get("problem")
    if known:
        about = ", ".join(known) + (f" ({problem})" if problem else "")
    else:
        about = str(problem or "not read")
    where = capture.get("path") if capture.get("is_kept") else "removed, beyond profiler.budget_mb"
    return f"{steps}: {about}. {where}"
