"""Analyses of packages that have no `ANALYSES` yet; deleted entry by entry as they move there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analyzers.account import goodput
from analyzers.analysis import Analysis
from analyzers.pipeline import analyze as stage_balance

__all__ = ["LEGACY"]


def _schedule(manifest: Mapping[str, Any]) -> str:
    """The pipeline's schedule that the run was configured with."""
    config = manifest.get("config")
    parallel = config.get("parallel") if isinstance(config, dict) else None
    schedule = parallel.get("schedule") if isinstance(parallel, dict) else None
    return schedule if isinstance(schedule, str) else ""


LEGACY: Mapping[str, Sequence[Analysis]] = {
    "pipeline": (
        Analysis(kinds=("bubble", "stage_imbalance"),
                 run=lambda source, scope: stage_balance.analyze(source, _schedule(scope.manifest))),
    ),
    "account": (Analysis(kinds=("goodput",), run=lambda source, scope: goodput.analyze(source)),),
}  # fmt: skip
