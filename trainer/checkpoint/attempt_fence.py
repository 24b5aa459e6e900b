"""Fencing: only the newest attempt of a run may write what later attempts read.

    attempt = claim(run)      # in the launcher, before it starts ranks; under torchrun in rank 0
    hold(run, attempt)        # each rank, once
    check()                   # before a rename that later attempts would see; raises Fenced

A rank is fenced as soon as a later claim exists (`probes.tape.attempts`).

A process may be stopped for hours between the check and the rename. Two rules make this safe:

1. The names of scratch files contain the attempt (`scratch`), and `check` is called after a file is written and before
   it is renamed.
2. A new attempt removes the scratch files of all other attempts (`sweep`) before it reads anything.

A process that passed the check before the claim has then either renamed before the sweep, or finds nothing to rename.
This module stores the attempt that the process belongs to. A process that belongs to no attempt is never fenced.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from probes.tape.attempts import claim, claims, newest
from probes.tape.files.held_folder import HeldFolder
from probes.tape.rundir import RunDir
from trainer.exit_codes import EXIT_FENCED

__all__ = ["Fenced", "check", "claim", "claims", "held_attempt", "hold", "scratch", "sweep"]

_held: tuple[RunDir, int, HeldFolder] | None = None


class Fenced(SystemExit):
    """A later attempt has taken over, or the run's folder was replaced (`problem`).

    It is a SystemExit, not an Exception, because code that tolerates a failed save must not tolerate this.
    """

    def __init__(self, attempt: int, newest: int, problem: str = "") -> None:
        super().__init__(EXIT_FENCED)
        self.attempt = attempt
        self.newest = newest
        self.problem = problem

    def __str__(self) -> str:
        if self.problem:
            return f"{self.problem}; this process exits, so that it writes to neither"
        return f"attempt {self.attempt} is over: attempt {self.newest} has taken over the run; this process exits"


def hold(run: RunDir, attempt: int) -> None:
    """Set the attempt that this process belongs to."""
    global _held
    if _held is not None:
        _held[2].close()
    _held = (run, attempt, HeldFolder(run.path))


def held_attempt() -> int:
    """The attempt of this process; 0 if it holds none."""
    return _held[1] if _held else 0


def check() -> None:
    """Raise Fenced if this process's attempt is over. An unreadable folder does not count as proof."""
    if _held is None:
        return
    run, attempt, folder = _held
    if problem := folder.problem():
        raise Fenced(attempt, attempt, problem)
    latest = newest(run, attempt)
    if latest > attempt:
        raise Fenced(attempt, latest)


def scratch(path: Path) -> Path:
    """Path of this attempt's scratch file for `path`, in the same folder: `ledger.json.a0.tmp`."""
    return path.with_name(f"{path.name}.a{held_attempt()}.tmp")


def sweep(folder: Path) -> None:
    """Remove every scratch file and folder in `folder`, so that older attempts can no longer rename theirs."""
    for path in folder.glob("*.tmp"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
