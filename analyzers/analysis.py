"""An analysis: a function from the records of a run to findings, with the kinds that it can report.

    ANALYSES = (Analysis(kinds=("straggler",), run=stragglers, records="compared", live="periodic"),)

    FILES = FileAnalysis(format="inspector", kind="straggler", read=read_inspector_job, run=late_ranks, facts=facts)

Each package of `analyzers` lists its analyses in `analyze.ANALYSES`; `diagnose` and `live` run them all. Analyses of
other programs' files are in the modules that `analyze.OF_FILES` names, imported only for such files. If an analysis
fails, it alone is reported as `insufficient_data`, under its first kind.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from analyzers.kinds import OUR_KINDS, packages
from analyzers.plugin_calls.calls import judge, not_judged
from analyzers.plugins import InstalledPlugin, installed

# Relative: see analyzers/diagnose.py.
from .finding import Finding
from .scope import Scope
from .source import TypedSource

if TYPE_CHECKING:
    from analyzers.whatif.what_if import WhatIf
    from store.readers.formats import Format
    from store.readers.untrusted.external_files import Survey

__all__ = ["Analysis", "FileAnalysis", "Records", "analyses", "file_analyses", "our_analyses", "plugin_analyses"]

Records = Literal["all", "sampled", "compared", "histories"]
"""Steps that an analysis reads if a run has hundreds of millions of rows. all: every step; sampled: all ranks in evenly
spaced steps; compared: all ranks in the steps where a rank changes; histories: all steps of some ranks
(`account.long_run`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """An analysis of the records of a run."""

    kinds: tuple[str, ...]
    """Kinds that it can report; the first is reported as `insufficient_data` if it fails."""
    run: Callable[[TypedSource, Scope], list[Finding]]
    records: Records = "all"
    live: Literal["never", "each_tick", "periodic"] = "never"
    """How often `watch` runs it on a live run; `periodic` for analyses that cost more and need several new steps."""
    advises: bool = False
    """True if `watch` reports its advice once, after steps that show it (`analyzers.settings.live_advice`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileAnalysis:
    """An analysis of another program's files, in one format. They hold less than a run's records; most lack times."""

    format: Format
    kind: str
    """Kind that is reported as `insufficient_data` if it fails."""
    read: Callable[[Survey], Any]
    """Read the files into rows, joined by rank, and note unreadable files in the `Survey`."""
    run: Callable[[Any], list[Finding]]
    """Find problems in the rows; `insufficient_data` if there are no rows."""
    facts: Callable[[Any], dict[str, Any]]
    what_if: Callable[[Any], WhatIf | None] = lambda rows: None


def file_analyses() -> tuple[FileAnalysis, ...]:
    """Return the analyses of files, in the order of the packages."""
    modules = (
        f"analyzers.{package}.{module}"
        for package in packages()
        for module in getattr(importlib.import_module(f"analyzers.{package}.analyze"), "OF_FILES", ())
    )
    return tuple(importlib.import_module(module).FILES for module in modules)


def analyses() -> tuple[Analysis, ...]:
    """All built-in analyses, in the order in which the verdict lists their findings, then the analyses of plug-ins."""
    return (*our_analyses(), *plugin_analyses())


def our_analyses() -> tuple[Analysis, ...]:
    """Analyses of the packages of `analyzers`."""
    found: list[Analysis] = []
    for package in packages():
        found += importlib.import_module(f"analyzers.{package}.analyze").ANALYSES
    return tuple(found)


def plugin_analyses() -> tuple[Analysis, ...]:
    """Analyses of plug-ins; a wrong declaration becomes an analysis that reports it."""
    return tuple(analysis for plugin in installed() for analysis in _analyses_of(plugin))


def _analyses_of(plugin: InstalledPlugin) -> Iterator[Analysis]:
    if plugin.problems:
        failures = [not_judged(plugin, problem) for problem in plugin.problems]
        yield Analysis(kinds=("records",), run=lambda source, scope: failures, live="each_tick")
    for one in plugin.analyses:
        yield Analysis(
            kinds=tuple(kind for kind in one["kinds"] if kind not in OUR_KINDS) or ("records",),
            run=partial(judge, plugin, one["number"]),
            records=one["records"],
            live=one["live"],
            advises=one["advises"],
        )
