"""Analyses of packages that have no `ANALYSES` yet; deleted entry by entry as they move there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analyzers.account import goodput
from analyzers.analysis import Analysis
from analyzers.checkpoints import analyze as checkpoints
from analyzers.communication import analyze as communication
from analyzers.data import analyze as data_wait
from analyzers.finding import Finding
from analyzers.pipeline import analyze as stage_balance
from analyzers.scope import Scope
from analyzers.settings import analyze as configuration
from analyzers.settings import startup
from analyzers.source import Source
from analyzers.stragglers import analyze as straggler
from analyzers.stragglers import throughput
from analyzers.stragglers.slow_rank import StragglerPolicy

__all__ = ["LEGACY"]


def _schedule(manifest: Mapping[str, Any]) -> str:
    """The pipeline's schedule that the run was configured with."""
    config = manifest.get("config")
    parallel = config.get("parallel") if isinstance(config, dict) else None
    schedule = parallel.get("schedule") if isinstance(parallel, dict) else None
    return schedule if isinstance(schedule, str) else ""


def _of(scope: Scope, findings: list[Finding]) -> list[Finding]:
    return findings if scope.attempt is None else [one for one in findings if one.attempt == scope.attempt]


def _straggler(source: Source, scope: Scope) -> list[Finding]:
    found = _of(scope, straggler.analyze(source, StragglerPolicy(since_step=scope.since_step)))
    return [one for one in found if one.evidence.get("ongoing", True)] if scope.is_live else found


LEGACY: Mapping[str, Sequence[Analysis]] = {
    "stragglers": (
        Analysis(kinds=("straggler",), records="compared", run=_straggler, live="periodic"),
        Analysis(kinds=("throughput",), records="compared", run=lambda source, scope: throughput.analyze(source)),
    ),
    "pipeline": (
        Analysis(kinds=("bubble", "stage_imbalance"),
                 run=lambda source, scope: stage_balance.analyze(source, _schedule(scope.manifest))),
    ),
    "communication": (
        Analysis(kinds=("exposed_communication",), records="sampled",
                 run=lambda source, scope: communication.analyze(source)),
    ),
    "data": (
        Analysis(kinds=("data_bound",), records="compared", live="periodic",
                 run=lambda source, scope: data_wait.analyze(
                     source, data_wait.DataPolicy(since_step=scope.since_step))),
    ),
    "checkpoints": (
        Analysis(kinds=("checkpoint_age", "checkpoint_failed", "checkpoint_cost"), records="histories",
                 live="periodic", run=lambda source, scope: checkpoints.analyze(source, scope.manifest)),
    ),
    "settings": (
        Analysis(kinds=("slow_startup",), records="sampled", run=lambda source, scope: startup.analyze(source)),
        Analysis(kinds=("configuration",), records="histories",
                 run=lambda source, scope: configuration.analyze(source, scope.manifest)),
    ),
    "account": (Analysis(kinds=("goodput",), run=lambda source, scope: goodput.analyze(source)),),
}  # fmt: skip
