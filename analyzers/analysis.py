"""One analysis: a question to the records of a run, and the kinds of findings that answer it.

    ANALYSES = (Analysis(kinds=("straggler",), run=stragglers, records="compared", live="periodic"),)

Each package of `analyzers` lists its own in `analyze.ANALYSES`; `diagnose` and `live` run them all. An analysis that
fails costs its own findings (`insufficient_data`, of its first kind), never those of the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from analyzers.finding import Finding
from analyzers.kinds import packages
from analyzers.plugins import Plugin, plugins
from analyzers.scope import Scope
from analyzers.source import Source

__all__ = ["Analysis", "Records", "analyses"]

Records = Literal["all", "sampled", "compared", "histories"]
"""Which steps of a run of hundreds of millions of rows it reads: all, all ranks at even distances, all ranks where one
changes against the others, or some ranks whole (`analyzers.account.long_run`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """A question to the records of a run."""

    kinds: tuple[str, ...]
    """Kinds that it can report; the first one is what it is not sure of when it fails."""
    run: Callable[[Source, Scope], list[Finding]]
    records: Records = "all"
    live: Literal["never", "each_tick", "periodic"] = "never"
    """How often `watch` runs it while the run lives; `periodic` costs more and shows over steps, not seconds."""
    advises: bool = False
    """Whether `watch` says its advice once, as soon as the first steps show it (`analyzers.settings.live_advice`)."""


def analyses() -> tuple[Analysis, ...]:
    """All analyses of all packages in the order of the verdict, then those of plug-ins."""
    found: list[Analysis] = []
    for package in packages():
        found += importlib.import_module(f"analyzers.{package}.analyze").ANALYSES
    for plugin in plugins():
        found += getattr(plugin.module, "ANALYSES", None) or (_not_loaded(plugin),)
    return tuple(found)


def _not_loaded(plugin: Plugin) -> Analysis:
    """An analysis that fails with the reason: what it would have found was not judged."""

    def run(source: Source, scope: Scope) -> list[Finding]:
        raise ImportError(f"plug-in {plugin.name}: {plugin.problem or 'it has no analyses'}")

    return Analysis(kinds=("records",), run=run)
