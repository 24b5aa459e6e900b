"""The package's analysis: says why there is no account of the run's time, if the records allow none."""

from __future__ import annotations

from analyzers.account import goodput
from analyzers.analysis import Analysis

__all__ = ["ANALYSES"]

ANALYSES = (Analysis(kinds=("goodput",), run=lambda source, scope: goodput.analyze(source)),)
