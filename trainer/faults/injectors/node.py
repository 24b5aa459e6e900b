"""Faults of the node around the ranks: its watch process, its store, its clock.

ARM["watch_killed"](trigger, training)
distort_clock(faults, rank=2)
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from probes.tape import event_kinds
from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from trainer.faults.options import Fault
from trainer.faults.trigger import FaultyLoader, Trigger
from trainer.training.rank_training import Training

__all__ = ["ARM", "distort_clock"]

_SPOILT_BYTES = 3 * 4096
"""DuckDB's three headers: without them a file is not a database."""


def distort_clock(faults: Sequence[Fault], *, rank: int) -> None:
    """Shift this process's clock if `faults` has a `clock_shift` for this rank. Call it before anything is recorded,
    because the clock of a real node would be wrong from the start.
    """
    shift_s = sum(f.seconds or 600.0 for f in faults if f.kind == "clock_shift" and f.rank == rank)
    if not shift_s:
        return
    real, shift_ns = time.time_ns, int(shift_s * 1e9)
    time.time_ns = lambda: real() + shift_ns


def _arm_at_batch(act: Callable[[RunDir], None]) -> Callable[[Trigger, Training], None]:
    def arm(trigger: Trigger, training: Training) -> None:
        class Acting(FaultyLoader):
            def before(self) -> None:
                if trigger.due():
                    act(trigger.run)

        Acting(training)

    return arm


def _kill_watch(run: RunDir) -> None:
    for _, folder in run.node_dirs():
        events, _, _ = read_events(folder / "events.jsonl")
        started = [event["pid"] for event in events if event["kind"] == event_kinds.WATCH_STARTED]
        if started:
            os.kill(int(started[-1]), signal.SIGKILL)
            return


def _corrupt_store(run: RunDir) -> None:
    for store in run.stores():
        with store.open("r+b") as file:
            file.write(b"\xa5" * _SPOILT_BYTES)


def _only_report(run: RunDir) -> None:
    """Write only the event, at the step from which the drill counts. The clock is already wrong."""


ARM: Mapping[str, Callable[[Trigger, Training], None]] = {
    "watch_killed": _arm_at_batch(_kill_watch),
    "store_corrupt": _arm_at_batch(_corrupt_store),
    "clock_shift": _arm_at_batch(_only_report),
}
