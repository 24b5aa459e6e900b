"""Record how a node's ranks ended: by themselves, or stopped by the launcher.

was_stopped(-signal.SIGTERM, is_killed=False)                       # True
record_stop(events, rank=3, pid=4711, code=-signal.SIGTERM)
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

from torch.distributed.elastic.multiprocessing import ProcessFailure

from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.signal_names import signal_name
from trainer.exit_codes import EXIT_PREEMPTED

__all__ = ["failure_of", "mistake_in", "record_exit", "record_stop", "was_stopped"]

MAX_MESSAGE = 4000


def was_stopped(code: int | None, *, is_killed: bool) -> bool:
    """Return True if a rank ended because the launcher stopped it. `is_killed`: SIGTERM was not enough."""
    return code in (-signal.SIGTERM, EXIT_PREEMPTED) or is_killed


def failure_of(*, local_rank: int, pid: int, code: int, error_file: Path) -> ProcessFailure:
    """The failure of a rank as torch's agent returns it. `error_file`: file with the rank's exception, if any. An
    incomplete file (after a full disk, for example) is ignored, because torch would raise an error when reading it.
    """
    try:
        message = json.loads(error_file.read_bytes())["message"]
        is_whole = isinstance(message, str) or int(message["extraInfo"]["timestamp"]) >= 0
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        is_whole = False
    return ProcessFailure(local_rank=local_rank, pid=pid, exitcode=code, error_file=str(error_file) if is_whole else "")


def mistake_in(log: Path) -> str:
    """Return the one-line configuration error that a rank printed to this log; empty if there is none."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    messages = [line.removeprefix("rankscope: ") for line in lines if line.startswith("rankscope: ")]
    return messages[-1].rstrip(".") if messages else ""


def record_stop(events: EventWriter, *, rank: int, pid: int, code: int | None) -> None:
    """Record that the launcher ended a rank because the run stops or another rank failed."""
    events.write(event_kinds.RANK_STOPPED, exit_rank=rank, pid=pid, exit_code=code)


def record_exit(
    events: EventWriter, *, rank: int, pid: int, code: int, message: str, out_of_memory: str, is_blamed: bool
) -> None:
    """Record that a rank ended by itself. `is_blamed`: the end counts against the rank's device and node."""
    events.write(
        event_kinds.RANK_EXIT,
        exit_rank=rank,
        pid=pid,
        exit_code=code,
        signal=signal_name(code) or None,
        out_of_memory=out_of_memory or None,
        message=message[:MAX_MESSAGE],
        blamed=is_blamed,
    )
