"""Evidence and next step of missing records."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from analyzers.finding import Finding

__all__ = ["NEXT", "WHY"]

WHY: Mapping[str, Callable[[Finding], str]] = {
    "records": lambda finding: "Checks that need these records report insufficient data, not a healthy run."
}
NEXT: Mapping[str, Callable[[Finding], str]] = {
    "records": lambda finding: "Check that every rank records, and that its tapes reached this store."
}
