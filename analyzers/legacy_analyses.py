"""Analyses of packages that have no `ANALYSES` yet; deleted entry by entry as they move there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from analyzers.account import goodput
from analyzers.analysis import Analysis

__all__ = ["LEGACY"]

LEGACY: Mapping[str, Sequence[Analysis]] = {
    "account": (Analysis(kinds=("goodput",), run=lambda source, scope: goodput.analyze(source)),),
}
