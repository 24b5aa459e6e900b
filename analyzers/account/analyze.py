"""Analysis of this package: its finding says why there is no account of the run's time."""

from __future__ import annotations

from analyzers.account import goodput
from analyzers.analysis import Analysis

__all__ = ["ANALYSES"]

ANALYSES = (Analysis(kinds=("goodput",), run=lambda source, scope: goodput.analyze(source)),)
