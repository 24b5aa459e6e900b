"""The first line of a run with bounded records: the window that is kept, and the disk budget.

    retention_line({"probes": {"retain": "window", "retain_s": 600.0, "budget_mb": 50.0}})
    # "records: tapes and single calls of the last 600 s, at most 50 MB per rank and hour"

`rankscope train` prints the line at a launch; in an attached loop rank 0 prints it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ..settings.section import read_config
from ..settings.sections import ProbesSettings
from ..tape.rundir import RunDir
from .launch.identity import Identity

__all__ = ["print_retention", "retention_line"]


def retention_line(config: Mapping[str, Any]) -> str:
    """The line; empty if everything is kept."""
    probes = read_config(ProbesSettings, config)
    if probes.retain != "window":
        return ""
    budget = f", at most {probes.budget_mb:g} MB per rank and hour" if probes.budget_mb else ""
    return f"records: tapes and single calls of the last {probes.retain_s:g} s{budget}"


def print_retention(run: RunDir, identity: Identity) -> None:
    """Print the line once per launch. The settings come from the run's folder, because `watch` reads them there too."""
    if identity.rank == 0 and identity.restarts == 0 and (line := retention_line(run.manifest().get("config", {}))):
        sys.stderr.write(f"rankscope: {line}\n")
