"""A diagnosis as JSON.

    json.dumps(to_json(diagnosis), allow_nan=False)

`{"schema_version": 2, "run": {...}, "verdict": "...", "findings": [{"id", "link", "closed", "analyzer", "kind",
"severity", "status", "ranks", "first_step", "last_step", "cause", "summary", "evidence", "advice", "attempt",
"cost_s"}],
"goodput": {...}, "what_if": {...}}`
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from analyzers.diagnose import SCHEMA_VERSION, Diagnosis
from analyzers.report.wording.links import finding_path

__all__ = ["plain", "to_json"]


def to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Plain JSON values: no NaN, no Inf, no numpy."""
    found: dict[str, Any] = plain(
        {
            "schema_version": SCHEMA_VERSION,
            "run": diagnosis.run,
            "verdict": diagnosis.verdict,
            "findings": [
                finding.to_json()
                | {"link": finding_path(diagnosis.run, finding), "closed": diagnosis.closed.get(finding.id, "")}
                for finding in diagnosis.findings
            ],
            "goodput": diagnosis.goodput.to_json() if diagnosis.goodput else None,
            "what_if": diagnosis.what_if.to_json() if diagnosis.what_if else None,
        }
    )
    return found


def plain(value: Any) -> Any:
    """The value as JSON can hold it: numpy's numbers become Python's, NaN and Inf become None, and values of unknown
    types become text.
    """
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        value = value.item()  # a number of numpy's
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
