"""Judge hosts and devices over all runs of a folder in a process of its own: each new run is diagnosed for it.

found = fleet_in_process(folder)
found.fleet, found.problems
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path

from analyzers.fleet.fleet import Fleet, fleet
from analyzers.fleet.remembered import read_histories
from dashboard.serve import end_with
from probes.tape.rundir import RunDir
from store import StoreError
from store.runs_folder import RunsFolder

__all__ = ["FleetAnswer", "fleet_in_process", "fleet_version"]

NICENESS = 5
LIMIT_S = 3 * 3_600.0
"""A folder of two thousand runs not diagnosed before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetAnswer:
    """All members, and {run: why it could not be read}."""

    fleet: Fleet
    problems: Mapping[str, str]


def fleet_version(folder: RunsFolder) -> Hashable:
    """Changes when a run has come, gone or grown."""
    found = []
    for name in folder.run_ids():
        for path in RunDir(folder.path / name).stores():
            try:
                found.append((name, path.name, path.stat().st_size))
            except OSError:
                continue
    return tuple(found)


def fleet_in_process(folder: RunsFolder) -> FleetAnswer:
    """The fleet, judged by a child process. Raises StoreError."""
    command = [sys.executable, "-m", "dashboard.data.fleet_process", str(folder.path), str(os.getpid())]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise StoreError(f"the runs were not read in {LIMIT_S / 3600:.0f} h: try rankscope fleet") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise StoreError(lines[-1][:500] if lines else f"reading the runs ended with exit code {done.returncode}")
    found = pickle.loads(done.stdout)  # noqa: S301 - our own child wrote it; nothing of a run is unpickled
    assert isinstance(found, FleetAnswer)
    return found


def _child(path: str, parent: str) -> None:
    if sys.platform == "linux":
        end_with(int(parent))
    os.nice(NICENESS)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed meanwhile must not mix with the result
    from dashboard.data.fleet_process import FleetAnswer  # by its own name: the parent unpickles it

    found = read_histories(RunsFolder(Path(path)))
    with out:
        pickle.dump(FleetAnswer(fleet=fleet(found.histories), problems=found.problems), out)


if __name__ == "__main__":
    _child(*sys.argv[1:])
