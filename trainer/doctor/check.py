"""One check of `rankscope doctor`: status, what was found, and how to fix it.

Check(name="py-spy", status="note", found="not installed", remedy="pip install 'rankscope[stacks]'")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["STATUSES", "Check", "Status", "to_json", "worst"]

Status = Literal["ok", "note", "warning", "failed"]
STATUSES: tuple[Status, ...] = ("ok", "note", "warning", "failed")
"""From good to bad. note: something optional is missing. warning: it works, but only in part, or not for long. failed:
it does not work, and `found` says why."""
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """`found`: what was found; `remedy`: what to do, empty if nothing is to be done."""

    name: str
    status: Status
    found: str
    remedy: str = ""


def worst(checks: Sequence[Check]) -> Status:
    """Worst status of all checks."""
    return STATUSES[max((STATUSES.index(check.status) for check in checks), default=0)]


def to_json(checks: Sequence[Check]) -> dict[str, Any]:
    """The output of `doctor --format json`."""
    return {"schema_version": SCHEMA_VERSION, "worst": worst(checks), "checks": [asdict(check) for check in checks]}
