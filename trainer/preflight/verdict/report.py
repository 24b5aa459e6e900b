"""The verdict of a preflight: lines of one sentence each, and the exit code that follows from them.

report = PreflightReport(lines=(Line(check="clocks", status="pass", text="..."),), readings=readings)
report.exit_code(strict=False)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from trainer.exit_codes import EXIT_FAILED
from trainer.preflight.verdict.readings import Readings

__all__ = ["EXIT_FAILED", "EXIT_INCOMPLETE", "EXIT_PASSED", "Line", "PreflightReport", "Status"]

Status = Literal["pass", "warn", "fail"]
_ORDER: tuple[Status, ...] = ("pass", "warn", "fail")
EXIT_PASSED = 0
"""Nothing failed; there may be warnings."""
EXIT_INCOMPLETE = 3
"""A rank did not answer, or the ranks could not communicate."""
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One check, or one node, device or link that stands out in it."""

    check: str
    status: Status
    text: str
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    is_incomplete: bool = False
    """True if the measurement itself failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightReport:
    """Lines in the order of the checks."""

    lines: tuple[Line, ...]
    readings: Readings

    @property
    def worst(self) -> Status:
        return _ORDER[max((_ORDER.index(line.status) for line in self.lines), default=0)]

    def exit_code(self, *, strict: bool = False) -> int:
        if any(line.is_incomplete for line in self.lines):
            return EXIT_INCOMPLETE
        return EXIT_FAILED if self.worst == "fail" or (strict and self.worst == "warn") else EXIT_PASSED

    def to_json(self) -> dict[str, Any]:
        """The output of `preflight --json`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "worst": self.worst,
            "lines": [asdict(line) for line in self.lines],
            "readings": self.readings.to_json(),
        }
