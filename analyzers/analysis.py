"""One analysis: a question to the records of a run, and the kinds of findings that answer it.

    ANALYSES = (Analysis(kinds=("straggler",), run=stragglers, records="compared", live="periodic"),)

    FILES = FileAnalysis(format="inspector", kind="straggler", read=read_inspector_job, run=late_ranks, facts=facts)

Each package of `analyzers` lists its own in `analyze.ANALYSES`; `diagnose` and `live` run them all. What it asks of
files that other programs wrote is in the modules that `analyze.OF_FILES` names, imported where there are such files. An
analysis that fails costs its own findings (`insufficient_data`, of its first kind), never those of the others.
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
"""Which steps of a run of hundreds of millions of rows it reads: all, all ranks at even distances, all ranks where one
changes against the others, or some ranks whole (`analyzers.account.long_run`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """A question to the records of a run."""

    kinds: tuple[str, ...]
    """Kinds that it can report; the first one is what it is not sure of when it fails."""
    run: Callable[[TypedSource, Scope], list[Finding]]
    records: Records = "all"
    live: Literal["never", "each_tick", "periodic"] = "never"
    """How often `watch` runs it on a live run; `periodic` for analyses that cost more and need several new steps."""
    advises: bool = False
    """True if `watch` reports its advice once, after first steps that show it (`analyzers.settings.live_advice`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileAnalysis:
    """A question to the files of one format, which say less than the records of a run: most have no clock."""

    format: Format
    kind: str
    """Kind of finding that it is not sure of when it fails."""
    read: Callable[[Survey], Any]
    """Rows of the files, joined by rank. What cannot be read is listed in its argument."""
    run: Callable[[Any], list[Finding]]
    """Findings over the rows; `insufficient_data` where there are none."""
    facts: Callable[[Any], dict[str, Any]]
    what_if: Callable[[Any], WhatIf | None] = lambda rows: None


def file_analyses() -> tuple[FileAnalysis, ...]:
    """Analyses of files, in the order of the packages."""
    named = (
        f"analyzers.{package}.{module}"
        for package in packages()
        for module in getattr(importlib.import_module(f"analyzers.{package}.analyze"), "OF_FILES", ())
    )
    return tuple(importlib.import_module(module).FILES for module in named)


def analyses() -> tuple[Analysis, ...]:
    """All analyses of all packages in the order of the verdict, then those of plug-ins."""
    return (*our_analyses(), *plugin_analyses())


def our_analyses() -> tuple[Analysis, ...]:
    """Analyses of the packages of `analyzers`."""
    found: list[Analysis] = []
    for package in packages():
        found += importlib.import_module(f"analyzers.{package}.analyze").ANALYSES
    return tuple(found)


def plugin_analyses() -> tuple[Analysis, ...]:
    """Analyses of plug-ins; a wrong declaration becomes an analysis that reports it."""
    return tuple(analysis for plugin in installed() for analysis in _of(plugin))


def _of(plugin: InstalledPlugin) -> Iterator[Analysis]:
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
