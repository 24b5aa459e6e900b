"""Judge hosts and devices over all runs of a folder in a separate process, which diagnoses each new run.

found = fleet_in_process(folder)
found.fleet, found.problems
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path

from analyzers.fleet.cached_histories import read_histories
from analyzers.fleet.fleet import Fleet, fleet
from dashboard.data.processes.child_answer import answer_parent, ask_child
from probes.tape.rundir import RunDir
from store.runs_folder import RunsFolder

__all__ = ["FleetAnswer", "fleet_in_process", "fleet_version"]

LIMIT_S = 3 * 3_600.0
"""Time limit in seconds, enough for a folder of two thousand runs that were not diagnosed before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetAnswer:
    """All members, and {run: why it could not be read}."""

    fleet: Fleet
    problems: Mapping[str, str]


def fleet_version(folder: RunsFolder) -> Hashable:
    """Value that changes when a run is added, removed or grows."""
    found = []
    for name in folder.run_ids():
        for path in RunDir(folder.path / name).stores():
            try:
                found.append((name, path.name, path.stat().st_size))
            except OSError:
                continue
    return tuple(found)


def fleet_in_process(folder: RunsFolder) -> FleetAnswer:
    """Return the fleet, judged in a child process. Raises StoreError."""
    error = f"the runs were not read in {LIMIT_S / 3600:.0f} h: try rankscope fleet"
    found = ask_child("dashboard.data.processes.fleet_process", str(folder.path), limit_s=LIMIT_S, timeout_error=error)
    assert isinstance(found, FleetAnswer)
    return found


def _judge(path: str) -> FleetAnswer:
    found = read_histories(RunsFolder(Path(path)))
    return FleetAnswer(fleet=fleet(found.histories), problems=found.problems)


if __name__ == "__main__":
    # Import the module by its name and not as `__main__`, since the parent unpickles objects of its classes.
    from dashboard.data.processes import fleet_process

    answer_parent(fleet_process._judge)
