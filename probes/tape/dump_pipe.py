"""Request dumps of torch's flight recorder through a pipe that a C++ thread reads, even while the GIL is held.

    offer_dump_pipe(run, attempt)               # in a rank, before its process groups are made
    pipe_path(run, attempt, rank)               # writing a byte to it requests a dump
    dump_path(run, attempt, rank)               # where torch writes it

torch makes the pipe itself, for its default group on NCCL. Variables that the user has set stay as they are.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from .rundir import RunDir

__all__ = ["dump_path", "offer_dump_pipe", "pipe_path"]

PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
DUMP = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
_DUMP_NAMES = (DUMP, "TORCH_FR_DUMP_TEMP_FILE")


def pipe_path(run: RunDir, attempt: int, rank: int) -> Path:
    """The pipe of a rank; torch appends the rank and `.pipe` to the configured prefix."""
    return Path(f"{_prefix(run, attempt)}{rank}.pipe")


def dump_path(run: RunDir, attempt: int, rank: int) -> Path:
    """The dump of a rank; torch appends the rank to the configured prefix."""
    return Path(f"{_prefix(run, attempt)}{rank}")


def offer_dump_pipe(run: RunDir, attempt: int) -> bool:
    """Configure torch to create a pipe, with its dumps next to it; returns False if that would not work or the user has
    configured it already. If torch cannot create the pipe, it raises an error in a thread of its own, and the process
    ends. So a trial pipe is created first.
    """
    if os.environ.get(PIPE) or any(os.environ.get(name) for name in _DUMP_NAMES):
        return False
    prefix = _prefix(run, attempt)
    trial = Path(f"{prefix}{os.getpid()}.trial")
    try:
        trial.parent.mkdir(exist_ok=True)
        os.mkfifo(trial)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            trial.unlink()
    os.environ[PIPE] = os.environ[DUMP] = str(prefix)
    return True


def _prefix(run: RunDir, attempt: int) -> Path:
    return run.path.resolve() / "dumps" / f"attempt-{attempt}-rank-"
